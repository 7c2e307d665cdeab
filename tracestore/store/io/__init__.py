"""File access for stores on a local disk: reading, atomic writing, locks, ownership checks."""
