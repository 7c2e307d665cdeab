"""Parts of several models: their options, readers of layers, dropout and number formats."""
