"""The shared_memory transport: instances of one host that keep their weights in host memory, and share it.

A target maps the chunks that the source gives it, copy on write, in place of its tensors' own pages: no
byte is copied on its side, and however many instances there are, their weights are in memory once, beside
the source's own copy. Needs Linux.
"""

from rfork.transport.shared_memory.transport import SharedMemoryTransport

__all__ = ["SharedMemoryTransport"]
