"""Benchmarks, one module per question. Each runs as ``python -m benchmarks.NAME [--quick] [--json FILE]
[--plot FILE]``.
"""
