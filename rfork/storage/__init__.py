"""Tensor files as sources: what a fork falls back to."""
