"""Time from the start of an engine's server to its first token: see `python -m benchmarks.ready`."""
