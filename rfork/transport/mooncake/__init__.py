"""One-sided reads through Mooncake's TransferEngine: over RDMA, or over TCP where allowed."""

from rfork.transport.mooncake.transport import TransferEngineTransport

__all__ = ["TransferEngineTransport"]
