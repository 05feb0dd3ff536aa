"""Conversion between tensor file formats."""
