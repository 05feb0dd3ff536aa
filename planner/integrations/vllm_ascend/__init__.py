"""Protocols of other planners, so that their clients can use this one as it is."""
