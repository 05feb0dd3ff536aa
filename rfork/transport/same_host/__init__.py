"""Unix sockets that pass descriptors, and memory files: shared by the transports between processes of a host."""
