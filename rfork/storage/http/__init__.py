"""Blobs behind HTTP range requests, S3's too: retried, hedged, straight into memory."""
