"""The HTML pages of training runs, of comparisons of runs and of benchmarks."""
