"""Images in storage: written, restored, listed, verified, removed."""
