"""gRPC between instances: manifests, chunk progress, channels. The bytes travel over a transport."""
