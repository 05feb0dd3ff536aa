"""The cuda_ipc transport: copies weights between GPUs of one host, directly from the source's memory."""

from __future__ import annotations

from rfork.transport.cuda_ipc.transport import CudaIpcTransport

__all__ = ["CudaIpcTransport"]
