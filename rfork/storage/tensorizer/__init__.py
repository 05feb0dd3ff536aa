"""Reader and writer for tensorizer's ``.tensors`` files."""
