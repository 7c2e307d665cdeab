"""View "tokens": batches of hidden states of tokens from all traces."""
