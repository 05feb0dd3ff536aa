"""The benchmark `python -m benchmarks.simulate`."""
