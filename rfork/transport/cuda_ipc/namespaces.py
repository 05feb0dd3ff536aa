"""What CUDA's own handles need two processes to share. For both sides."""

from __future__ import annotations

from collections.abc import Mapping

from rfork.transport.cuda_ipc import protocol
from rfork.transport.unix_socket.host_identity import namespace

_NAMES = {protocol.PROCESSES: "PID", protocol.IPC: "IPC"}


def namespaces() -> dict[str, str]:
    """Endpoint parameters that name the PID and the IPC namespace of this process; "" where that is not told.

    A handle of cudaMalloc's memory names a process by its number, and the driver lets it be opened within one
    IPC namespace only: from another it says "invalid device context". Descriptors of memory open in any.
    """
    return {protocol.PROCESSES: namespace("pid"), protocol.IPC: namespace("ipc")}


def differing_namespaces(parameters: Mapping[str, str]) -> list[str]:
    """Which of the two this process does not share with the source whose endpoint says so: "PID", "IPC"."""
    return [_NAMES[name] for name, here in namespaces().items() if parameters.get(name, "") != here]
