"""Recovery from out-of-memory errors: the guard of training steps, its snapshots and memory limits."""
