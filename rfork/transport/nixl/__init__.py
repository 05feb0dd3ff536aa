"""One-sided reads through NIXL: over RDMA, the fabric of another of its backends, or TCP where allowed."""

from rfork.transport.nixl.transport import NixlTransport

__all__ = ["NixlTransport"]
