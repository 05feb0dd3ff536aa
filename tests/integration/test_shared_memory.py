"""The shared_memory transport between real processes of this host: contract, sharing, faults, strangers."""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rfork.errors import NotOneHost, SourceBusy, SourceChanged, SourceGone, SourceStalled
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.settings import Settings
from rfork.transport.base import Endpoint, Reader
from rfork.transport.same_host.connection import close_all
from rfork.transport.same_host.dialling import Connections
from rfork.transport.same_host.messages import Message
from rfork.transport.shared_memory import SharedMemoryTransport, exporter
from rfork.transport.shared_memory.pages import Kernel
from tests.conftest import StartRfork
from tests.integration.shared_memory_source import NEW, OLD, SIZES, Source
from tests.integration.weights_node import Node, sha256_of
from tests.transport_contract import CONTRACT, TOKEN, FakeGate, Pair, content, image_of, soon

READY = r'"event": ?"ready"'
LARGE = (32 * MIB, 1000, 30 * MIB + 5)


def transport(**settings: str) -> SharedMemoryTransport:
    return SharedMemoryTransport(Settings.model_validate(settings))


@contextlib.contextmanager
def pair(sizes: tuple[int, ...] = LARGE, **settings: str) -> Iterator[Pair]:
    made = Pair.over(transport(**settings), sizes)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def reading(endpoint: Endpoint, image: Image, **settings: str) -> Iterator[Reader]:
    reader = transport(**settings).connect(endpoint, image, lambda: TOKEN, soon())
    with contextlib.closing(reader):
        yield reader


def fork_of(endpoint: Endpoint, sizes: tuple[int, ...] = SIZES) -> Image:
    """A target that has read all."""
    image = image_of(sizes)
    with reading(endpoint, image) as reader:
        reader.read(0, image.layout.image_bytes, soon())
    return image


def mapped(pid: int | str = "self") -> dict[str, int]:
    """Bytes of a process's mappings of chunks: resident, its share of those, its own (Anonymous)."""
    sums = dict.fromkeys(("Rss", "Pss", "Anonymous"), 0)
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = "memfd:rfork-chunk" in line
        elif ours and line.partition(":")[0] in sums:
            sums[line.partition(":")[0]] += int(line.split()[1]) << 10
    return sums


def asked(endpoint: Endpoint, message: Message) -> tuple[Message, list[int]]:
    """What the source answers to a message of one's own; the descriptors are the caller's."""
    connections = Connections(endpoint.parameters, 30)
    with contextlib.closing(connections), connections.borrowed(soon()) as connection:
        connection.send(message, deadline=soon())
        return connection.receive(soon())


@pytest.mark.parametrize("way", ["map", "copy"])
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Pair], None], way: str) -> None:
    """What every transport promises."""
    made = Pair.over(transport(shared_memory=way))
    try:
        check(made)
    finally:
        made.close()


# -- sharing ----------------------------------------------------------------------------------------------


def test_two_targets_have_the_bytes_in_memory_once() -> None:
    """Both map the same pages; neither has a copy of its own."""
    with pair() as made:
        targets = [fork_of(made.exporter.endpoint(), LARGE) for _ in range(2)]
        size, known = made.source.layout.image_bytes, mapped()
        assert [content(made.source)] * 2 == [content(target) for target in targets]
        assert (True, True, 0) == (
            known["Rss"] > 2 * 0.9 * size,
            known["Pss"] < 1.1 * size,
            known["Anonymous"],
        )


def test_a_target_that_is_told_to_copy_maps_nothing() -> None:
    """With `copy`, its memory stays its own, and the source makes no copy of the image."""
    with pair(shared_memory="copy") as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
        assert content(made.source) == content(made.target)
        assert {"Rss": 0, "Pss": 0, "Anonymous": 0} == mapped()


def test_a_source_short_of_memory_gives_by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes no file of a chunk then, and the bytes are right."""
    monkeypatch.setattr(exporter, "has_room", lambda nbytes: False)
    with pair() as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
        assert content(made.source) == content(made.target)
        assert 0 == mapped()["Rss"]


def test_what_cannot_be_mapped_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that refuses costs time, and no byte."""

    def refuse(*arguments: object) -> None:
        raise OSError(12, "no")

    monkeypatch.setattr(Kernel, "replace", refuse)
    with pair() as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
        assert content(made.source) == content(made.target)
        assert 0 == mapped()["Rss"]


