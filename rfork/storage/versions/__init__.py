"""Versions of weights: the hub commit or the fingerprint that identifies one set of weight files."""
