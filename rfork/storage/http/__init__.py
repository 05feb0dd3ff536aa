"""Blobs over HTTP range requests, also for S3: retried, hedged, received in place."""
