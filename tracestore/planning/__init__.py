"""What a training takes: measured memory, time and the batch that fits."""
