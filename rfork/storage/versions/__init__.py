"""Versions of weights: the hub commit or the fingerprint that identifies a set of weight files."""
