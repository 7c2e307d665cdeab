"""Benchmarks in asv's form: `asv run --config bench/asv.conf.json`, or by bench/run.py."""
