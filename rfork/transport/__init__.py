"""Transports: one-sided reads of image ranges over the links that this machine has."""
