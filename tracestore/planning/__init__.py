"""Memory and time that a training takes, and the batch size that fits."""
