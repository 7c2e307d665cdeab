"""Training steps that survive running out of memory: the guard, its snapshots and its limits."""
