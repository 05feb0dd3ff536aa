"""The benchmark `python -m benchmarks.planner_load`."""
