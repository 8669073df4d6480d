"""Benchmarks: `python -m benchmarks.NAME` writes benchmarks/results."""
