"""Work on a store as a whole: verify, lint, merge."""