def test_memory_that_is_not_an_allocation_of_its_own_is_copied() -> None:
    """Files and shared memory are not mapped over: others see what is written to them."""
    with pair() as made:
        shared = mmap.mmap(-1, LARGE[0])
        regions = [torch.frombuffer(shared, dtype=torch.uint8), *image_of(LARGE[1:]).regions]
        target = Image(made.source.layout, regions)
        with reading(made.exporter.endpoint(), target) as reader:
            reader.read(0, LARGE[0], soon())
        assert content(made.source, 0, LARGE[0]) == shared[:]


def test_a_write_of_a_target_is_its_own() -> None:
    """Neither the source nor another target sees it."""
    with pair() as made:
        one, other = (fork_of(made.exporter.endpoint(), LARGE) for _ in range(2))
        one.regions[0].fill_(7)
        assert [content(made.source)] * 2 == [
            content(other),
            content(fork_of(made.exporter.endpoint(), LARGE)),
        ]


def test_a_relay_gives_the_memory_that_it_mapped() -> None:
    """The file that its reader gets is the one that it got itself."""
    with pair() as made:
        relay = made.transport.export(made.target, FakeGate())
        request: Message = {"token": TOKEN, "begin": 0, "end": MIB, "wishes": []}
        with contextlib.closing(relay):
            made.connect().read(0, made.source.layout.image_bytes, soon())
            files = []
            for endpoint in (made.exporter.endpoint(), relay.endpoint()):
                _, descriptors = asked(endpoint, request)
                files.append(os.fstat(descriptors[0]).st_ino)
                close_all(descriptors)
            assert files[0] == files[1]


def test_a_relay_whose_memory_is_other_than_what_it_received_gives_its_memory() -> None:
    """What came with a source that was wrong is not given onwards after it was mended."""
    with pair() as made:
        relay = made.transport.export(made.target, FakeGate())
        with contextlib.closing(relay):
            made.connect().read(0, made.source.layout.image_bytes, soon())
            made.target.regions[0][5000] ^= 0xFF
            assert content(made.target) == content(fork_of(relay.endpoint(), LARGE))


def test_nothing_is_left_open() -> None:
    """Once both sides are closed and the images are gone, so are the descriptors and the mappings."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pair() as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
    del made
    gc.collect()
    assert (before, 0) == (len(os.listdir("/proc/self/fd")), mapped()["Rss"])


# -- two processes ----------------------------------------------------------------------------------------


def test_a_source_that_is_killed() -> None:
    """Who waits for it gets SourceGone; what was mapped is still right."""
    expected, target = image_of(SIZES, seed=OLD), image_of(SIZES)
    with Source() as source, reading(source.endpoint, target) as reader, ThreadPoolExecutor() as pool:
        reader.read(0, MIB, soon())
        source.ask("hold")
        waits = pool.submit(reader.read, MIB, 2 * MIB, soon())
        source.wait_until_held()
        source.signal(signal.SIGKILL)
        assert SourceGone is type(waits.exception())
        with pytest.raises(SourceGone):
            reader.read(MIB, 2 * MIB, soon())
    assert content(expected, 0, MIB) + bytes(MIB) == content(target, 0, 2 * MIB)


def test_a_source_that_stands_still() -> None:
    """Its reader gives up at the deadline."""
    with Source() as source, reading(source.endpoint, image_of(SIZES)) as reader:
        reader.read(0, MIB, soon())
        source.signal(signal.SIGSTOP)
        with pytest.raises(SourceStalled):
            reader.read(MIB, 2 * MIB, soon(0.3))


def test_an_update_in_place() -> None:
    """Who has forked keeps the weights that it has; who comes later gets the new ones."""
    with Source() as source:
        old = fork_of(source.endpoint)
        source.ask("update")
        new = fork_of(source.endpoint)
    assert content(image_of(SIZES, seed=OLD)) == content(old)
    assert content(image_of(SIZES, seed=NEW)) == content(new)


def test_weights_that_change_while_a_chunk_waits_for_its_turn() -> None:
    """A chunk that was made before the change is not given after it."""
    with pair() as made:
        made.connect().read(0, MIB, soon())

        def change(nbytes: int) -> None:
            made.gate.changed = True

        made.gate.before_slice = change
        with pytest.raises(SourceChanged):
            made.connect().read(0, MIB, soon())


# -- strangers --------------------------------------------------------------------------------------------


def test_a_reader_cannot_write() -> None:
    """What it is given is sealed: it cannot be written, cut or mapped to be written."""
    with pair() as made:
        message, descriptors = asked(
            made.exporter.endpoint(), {"token": TOKEN, "begin": 0, "end": MIB, "wishes": [0, 64]}
        )
        assert "sealed" in message
        refused = 0
        for attempt in (
            lambda: os.pwrite(descriptors[0], b"x", 0),
            lambda: os.ftruncate(descriptors[0], 0),
            lambda: mmap.mmap(descriptors[0], MIB, mmap.MAP_SHARED),
        ):
            with pytest.raises(OSError, match="not permitted"):
                attempt()
            refused += 1
        close_all(descriptors)
        assert 3 == refused


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"token": TOKEN},
        {"token": 5, "begin": 0, "end": MIB},
        {"token": TOKEN, "begin": "0", "end": MIB},
        {"token": TOKEN, "begin": MIB, "end": 0},
        {"token": TOKEN, "begin": -1, "end": MIB},
        {"token": TOKEN, "begin": 0, "end": 1 << 80},
        {"token": TOKEN, "begin": 0, "end": MIB, "wishes": "all"},
        {"token": TOKEN, "begin": 0, "end": MIB, "wishes": [0]},
        {"token": TOKEN, "begin": 0, "end": MIB, "wishes": [5, 0, 3, 0]},
        {"token": TOKEN, "begin": 0, "end": MIB, "wishes": [0, 4096]},
        {"token": "forged", "begin": 0, "end": MIB},
    ],
)
def test_a_request_that_makes_no_sense(message: Message) -> None:
    """It is refused without a descriptor, and the next reader is served."""
    with pair() as made:
        answer, descriptors = asked(made.exporter.endpoint(), message)
        assert (True, []) == ("error" in answer, descriptors)
        made.connect().read(0, MIB, soon())
        assert content(made.source, 0, MIB) == content(made.target, 0, MIB)


def test_an_image_that_is_not_on_this_host() -> None:
    """The reader is told so at once: another kernel, or another network namespace."""
    with pair() as made:
        parameters = dict(made.exporter.endpoint().parameters)
        for other in (
            {"boot": "another"},
            {"socket": "@nobody", "network": "net:[1]"},
            {"socket": "/nowhere/x.socket", "folder": "1:1"},
            {},
        ):
            with pytest.raises(NotOneHost):
                transport().connect(
                    Endpoint("shared_memory", {**parameters, **other} if other else {}),
                    made.target,
                    str,
                    soon(),
                )


def test_a_source_out_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is busy, not broken."""

    def refuse() -> None:
        raise OSError(24, "Too many open files")

    with pair() as made:
        reader = made.connect()
        monkeypatch.setattr(exporter, "memory_file", refuse)
        with pytest.raises(SourceBusy):
            reader.read(0, MIB, soon())
        monkeypatch.undo()
        reader.read(0, MIB, soon())
        assert content(made.source, 0, MIB) == content(made.target, 0, MIB)


