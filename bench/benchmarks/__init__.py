"""Benchmarks for asv: `make asv`, bench/README.md. Less is better in every one of them."""
