"""The cuda_ipc transport: weights copied from GPU to GPU of one host, out of the source's own memory."""

from __future__ import annotations

from rfork.transport.cuda_ipc.transport import CudaIpcTransport

__all__ = ["CudaIpcTransport"]
