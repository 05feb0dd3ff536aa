"""The benchmark `python -m benchmarks.pull`."""
