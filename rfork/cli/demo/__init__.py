"""`rfork demo` and its model."""
