"""What transports between two processes of one host stand on: Unix sockets that pass descriptors."""
