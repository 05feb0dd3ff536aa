"""Unix sockets that pass descriptors between two processes of a host; used by the same-host transports."""
