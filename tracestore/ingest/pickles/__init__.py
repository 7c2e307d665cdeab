"""Read pickles as data: the names that they may have, and what stands in for each."""
