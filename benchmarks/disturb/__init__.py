"""The benchmark `python -m benchmarks.disturb`."""
