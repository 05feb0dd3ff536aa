"""What every transport promises, as checks that each transport's tests run: see `CONTRACT`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from rfork.errors import LeaseRefused, SourceBusy, SourceChanged, SourceGone, SourceStalled
from rfork.image.chunks import MIB
from rfork.image.layout import Layout
from rfork.image.memory import Image
from rfork.image.specs import TensorSpec
from rfork.transport.base import Exporter, Reader, Transport

TOKEN = "a-valid-token"
MIXED = (3 * MIB + 17, 5, 4096, *(1000 + index for index in range(1500)), MIB)
"""Sizes of tensors, in bytes: large and tiny ones, more than one system call can take."""


def image_of(sizes: Sequence[int], seed: int | None = None) -> Image:
    """An image of separately allocated byte tensors: random ones, or zeros without a seed."""
    generator = torch.Generator()
    regions: list[torch.Tensor] = []
    specs: list[TensorSpec] = []
    offset = 0
    for index, size in enumerate(sizes):
        if seed is None:
            regions.append(torch.zeros(size, dtype=torch.uint8))
        else:
            generator.manual_seed(seed + index)
            regions.append(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator))
        specs.append(TensorSpec(f"tensor.{index}", "uint8", (size,), (1,), offset))
        offset += size
    return Image(Layout(tuple(specs), offset), regions)


def content(image: Image, begin: int = 0, end: int | None = None) -> bytes:
    """The bytes of an image range."""
    with image.readable(begin, image.layout.image_bytes if end is None else end) as views:
        return b"".join(views)


@dataclass
class FakeGate:
    """A gate that tests turn: `verified` bytes from the start can be read, with `TOKEN`."""

    verified: int = 1 << 62
    changed: bool = False
    generation: int = 0
    before_slice: Callable[[int], None] = lambda nbytes: None
    admitted: list[tuple[int, int]] = field(default_factory=list)

    def admit(self, token: str, begin: int, end: int) -> str:
        if token != TOKEN:
            raise LeaseRefused("no such lease")
        if self.changed:
            raise SourceChanged("the weights have another generation")
        if end > self.verified:
            raise SourceBusy("not verified here yet")
        self.admitted.append((begin, end))
        return "fork-1"

    @contextmanager
    def reading(self, token: str, begin: int, end: int, cut: Callable[[], None]) -> Iterator[None]:
        self.admit(token, begin, end)
        yield

    def etag(self) -> str:
        return f"generation-{self.generation}"

    def grant(self, most: int, fork_id: str) -> int:
        if fork_id != "fork-1":
            raise LeaseRefused(f"nothing is leased to {fork_id!r}")
        self.before_slice(most)
        return most


@dataclass
class Pair:
    """A source and a target over one transport."""

    transport: Transport
    gate: FakeGate
    source: Image
    target: Image
    exporter: Exporter
    token: str = TOKEN
    readers: list[Reader] = field(default_factory=list)

    @classmethod
    def over(cls, transport: Transport, sizes: Sequence[int] = MIXED) -> Pair:
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
    """A deadline that a working transport never meets."""
    return time.monotonic() + seconds


def gives_the_right_bytes(pair: Pair) -> None:
    """A read of the whole image makes the target's bytes the source's."""
    reader = pair.connect()
    reader.read(0, pair.source.layout.image_bytes, soon())
    assert content(pair.source) == content(pair.target)


def gives_only_what_was_asked(pair: Pair) -> None:
    """Bytes outside the range that is read stay as they were."""
    begin, end = 3 * MIB + 20, 4 * MIB + 1
    reader = pair.connect()
    reader.read(begin, end, soon())
    rest = pair.source.layout.image_bytes - end
    assert bytes(begin) + content(pair.source, begin, end) + bytes(rest) == content(pair.target)


def gives_nothing_for_an_empty_range(pair: Pair) -> None:
    """A read of no bytes is done at once."""
    reader = pair.connect()
    reader.read(7, 7, soon())
    assert bytes(pair.target.layout.image_bytes) == content(pair.target)


def serves_many_threads(pair: Pair) -> None:
    """Eight threads share one reader, each with ranges of its own."""
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


def knows_the_ends_of_the_image(pair: Pair) -> None:
    """A range that is not in the image is the caller's error."""
    reader = pair.connect()
    with pytest.raises(ValueError, match="image"):
        reader.read(0, pair.source.layout.image_bytes + 1, soon())


