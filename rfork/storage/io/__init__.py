"""Reads many ranges of blobs into CPU or GPU memory in parallel."""
