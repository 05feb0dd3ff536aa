"""The shared_memory transport: instances on one host that keep their weights in host memory share it.

A target maps the source's chunks copy-on-write in place of its tensors' own pages. No byte is copied on its
side, and all targets of a host share one copy of the weights, in addition to the source's own. Needs Linux.
"""

from rfork.transport.shared_memory.transport import SharedMemoryTransport

__all__ = ["SharedMemoryTransport"]
