"""Planner protocol of vLLM-Ascend, so that its clients can use this planner unchanged."""
