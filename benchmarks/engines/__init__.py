"""Real engines beside one another: see `python -m benchmarks.engines`."""
