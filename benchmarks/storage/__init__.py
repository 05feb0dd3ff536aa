"""The benchmark `python -m benchmarks.storage`."""
