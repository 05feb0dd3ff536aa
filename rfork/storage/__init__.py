"""Tensor files in storage: sources for cold starts and fallbacks for forks."""
