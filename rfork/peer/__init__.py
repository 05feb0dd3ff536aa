"""gRPC between instances: manifests, chunk progress and channels. The image bytes travel over a transport."""
