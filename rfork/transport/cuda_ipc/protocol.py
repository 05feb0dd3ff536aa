"""Protocol of cuda_ipc, over a same-host connection.

The target sends requests; the source replies once to each, in order, with the result or with `encode_error`::

    {"operation": "allocations", "token", "from"}    {"allocations": [[base, size, device, type], …], "count"}
    {"operation": "handles", "token", "allocations"} {"handles": ["hex" or ""]}, plus a descriptor for each ""
    {"operation": "pin", "token"}                    {"pinned": 1}, the first time with a descriptor
    {"operation": "acquire", "token", "begin", "end", "release"}
                                                     {"released", "granted": bytes}, plus a descriptor for host memory
    {"operation": "release"}                         {"released": 1}

*Allocations* are those that contain the image; `device` is an index into the endpoint's devices, `type` into
`rfork.transport.cuda_ipc.driver.HANDLE_TYPES`.

The target keeps the descriptor of a *pin* open as long as it has any allocation opened: when it closes, the
source knows that the memory may be freed. Nothing else is sent on the pin's connection: the target sends its
newest token every ten seconds, and either side may end it, the source when the lease has expired.

*Granted* are the first bytes of the requested range: they do not change until they are released or the
connection closes. A connection has at most one granted range. An `acquire` with `release` 1 releases it and
requests the next one, so that a read of n ranges takes n + 1 exchanges: each is handled by the interpreter that
also runs the inference engine. Its reply, even an error, has `released` 1 if the release is confirmed.

The target trusts the bytes only after the reply to their release: it proves that the source was alive until the
copies had finished. The descriptor of a grant is a file of its bytes in host memory, in image order; it is
emptied afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rfork.image.chunks import MIB
from rfork.transport.same_host.host_identity import namespace

SLICE_BYTES: Final = 256 * MIB
"""Maximum bytes granted at once: 0.6 ms over NVLink (450 GB/s) and 4.9 ms over PCIe 5 (55 GB/s), so that four
concurrent reads end well within the 0.1 s that a fence waits for them.
"""
HOST_SLICE_BYTES: Final = 64 * MIB
"""Maximum bytes granted at once of a range with more bytes in host memory: the source copies them into a file."""
ALLOCATIONS_PER_PAGE: Final = 1000
HANDLES_PER_PAGE: Final = 32
"""Each may have a descriptor; one message carries up to 64."""

DEVICES: Final = "devices"
"""Endpoint parameter: the UUIDs of the source's GPUs, comma separated."""
PROCESSES: Final = "processes"
"""Endpoint parameter: the source's PID namespace."""
IPC: Final = "ipc"
"""Endpoint parameter: the source's IPC namespace."""


def namespaces() -> dict[str, str]:
    """Return endpoint parameters with the PID and IPC namespaces of this process; "" if unknown.

    A handle of cudaMalloc memory contains a process id, and the driver opens it only within one IPC
    namespace; otherwise it reports "invalid device context". Descriptors of memory work across namespaces.
    """
    return {PROCESSES: namespace("pid"), IPC: namespace("ipc")}


def differing_namespaces(parameters: Mapping[str, str]) -> list[str]:
    """Return those of "PID" and "IPC" for which this process and the source's endpoint differ."""
    names = {PROCESSES: "PID", IPC: "IPC"}
    return [names[name] for name, local in namespaces().items() if parameters.get(name, "") != local]
