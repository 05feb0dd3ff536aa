"""The engine that fills memory from many ranges of blobs at once, a GPU's too."""
