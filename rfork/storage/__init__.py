"""Tensor files as sources: what a cold start reads, and what a fork falls back to."""
