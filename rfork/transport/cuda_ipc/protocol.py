"""What the two sides of cuda_ipc say to one another, over a same-host connection.

The target asks, the source answers each question once, in order; a refusal is `encode_error` its error::

    {"ask": "areas", "token", "from"}       {"areas": [[base, size, device, kind], …], "count"}
    {"ask": "handles", "token", "areas"}    {"handles": ["hex" or ""]} and a descriptor for each that is ""
    {"ask": "hold", "token"}                {"held": 1}, the first time with a descriptor
    {"ask": "borrow", "token", "begin", "end"}   {"lent": bytes}, and a descriptor where host memory is in it
    {"ask": "return"}                       {"returned": 1}

*Areas* are the allocations that hold the image; `device` counts the endpoint's devices, `kind` those of
`rfork.transport.cuda_ipc.driver.HANDLE_TYPES`. The descriptor of *hold* stays open in the target for as long as it
has any of them opened: its end tells the source that the memory may be freed. Its connection does nothing
else: the target shows its newest token on it every `TOKEN_REFRESH_S`, and either side ends it, the source when the
lease is over. What is *lent* is the first so many bytes of what was asked: they do not change until they are
returned, or the connection ends. A target believes what it read only once the source has said that it is
returned: the source then lived until the copies had ended, and a message to one that is dying does not tell.
The descriptor of a loan is a file of the loan's bytes in host memory, in image order; it is empty after that.
"""

from __future__ import annotations

from typing import Final

from rfork.image.chunks import MIB

SLICE_BYTES: Final = 64 * MIB
"""Most bytes lent at once: under a millisecond from GPU to GPU, so a fence waits for little."""
ALLOCATIONS_PER_PAGE: Final = 1000
HANDLES_PER_PAGE: Final = 32
"""Each may come with a descriptor, of which one message takes 64."""

DEVICES: Final = "devices"
"""Endpoint parameter: the UUIDs of the source's GPUs, comma separated."""
PROCESSES: Final = "processes"
"""Endpoint parameter: the source's PID namespace."""
IPC: Final = "ipc"
"""Endpoint parameter: the source's IPC namespace."""
TOKEN_REFRESH_S: Final = 10.0
"""Seconds after which who holds on shows its newest token again; the source waits for it a minute."""