def refuses_a_wrong_lease(pair: Pair) -> None:
    """A token that the gate does not know gives LeaseRefused and no byte."""
    pair.token = "forged"
    reader = pair.connect()
    with pytest.raises(LeaseRefused):
        reader.read(0, 1000, soon())
    assert bytes(1000) == content(pair.target, 0, 1000)


def takes_the_newest_token(pair: Pair) -> None:
    """A token that was renewed after connecting is the one that is shown."""
    pair.token = "expired"
    reader = pair.connect()
    pair.token = TOKEN
    reader.read(0, 1000, soon())
    assert content(pair.source, 0, 1000) == content(pair.target, 0, 1000)


def withholds_what_is_not_verified(pair: Pair) -> None:
    """A relay gives what it has verified and is busy for the rest."""
    pair.gate.verified = 5000
    reader = pair.connect()
    reader.read(0, 5000, soon())
    with pytest.raises(SourceBusy):
        reader.read(4999, 5001, soon())
    assert content(pair.source, 0, 5000) + bytes(1) == content(pair.target, 0, 5001)


def fences_changed_weights(pair: Pair) -> None:
    """Once the weights have changed, readers of the old ones get SourceChanged."""
    reader = pair.connect()
    pair.gate.changed = True
    with pytest.raises(SourceChanged):
        reader.read(0, 1000, soon())


def fences_weights_that_change_in_mid_read(pair: Pair) -> None:
    """A change between two slices of one read ends it with SourceChanged."""

    def change(nbytes: int) -> None:
        pair.gate.changed = sum(end - begin for begin, end in pair.gate.admitted) > 0

    pair.gate.before_slice = change
    reader = pair.connect()
    with pytest.raises(SourceChanged):
        reader.read(0, pair.source.layout.image_bytes, soon())


def says_when_the_source_is_gone(pair: Pair) -> None:
    """After the exporter is closed, reads and new connections give SourceGone."""
    reader = pair.connect()
    endpoint = pair.exporter.endpoint()
    reader.read(0, 1000, soon())
    pair.exporter.close()
    with pytest.raises(SourceGone):
        reader.read(0, 1000, soon())
    with pytest.raises(SourceGone):
        pair.transport.connect(endpoint, pair.target, lambda: TOKEN, soon())


def keeps_the_deadline(pair: Pair) -> None:
    """A source that holds back past the deadline gives SourceStalled."""
    release = threading.Event()

    def hold(nbytes: int) -> None:
        release.wait(0.4)

    pair.gate.before_slice = hold
    reader = pair.connect()
    with pytest.raises(SourceStalled):
        reader.read(0, pair.source.layout.image_bytes, time.monotonic() + 0.2)
    release.set()


def reads_nothing_past_the_deadline(pair: Pair) -> None:
    """A deadline that has passed already gives SourceStalled."""
    reader = pair.connect()
    with pytest.raises(SourceStalled):
        reader.read(0, 1000, time.monotonic() - 1)


def ends_reads_when_the_reader_closes(pair: Pair) -> None:
    """Closing a reader ends the read under way, and every later one, with SourceGone."""
    begun, release = threading.Event(), threading.Event()

    def hold(nbytes: int) -> None:
        begun.set()
        release.wait(30)

    pair.gate.before_slice = hold
    reader = pair.connect()
    raised: list[type[Exception]] = []

    def read() -> None:
        try:
            reader.read(0, pair.source.layout.image_bytes, soon())
        except SourceGone as error:
            raised.append(type(error))

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(30)
    reader.close()
    release.set()
    thread.join()
    with pytest.raises(SourceGone):
        reader.read(0, 1000, soon())
    reader.close()
    assert [SourceGone] == raised


CONTRACT: tuple[Callable[[Pair], None], ...] = (
    gives_the_right_bytes,
    gives_only_what_was_asked,
    gives_nothing_for_an_empty_range,
    serves_many_threads,
    knows_the_ends_of_the_image,
    refuses_a_wrong_lease,
    takes_the_newest_token,
    withholds_what_is_not_verified,
    fences_changed_weights,
    fences_weights_that_change_in_mid_read,
    says_when_the_source_is_gone,
    keeps_the_deadline,
    reads_nothing_past_the_deadline,
    ends_reads_when_the_reader_closes,
)
