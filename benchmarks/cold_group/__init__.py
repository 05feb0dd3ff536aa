"""The benchmark `python -m benchmarks.cold_group`."""
