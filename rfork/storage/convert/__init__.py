"""From one format into another."""
