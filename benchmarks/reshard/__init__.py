"""A fork across layouts against a fork between equal ones; see `benchmarks.reshard.__main__`."""
