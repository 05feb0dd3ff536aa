"""Sources and targets over shared_memory in this process."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator
from pathlib import Path

from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.settings import InstanceSettings
from rfork.transport.base import Endpoint, Reader
from rfork.transport.same_host.client import ConnectionPool
from rfork.transport.same_host.connection import Message, UnixSocketConnection
from rfork.transport.shared_memory import SharedMemoryTransport
from tests.integration.shared_memory_node import SIZES
from tests.transport_contract import TOKEN, TransportPair, image_of, soon

LARGE = (32 * MIB, 1000, 30 * MIB + 5)


def transport(**settings: str) -> SharedMemoryTransport:
    return SharedMemoryTransport(InstanceSettings.model_validate(settings))


@contextlib.contextmanager
def pair(sizes: tuple[int, ...] = LARGE, **settings: str) -> Iterator[TransportPair]:
    made = TransportPair.create(transport(**settings), sizes)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def open_reader(endpoint: Endpoint, image: Image, **settings: str) -> Iterator[Reader]:
    reader = transport(**settings).connect(endpoint, image, lambda: TOKEN, soon())
    with contextlib.closing(reader):
        yield reader


def fork_of(endpoint: Endpoint, sizes: tuple[int, ...] = SIZES) -> Image:
    """Return a target that has read the complete image."""
    image = image_of(sizes)
    with open_reader(endpoint, image) as reader:
        reader.read(0, image.layout.image_bytes, soon())
    return image


def mapped_chunk_bytes(pid: int | str = "self") -> dict[str, int]:
    """Return a process's mapped chunk bytes: resident, proportional share, and private (Anonymous)."""
    gc.collect()  # garbage from earlier tests must not be collected during a measurement
    sums = dict.fromkeys(("Rss", "Pss", "Anonymous"), 0)
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = "memfd:rfork-chunk" in line
        elif ours and line.partition(":")[0] in sums:
            sums[line.partition(":")[0]] += int(line.split()[1]) << 10
    return sums


def send_request(endpoint: Endpoint, message: Message) -> tuple[Message, list[int]]:
    """Send a custom message and return the source's reply; the caller owns the descriptors."""
    connections = ConnectionPool(endpoint.parameters, 30)
    with contextlib.closing(connections), connections.lease(soon()) as connection:
        connection.send(message, deadline=soon())
        return receive_reply(connection)


def receive_reply(connection: UnixSocketConnection) -> tuple[Message, list[int]]:
    """Return the final reply; a slow source may send any number of "please wait" replies first."""
    while True:
        message, descriptors = connection.receive(soon())
        if "wait" not in message:
            return message, descriptors
