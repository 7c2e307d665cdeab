"""Convert trace files into a store: `tracestore convert`, also `python -m tracestore.convert`."""
