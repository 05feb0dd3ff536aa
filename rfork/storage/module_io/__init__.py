"""Loads modules from storage and saves them."""
