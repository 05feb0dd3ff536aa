"""tensorizer's ``.tensors`` files, read and written."""
