"""Reads a URI as named tensors: format detection, safetensors files and folders."""