# -- whole forks ------------------------------------------------------------------------------------------


@pytest.fixture
def planner(rfork_process: StartRfork) -> str:
    """The URL of a planner that knows nobody yet."""
    process = rfork_process("planner", "--port", "0", "--json", until=READY)
    return str(json.loads(process.wait_for(rf"^.*{READY}.*$").group())["url"])


def mapped_by_children() -> list[int]:
    """Bytes of chunks that each process has mapped which this one started."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [mapped(pid)["Rss"] for task in tasks for pid in task.read_text().split()]


def test_forks_of_one_host_share_the_memory(planner: str) -> None:
    """Two targets fork from a seed, or one from the other, and both have mapped the chunks."""
    options = {"RFORK_TRANSPORTS": "shared_memory,http", "RFORK_DRAIN_S": "0"}
    with contextlib.ExitStack() as stack:
        seed, *targets = (stack.enter_context(Node(planner, options)) for _ in range(3))
        seed.ask("seed", 1)
        for target in targets:
            target.ask("fork")
        reports = [target.ask("report") for target in targets]
        large = [size for size in mapped_by_children() if size > 10 * MIB]
        assert [("forked", sha256_of(1), [])] * 2 == [
            (report["outcome"], report["sha256"], report["reasons"]) for report in reports
        ]
        assert 2 == len(large)


def test_a_target_that_does_not_share_the_folder_goes_by_http(planner: str, tmp_path: Path) -> None:
    """A container without the seed's folder of sockets takes the next transport, and says why."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    options = {"RFORK_TRANSPORTS": "shared_memory,http", "RFORK_DRAIN_S": "0"}
    with contextlib.ExitStack() as stack:
        seed, target = (
            stack.enter_context(Node(planner, {**options, "RFORK_LOCAL_SOCKETS": str(folder)}))
            for folder in folders
        )
        seed.ask("seed", 1)
        assert [1, 0] == [len(list(folder.iterdir())) for folder in folders]
        target.ask("fork")
        report = target.ask("report")
        assert ("forked", sha256_of(1)) == (report["outcome"], report["sha256"])
        assert "NotOneHost" in str(report["reasons"])
    assert [0, 0] == [len(list(folder.iterdir())) for folder in folders]
