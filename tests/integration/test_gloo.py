"""The gloo transport within one process: the contract, and concurrent readers."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from rfork.errors import SourceTimeout, SourceUnavailable, TransportUnavailable, VersionMismatch
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.peer.control_stream import serve_control_stream
from rfork.settings import InstanceSettings
from rfork.testing.peers import stream_pair
from rfork.transport.base import ControlStream, Endpoint, Exporter, Reader
from rfork.transport.collective import gloo_transport, source_group
from rfork.transport.collective.exporter import CollectiveExporter
from tests.integration.gloo_processes import running_threads, wait_until
from tests.transport_contract import CONTRACT, MIXED, TOKEN, FakeGate, TransportPair, content, image_of, soon


class GlooStreamBackend:
    """`StreamBackend` of one exporter."""

    def __init__(self, exporter: Exporter) -> None:
        self.exporter = exporter

    def has_channel(self, channel_id: str, fork_id: str) -> bool:
        return True

    def control_stream(self, channel_id: str, line: ControlStream) -> None:
        self.exporter.run_control_stream(channel_id, line)


def control_stream_opener(exporter: Exporter, channel_id: str) -> Callable[[], ControlStream]:
    """Opens an in-memory control stream to an exporter that has admitted the channel."""

    def talk() -> ControlStream:
        near, far = stream_pair()
        threading.Thread(
            target=serve_control_stream,
            args=(GlooStreamBackend(exporter), channel_id, far),
            name="rfork-control",
            daemon=True,
        ).start()
        return near

    return talk


class GlooPair(TransportPair):
    """A pair whose reader owns a channel."""

    opened = 0

    def connect(self, image: Image | None = None) -> Reader:
        self.opened += 1
        channel_id = f"channel-{self.opened}"
        self.exporter.authorize_peer(channel_id, "127.0.0.1")
        self.readers.append(
            self.transport.connect(
                self.exporter.endpoint(),
                image or self.target,
                lambda: self.token,
                soon(),
                control_stream_opener(self.exporter, channel_id),
            )
        )
        return self.readers[-1]


@pytest.fixture
def pair() -> Iterator[GlooPair]:
    """A source and a target in this process; none of their threads is left at the end."""
    made = GlooPair.create(gloo_transport(InstanceSettings()))
    assert isinstance(made, GlooPair)
    yield made
    made.close()
    assert wait_until(lambda: not running_threads()), running_threads()


@pytest.mark.parametrize("check", CONTRACT, ids=[check.__name__ for check in CONTRACT])
def test_gloo_keeps_the_contract(check: Callable[[TransportPair], None], pair: GlooPair) -> None:
    """Every check of the contract holds over gloo."""
    check(pair)


def test_small_tensors_and_blocks_are_right(pair: GlooPair) -> None:
    """Twenty thousand tensors, read in one call: in blocks, each packed."""
    sizes = [1 + index % 2000 for index in range(20_000)]
    pair.source = image_of([20 << 20, *sizes], seed=3)
    pair.target = image_of([20 << 20, *sizes])
    pair.exporter.close()
    pair.exporter = pair.transport.export(pair.source, pair.gate)
    pair.connect().read(0, pair.source.layout.image_bytes, soon())
    assert content(pair.source) == content(pair.target)


def readers_at_once(pair: GlooPair, images: list[Image]) -> list[Reader]:
    """Readers that connect at the same moment, so that they form one group."""
    connecting = [threading.Thread(target=pair.connect, args=(image,)) for image in images]
    for thread in connecting:
        thread.start()
    for thread in connecting:
        thread.join()
    return pair.readers


def read_at_once(readers: list[Reader], size: int) -> list[Exception]:
    """Read the complete image with each; return the errors raised."""
    raised: list[Exception] = []

    def read(reader: Reader) -> None:
        try:
            reader.read(0, size, soon())
        except (SourceUnavailable, SourceTimeout) as error:
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


def test_readers_of_one_host_share_a_broadcast(pair: GlooPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that read the same range concurrently get it by broadcast, and both get it right."""
    # The second may start late on a busy machine.
    monkeypatch.setattr(source_group, "MAX_MEMBERS", 2)
    monkeypatch.setattr(source_group, "FORM_WINDOW_S", 30.0)
    monkeypatch.setattr(source_group, "BROADCAST_WINDOW_S", 30.0)
    sizes = (40 * MIB, 3, 1000, 24 * MIB)
    pair.exporter.close()
    pair.source = image_of(sizes, seed=1)
    pair.exporter = pair.transport.export(pair.source, pair.gate)
    images = [image_of(sizes), image_of(sizes)]
    readers = readers_at_once(pair, images)
    raised = read_at_once(readers, pair.source.layout.image_bytes)
    pair.close()
    exporter, expected_bytes = exporter_of(pair), content(pair.source)
    assert [] == raised
    assert [True, True] == [content(image) == expected_bytes for image in images]
    assert exporter.broadcasts > 0
    assert exporter.broadcasts + exporter.sends < 2 * 5  # of five blocks, twice


def test_a_reader_that_leaves_delays_no_other(pair: GlooPair) -> None:
    """Its group breaks; the other's read continues in the next one."""
    begun, release = threading.Event(), threading.Event()

    def block_grant(nbytes: int) -> None:
        begun.set()
        release.wait(30)

    targets = [pair.target, image_of(MIXED)]
    readers = readers_at_once(pair, targets)
    pair.gate.before_slice = block_grant
    size = pair.source.layout.image_bytes
    raised: list[list[Exception]] = []
    reading = threading.Thread(target=lambda: raised.append(read_at_once(readers, size)))
    reading.start()
    assert begun.wait(30)
    readers[0].close()
    release.set()
    reading.join()
    assert [SourceUnavailable] == [type(error) for error in raised[0]]
    expected_bytes = content(pair.source)
    assert 1 == [content(target) == expected_bytes for target in targets].count(True)


def test_an_incompatible_torch_version(pair: GlooPair) -> None:
    """It is reported before a group is formed: the next transport is used."""
    endpoint = Endpoint("gloo", {**pair.exporter.endpoint().parameters, "version": "1.0"})
    with pytest.raises(VersionMismatch, match=r"1\.0"):
        pair.transport.connect(endpoint, pair.target, lambda: TOKEN, soon())


def test_an_image_on_a_gpu_is_not_for_gloo(pair: GlooPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other transports are exported without it."""
    monkeypatch.setattr(Image, "devices", frozenset({torch.device("cuda:0")}))
    with pytest.raises(TransportUnavailable, match="host memory"):
        pair.transport.export(pair.source, FakeGate())


@pytest.mark.slow  # also: test_a_reader_that_leaves_delays_no_other
def test_nothing_is_left_after_twenty_readers(pair: GlooPair) -> None:
    """No thread and no descriptor of either side: both are in this process."""

    def counts() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def once() -> None:
        reader = pair.connect()
        reader.read(0, 100, soon())
        reader.close()
        pair.exporter.revoke_peer(f"channel-{pair.opened}")
        assert wait_until(lambda: not running_threads())

    once()
    before = counts()
    for _ in range(20):
        once()
    assert wait_until(lambda: counts() <= before), (before, counts())
