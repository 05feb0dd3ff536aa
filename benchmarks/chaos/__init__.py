"""The benchmark `python -m benchmarks.chaos`."""
