"""What CUDA's own handles need two processes to share. For both sides."""

from __future__ import annotations

import os


def process_namespace() -> str:
    """Names the PID namespace of this process within its host; "" where that cannot be told.

    A handle of cudaMalloc's memory names a process by its number, so it opens within one namespace only: from
    another the driver says "invalid device context". Descriptors of memory open in any.
    """
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
