"""Benchmarks of one machine's GPUs; with `--device cpu` each runs the same code at a small size."""
