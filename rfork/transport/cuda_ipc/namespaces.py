"""What CUDA's own handles need two processes to share. For both sides."""

from __future__ import annotations

from collections.abc import Mapping

from rfork.transport.cuda_ipc import words
from rfork.transport.same_host.host import namespace

_NAMES = {words.PROCESSES: "PID", words.IPC: "IPC"}


def namespaces() -> dict[str, str]:
    """Endpoint parameters that name the PID and the IPC namespace of this process; "" where that is not told.

    A handle of cudaMalloc's memory names a process by its number, and the driver lets it be opened within one
    IPC namespace only: from another it says "invalid device context". Descriptors of memory open in any.
    """
    return {words.PROCESSES: namespace("pid"), words.IPC: namespace("ipc")}


def apart(parameters: Mapping[str, str]) -> list[str]:
    """Which of the two this process does not share with the source whose endpoint says so: "PID", "IPC"."""
    return [_NAMES[name] for name, here in namespaces().items() if parameters.get(name, "") != here]
