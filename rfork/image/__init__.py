"""The unit of transfer: capture of a module, layout, chunks, digests, manifest, and the image in memory."""
