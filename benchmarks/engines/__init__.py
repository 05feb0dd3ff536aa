"""Comparison of real engines: see `python -m benchmarks.engines`."""
