"""Namespaces that two processes must share for CUDA's own handles. For both sides."""

from __future__ import annotations

from collections.abc import Mapping

from rfork.transport.cuda_ipc import protocol
from rfork.transport.unix_socket.host_identity import namespace

_NAMES = {protocol.PROCESSES: "PID", protocol.IPC: "IPC"}


def namespaces() -> dict[str, str]:
    """Return endpoint parameters with the PID and IPC namespaces of this process; "" if unknown.

    A handle of cudaMalloc memory contains a process id, and the driver opens it only within one IPC
    namespace; otherwise it reports "invalid device context". Descriptors of memory work across namespaces.
    """
    return {protocol.PROCESSES: namespace("pid"), protocol.IPC: namespace("ipc")}


def differing_namespaces(parameters: Mapping[str, str]) -> list[str]:
    """Return those of "PID" and "IPC" for which this process and the source's endpoint differ."""
    return [_NAMES[name] for name, local in namespaces().items() if parameters.get(name, "") != local]
