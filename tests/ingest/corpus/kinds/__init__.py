"""The kinds of the main corpus, a module per family of containers and structures."""
