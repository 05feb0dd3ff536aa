"""Generators of the reference pages, which read the code at each build (`pages`)."""
