"""Contract of all transports, as checks that each transport's tests run: see `CONTRACT`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from rfork.errors import LeaseRejected, SourceBusy, SourceTimeout, SourceUnavailable, SourceWeightsChanged
from rfork.image.chunks import MIB
from rfork.image.host_memory import MIN_MAPPED_BYTES, host_view, separate_mappings
from rfork.image.layout import Layout, TensorSpec
from rfork.image.memory import Image
from rfork.transport.base import Exporter, Reader, Transport
from rfork.transport.shared_memory.page_remapper import has_private_mapping

TOKEN = "a-valid-token"
MIXED = (3 * MIB + 17, 5, 4096, *(1000 + index for index in range(1500)), MIB)
"""Sizes of tensors in bytes: large and tiny ones, more than one system call can handle."""
MAX_FREE_BLOCKS = 64
"""Attempts to allocate a tensor outside the heap."""


def image_of(sizes: Sequence[int], seed: int | None = None) -> Image:
    """Return an image of separately allocated byte tensors: random, or zeros without a seed."""
    length = sum(sizes)
    if seed is None:
        values = torch.zeros(1, dtype=torch.uint8).expand(length)
    else:
        values = torch.from_numpy(np.random.SFC64(seed).random_raw(length // 8 + 1).view(np.uint8))
    regions: list[torch.Tensor] = []
    specs: list[TensorSpec] = []
    offset = 0
    for index, size in enumerate(sizes):
        region = allocate(size)
        region.copy_(values[offset : offset + size])
        regions.append(region)
        specs.append(TensorSpec(f"tensor.{index}", "uint8", (size,), (1,), offset))
        offset += size
    return Image(Layout(tuple(specs), offset), regions)


def allocate(size: int) -> torch.Tensor:
    """Return a byte tensor that has a mapping of its own if it is large, whatever this process has freed before."""
    if size < MIN_MAPPED_BYTES:
        return torch.empty(size, dtype=torch.uint8)
    blocks: list[torch.Tensor] = []  # free blocks of the heap, which malloc prefers to a new mapping
    with separate_mappings():
        for _ in range(MAX_FREE_BLOCKS):
            blocks.append(torch.empty(size, dtype=torch.uint8))
            if has_own_mapping(blocks[-1]):
                break
    return blocks[-1]


def has_own_mapping(region: torch.Tensor) -> bool:
    """Return True if the C library has mapped this memory alone, so that its pages can be replaced."""
    before, rest = host_view(region.data_ptr() - 16, 16).cast("Q")
    return has_private_mapping(region.data_ptr(), region.nbytes, before, rest)


def content(image: Image, begin: int = 0, end: int | None = None) -> bytes:
    """Return the bytes of an image range."""
    with image.readable(begin, image.layout.image_bytes if end is None else end) as views:
        return b"".join(views)


@dataclass
class FakeGate:
    """Gate controlled by tests: the first `verified` bytes can be read with `TOKEN`."""

    verified: int = 1 << 62
    weights_changed: bool = False
    generation: int = 0
    before_slice: Callable[[int], None] = lambda nbytes: None
    admitted: list[tuple[int, int]] = field(default_factory=list)

    def authorize(self, token: str, begin: int, end: int) -> str:
        if token != TOKEN:
            raise LeaseRejected("no such lease")
        if self.weights_changed:
            raise SourceWeightsChanged("the weights have another generation")
        if end > self.verified:
            raise SourceBusy("not verified here yet")
        self.admitted.append((begin, end))
        return "fork-1"

    @contextmanager
    def read_guard(self, token: str, begin: int, end: int, abort: Callable[[], None]) -> Iterator[None]:
        self.authorize(token, begin, end)
        yield

    def version_tag(self) -> str:
        return f"generation-{self.generation}"

    def acquire_bytes(self, max_bytes: int, fork_id: str) -> int:
        if fork_id != "fork-1":
            raise LeaseRejected(f"no lease for {fork_id!r}")
        self.before_slice(max_bytes)
        return max_bytes


@dataclass
class TransportPair:
    """A source and a target connected by one transport."""

    transport: Transport
    gate: FakeGate
    source: Image
    target: Image
    exporter: Exporter
    token: str = TOKEN
    readers: list[Reader] = field(default_factory=list)

    @classmethod
    def create(cls, transport: Transport, sizes: Sequence[int] = MIXED) -> TransportPair:
        gate, source = FakeGate(), image_of(sizes, seed=1)
        return cls(transport, gate, source, image_of(sizes), transport.export(source, gate))

    def connect(self) -> Reader:
        endpoint = self.exporter.endpoint()
        self.readers.append(self.transport.connect(endpoint, self.target, lambda: self.token, soon()))
        return self.readers[-1]

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        self.exporter.close()


def soon(seconds: float = 30.0) -> float:
    """Return a deadline that a working transport always meets."""
    return time.monotonic() + seconds


def reads_correct_bytes(pair: TransportPair) -> None:
    """A read of the complete image makes the target's bytes equal to the source's."""
    reader = pair.connect()
    reader.read(0, pair.source.layout.image_bytes, soon())
    assert content(pair.source) == content(pair.target)


def reads_only_requested_range(pair: TransportPair) -> None:
    """Bytes outside the requested range do not change."""
    begin, end = 3 * MIB + 20, 4 * MIB + 1
    reader = pair.connect()
    reader.read(begin, end, soon())
    rest = pair.source.layout.image_bytes - end
    assert bytes(begin) + content(pair.source, begin, end) + bytes(rest) == content(pair.target)


def reads_empty_range(pair: TransportPair) -> None:
    """A read of no bytes completes immediately."""
    reader = pair.connect()
    reader.read(7, 7, soon())
    assert bytes(pair.target.layout.image_bytes) == content(pair.target)


def serves_many_threads(pair: TransportPair) -> None:
    """Eight threads share one reader, each with its own ranges."""
    size, step = pair.source.layout.image_bytes, 300_001
    reader = pair.connect()
    ranges = [(at, min(at + step, size)) for at in range(0, size, step)]

    def read(share: list[tuple[int, int]]) -> None:
        for begin, end in share:
            reader.read(begin, end, soon())

    threads = [threading.Thread(target=read, args=(ranges[index::8],)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert content(pair.source) == content(pair.target)


def rejects_out_of_bounds_range(pair: TransportPair) -> None:
    """A range outside the image is an error of the caller."""
    reader = pair.connect()
    with pytest.raises(ValueError, match="image"):
        reader.read(0, pair.source.layout.image_bytes + 1, soon())


def rejects_invalid_lease(pair: TransportPair) -> None:
    """An invalid token results in LeaseRejected and no bytes."""
    pair.token = "forged"
    reader = pair.connect()
    with pytest.raises(LeaseRejected):
        reader.read(0, 1000, soon())
    assert bytes(1000) == content(pair.target, 0, 1000)


def uses_renewed_token(pair: TransportPair) -> None:
    """A token renewed after connecting is used."""
    pair.token = "expired"
    reader = pair.connect()
    pair.token = TOKEN
    reader.read(0, 1000, soon())
    assert content(pair.source, 0, 1000) == content(pair.target, 0, 1000)


def withholds_unverified_chunks(pair: TransportPair) -> None:
    """A relay serves verified chunks and is busy for the others."""
    pair.gate.verified = 5000
    reader = pair.connect()
    reader.read(0, 5000, soon())
    with pytest.raises(SourceBusy):
        reader.read(4999, 5001, soon())
    assert content(pair.source, 0, 5000) + bytes(1) == content(pair.target, 0, 5001)


def fences_changed_weights(pair: TransportPair) -> None:
    """After the weights have changed, readers of the old ones get SourceWeightsChanged."""
    reader = pair.connect()
    pair.gate.weights_changed = True
    with pytest.raises(SourceWeightsChanged):
        reader.read(0, 1000, soon())


def fences_weights_changed_mid_read(pair: TransportPair) -> None:
    """A change between two slices of a read ends it with SourceWeightsChanged."""

    def change(nbytes: int) -> None:
        pair.gate.weights_changed = sum(end - begin for begin, end in pair.gate.admitted) > 0

    pair.gate.before_slice = change
    reader = pair.connect()
    with pytest.raises(SourceWeightsChanged):
        reader.read(0, pair.source.layout.image_bytes, soon())


def raises_source_unavailable(pair: TransportPair) -> None:
    """After the exporter is closed, reads and new connections raise SourceUnavailable."""
    reader = pair.connect()
    endpoint = pair.exporter.endpoint()
    reader.read(0, 1000, soon())
    pair.exporter.close()
    with pytest.raises(SourceUnavailable):
        reader.read(0, 1000, soon())
    with pytest.raises(SourceUnavailable):
        pair.transport.connect(endpoint, pair.target, lambda: TOKEN, soon())


def respects_deadline(pair: TransportPair) -> None:
    """A source that blocks past the deadline results in SourceTimeout."""
    release = threading.Event()

    def block_grant(nbytes: int) -> None:
        release.wait(0.4)

    pair.gate.before_slice = block_grant
    reader = pair.connect()
    with pytest.raises(SourceTimeout):
        reader.read(0, pair.source.layout.image_bytes, time.monotonic() + 0.2)
    release.set()


def rejects_expired_deadline(pair: TransportPair) -> None:
    """A deadline in the past results in SourceTimeout."""
    reader = pair.connect()
    with pytest.raises(SourceTimeout):
        reader.read(0, 1000, time.monotonic() - 1)


def close_ends_reads(pair: TransportPair) -> None:
    """Closing a reader ends the current read and every later one with SourceUnavailable."""
    begun, release = threading.Event(), threading.Event()

    def block_grant(nbytes: int) -> None:
        begun.set()
        release.wait(30)

    pair.gate.before_slice = block_grant
    reader = pair.connect()
    raised: list[type[Exception]] = []

    def read() -> None:
        try:
            reader.read(0, pair.source.layout.image_bytes, soon())
        except SourceUnavailable as error:
            raised.append(type(error))

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(30)
    reader.close()
    release.set()
    thread.join()
    with pytest.raises(SourceUnavailable):
        reader.read(0, 1000, soon())
    reader.close()
    assert [SourceUnavailable] == raised


CONTRACT: tuple[Callable[[TransportPair], None], ...] = (
    reads_correct_bytes,
    reads_only_requested_range,
    reads_empty_range,
    serves_many_threads,
    rejects_out_of_bounds_range,
    rejects_invalid_lease,
    uses_renewed_token,
    withholds_unverified_chunks,
    fences_changed_weights,
    fences_weights_changed_mid_read,
    raises_source_unavailable,
    respects_deadline,
    rejects_expired_deadline,
    close_ends_reads,
)
