"""The gloo transport within one process: the contract, and readers that share."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from rfork.errors import SourceGone, SourceStalled, TransportUnusable, VersionMismatch
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.peer.lines import converse
from rfork.peer.memory import joined
from rfork.settings import Settings
from rfork.transport.base import Endpoint, Exporter, Line, Reader
from rfork.transport.collective import GlooTransport, gathering
from rfork.transport.collective.exporter import CollectiveExporter
from tests.integration.gloo_processes import ours, until
from tests.transport_contract import CONTRACT, MIXED, TOKEN, FakeGate, Pair, content, image_of, soon


class Leads:
    """A `LineHost` of one exporter."""

    def __init__(self, exporter: Exporter) -> None:
        self.exporter = exporter

    def has_channel(self, channel_id: str, fork_id: str) -> bool:
        return True

    def converse(self, channel_id: str, line: Line) -> None:
        self.exporter.converse(channel_id, line)


def talk_to(exporter: Exporter, channel_id: str) -> Callable[[], Line]:
    """Opens a line in memory to an exporter that has let the channel in."""

    def talk() -> Line:
        near, far = joined()
        threading.Thread(
            target=converse, args=(Leads(exporter), channel_id, far), name="rfork-line", daemon=True
        ).start()
        return near

    return talk


class GlooPair(Pair):
    """A pair whose reader holds a channel."""

    opened = 0

    def connect(self, image: Image | None = None) -> Reader:
        self.opened += 1
        channel_id = f"channel-{self.opened}"
        self.exporter.let_in(channel_id, "127.0.0.1")
        self.readers.append(
            self.transport.connect(
                self.exporter.endpoint(),
                image or self.target,
                lambda: self.token,
                soon(),
                talk_to(self.exporter, channel_id),
            )
        )
        return self.readers[-1]


@pytest.fixture
def pair() -> Iterator[GlooPair]:
    """A source and a target in this process; at the end none of their threads is left."""
    made = GlooPair.over(GlooTransport(Settings()))
    assert isinstance(made, GlooPair)
    yield made
    made.close()
    assert until(lambda: not ours()), ours()


@pytest.mark.parametrize("check", CONTRACT, ids=[check.__name__ for check in CONTRACT])
def test_gloo_keeps_the_contract(check: Callable[[Pair], None], pair: GlooPair) -> None:
    """Every check of the contract holds over gloo."""
    check(pair)


def test_small_tensors_and_blocks_come_out_right(pair: GlooPair) -> None:
    """Twenty thousand tensors, read in one go: in blocks, each packed."""
    sizes = [1 + index % 2000 for index in range(20_000)]
    pair.source = image_of([20 << 20, *sizes], seed=3)
    pair.target = image_of([20 << 20, *sizes])
    pair.exporter.close()
    pair.exporter = pair.transport.export(pair.source, pair.gate)
    pair.connect().read(0, pair.source.layout.image_bytes, soon())
    assert content(pair.source) == content(pair.target)


def readers_at_once(pair: GlooPair, images: list[Image]) -> list[Reader]:
    """Readers that connect at the same moment, so that they are one group."""
    connecting = [threading.Thread(target=pair.connect, args=(image,)) for image in images]
    for thread in connecting:
        thread.start()
    for thread in connecting:
        thread.join()
    return pair.readers


def read_at_once(readers: list[Reader], size: int) -> list[Exception]:
    """Each reads the whole image; what that raised."""
    raised: list[Exception] = []

    def read(reader: Reader) -> None:
        try:
            reader.read(0, size, soon())
        except (SourceGone, SourceStalled) as error:
            raised.append(error)

    threads = [threading.Thread(target=read, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def exporter_of(pair: GlooPair) -> CollectiveExporter:
    assert isinstance(pair.exporter, CollectiveExporter)
    return pair.exporter


def test_readers_of_one_host_share_what_they_all_want(
    pair: GlooPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that read the same at the same time get it by broadcast, and both get it right."""
    # However late this machine lets the second begin.
    monkeypatch.setattr(gathering, "MOST_MEMBERS", 2)
    monkeypatch.setattr(gathering, "GATHER_S", 30.0)
    monkeypatch.setattr(gathering, "LINGER_S", 30.0)
    sizes = (40 * MIB, 3, 1000, 24 * MIB)
    pair.exporter.close()
    pair.source = image_of(sizes, seed=1)
    pair.exporter = pair.transport.export(pair.source, pair.gate)
    images = [image_of(sizes), image_of(sizes)]
    readers = readers_at_once(pair, images)
    raised = read_at_once(readers, pair.source.layout.image_bytes)
    pair.close()
    exporter, whole = exporter_of(pair), content(pair.source)
    assert ([], [True, True]) == (raised, [content(image) == whole for image in images])
    assert exporter.broadcasts > 0
    assert exporter.broadcasts + exporter.sends < 2 * 5  # of five blocks, twice


def test_a_reader_that_leaves_holds_up_no_other(pair: GlooPair) -> None:
    """Its group breaks; the other's read goes on in the next one."""
    begun, release = threading.Event(), threading.Event()

    def hold(nbytes: int) -> None:
        begun.set()
        release.wait(30)

    targets = [pair.target, image_of(MIXED)]
    readers = readers_at_once(pair, targets)
    pair.gate.before_slice = hold
    size = pair.source.layout.image_bytes
    raised: list[list[Exception]] = []
    reading = threading.Thread(target=lambda: raised.append(read_at_once(readers, size)))
    reading.start()
    assert begun.wait(30)
    readers[0].close()
    release.set()
    reading.join()
    assert [SourceGone] == [type(error) for error in raised[0]]
    whole = content(pair.source)
    assert 1 == [content(target) == whole for target in targets].count(True)


def test_whom_the_other_torch_does_not_fit(pair: GlooPair) -> None:
    """It says so before a group is tried: the next transport is taken."""
    endpoint = Endpoint("gloo", {**pair.exporter.endpoint().parameters, "version": "1.0"})
    with pytest.raises(VersionMismatch, match=r"1\.0"):
        pair.transport.connect(endpoint, pair.target, lambda: TOKEN, soon())


def test_an_image_on_a_gpu_is_not_for_gloo(pair: GlooPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other transports are exported without it."""
    monkeypatch.setattr(Image, "devices", frozenset({torch.device("cuda:0")}))
    with pytest.raises(TransportUnusable, match="host memory"):
        pair.transport.export(pair.source, FakeGate())


def test_nothing_is_left_after_twenty_readers(pair: GlooPair) -> None:
    """No thread and no descriptor, neither here nor there: both are in this process."""

    def counts() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def once() -> None:
        reader = pair.connect()
        reader.read(0, 100, soon())
        reader.close()
        pair.exporter.let_out(f"channel-{pair.opened}")
        assert until(lambda: not ours())

    once()
    before = counts()
    for _ in range(20):
        once()
    assert until(lambda: counts() <= before), (before, counts())
