"""Benchmarks for asv; see bench/README.md. Lower is better in all of them."""
