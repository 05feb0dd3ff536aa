"""The benchmark `python -m benchmarks.fanout`."""
