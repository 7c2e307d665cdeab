"""Reading a store: its generation, index, traces, and the arrays that batches are gathered from."""
