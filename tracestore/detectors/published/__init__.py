"""Published detectors that work on features of the traces: probes, uncertainties, attention and hidden scores."""
