"""A fork from slow sources against the target's own load from disk; see `benchmarks.race.__main__`."""
