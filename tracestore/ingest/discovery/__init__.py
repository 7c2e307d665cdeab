"""Sources of a folder: the files that are read together, and the tables that belong to them."""
