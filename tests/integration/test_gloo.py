"""The gloo transport: the contract within one process, then real processes that die, stop and share."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from rfork.engines.transformers import loaded_model
from rfork.errors import SourceGone, SourceStalled, TransportUnusable, VersionMismatch
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.image.proof import image_sha256
from rfork.peer.lines import converse
from rfork.peer.memory import joined
from rfork.settings import Settings
from rfork.transport.base import Endpoint, Exporter, Line, Reader
from rfork.transport.collective import GlooTransport
from rfork.transport.collective.exporter import CollectiveExporter
from tests.conftest import StartRfork
from tests.integration.gloo_node import SIZES, SLOW, a_reader, a_seed
from tests.integration.test_fork_flow import READY, event, result
from tests.transport_contract import CONTRACT, MIXED, TOKEN, FakeGate, Pair, content, image_of, soon

OURS = ("rfork-gloo", "rfork-line")


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


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in OURS]


def until(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes to hold within half a minute."""
    deadline, changed = soon(), threading.Event()
    while time.monotonic() < deadline:
        if condition():
            return True
        changed.wait(0.01)
    return False


@pytest.fixture
def pair() -> Iterator[GlooPair]:
    """A source and a target in this process; at the end none of their threads is left."""
    made = GlooPair.over(GlooTransport(Settings()))
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


def test_readers_of_one_host_share_what_they_all_want(pair: GlooPair) -> None:
    """Two that read the same at the same time get it by broadcast, and both get it right."""
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


# -- real processes ------------------------------------------------------------------------------------------


class Node:
    """A process of `tests.integration.gloo_node`, its events as lines."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.gloo_node", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def heard(self) -> str:
        """The next event; empty once it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def node() -> Iterator[Callable[..., Node]]:
    """Starts nodes, and kills them when the test ends."""
    started: list[Node] = []

    def start(*arguments: str) -> Node:
        started.append(Node(*arguments))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_target_that_dies_or_stops_in_mid_send(node: Callable[..., Node], how: signal.Signals) -> None:
    """The source's threads are free again, and its next reader gets everything."""
    seed = a_seed(rate=SLOW, stall_s=2.0)
    target = node("read", seed.report().address, "fork-1")
    assert ["connected", "chunk"] == [target.heard(), target.heard()]
    assert until(lambda: seed.given_bytes > 4 * MIB)  # in the midst of the next read
    target.signal(how)
    assert until(lambda: not ours().count("rfork-gloo"))
    image = image_of(SIZES)
    peer, _, reader = a_reader(seed.report().address, image, "fork-2")
    reader.read(0, image.layout.image_bytes, soon())
    reader.close()
    peer.close()
    whole = content(seed.image)
    seed.close()
    assert content(image) == whole
    target.close()
    assert until(lambda: not ours()), ours()


def test_a_target_that_was_stopped_goes_on(node: Callable[..., Node]) -> None:
    """Its group is over by then; it joins another one and gets the rest."""
    seed = a_seed(rate=SLOW, stall_s=1.0)
    target = node("read", seed.report().address, "fork-1")
    assert ["connected", "chunk"] == [target.heard(), target.heard()]
    assert until(lambda: seed.given_bytes > 4 * MIB)  # in the midst of the next read
    target.signal(signal.SIGSTOP)
    assert until(lambda: not ours().count("rfork-gloo"))
    target.signal(signal.SIGCONT)
    heard = iter(target.heard, "")
    last = next(word for word in heard if word != "chunk")
    expected = hashlib.sha256(content(seed.image)).hexdigest()
    seed.close()
    assert expected == last


@pytest.mark.parametrize(
    ("how", "kind"),
    [(signal.SIGKILL, SourceGone), (signal.SIGSTOP, SourceStalled)],
    ids=["killed", "stopped"],
)
def test_a_source_that_dies_or_stops_in_mid_send(
    node: Callable[..., Node], how: signal.Signals, kind: type[Exception]
) -> None:
    """The read says so, by its deadline, and nothing of the reader is left."""
    source = node("seed", str(SLOW))
    image = image_of(SIZES)
    peer, _, reader = a_reader(source.heard(), image, "fork-1", stall_s=2.0)
    reader.read(*image.layout.chunks[0], soon())
    source.signal(how)
    deadline = time.monotonic() + 4.0
    with pytest.raises(kind):
        reader.read(0, image.layout.image_bytes, deadline)
    late = time.monotonic() - deadline
    reader.close()
    peer.close()
    assert until(lambda: not ours()), ours()
    assert late < 10.0


def test_a_fence_cuts_what_is_under_way(node: Callable[..., Node]) -> None:
    """Though the reader has stopped and takes nothing: the update does not wait for it."""
    seed = a_seed()
    target = node("read", seed.report().address, "fork-1")
    assert "connected" == target.heard()
    target.signal(signal.SIGSTOP)
    seed.fence()
    seed.close()
    assert until(lambda: not ours()), ours()


def test_a_fork_through_the_planner(rfork_process: StartRfork, tiny_model: Path) -> None:
    """Planner, seed and pull that are told gloo and nothing else: the right bytes, by gloo."""
    planner = rfork_process("planner", "--port", "0", "--json", until=READY)
    url = event(planner)["url"]
    over = {"RFORK_TRANSPORTS": "gloo"}
    shared = (str(tiny_model), "--name", "tiny", "--planner", url, "--json")
    rfork_process("seed", *shared, until=READY, environment=over)
    pull = rfork_process("pull", *shared, "--sha256", environment=over)
    report = result(pull)
    expected = image_sha256(capture(loaded_model(tiny_model)))
    sources = cast(list[dict[str, str]], report["sources"])
    assert ("forked", expected, ["gloo"]) == (
        report["outcome"],
        report["sha256"],
        [source["transport"] for source in sources],
    )
