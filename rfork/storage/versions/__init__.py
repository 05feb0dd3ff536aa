"""Versions of weights: the hub commit or the fingerprint that distinguishes one set of weight files from another."""
