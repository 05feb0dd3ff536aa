"""The shared_memory transport between real processes of this host: contract, sharing, faults, strangers."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import mmap
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rfork.errors import (
    NotOneHost,
    SourceBusy,
    SourceChanged,
    SourceCorrupt,
    SourceError,
    SourceGone,
    SourceStalled,
)
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.settings import Settings
from rfork.transport.base import Endpoint, Reader
from rfork.transport.same_host.connection import Connection, close_all
from rfork.transport.same_host.dialling import Connections
from rfork.transport.same_host.messages import Message
from rfork.transport.same_host.server import LocalServer
from rfork.transport.shared_memory import SharedMemoryTransport, exporter, pages, shelf
from rfork.transport.shared_memory import reader as reader_module
from rfork.transport.shared_memory.pages import Kernel
from rfork.transport.shared_memory.sealed import Sealed, memory_file, read
from tests.conftest import StartRfork
from tests.integration.shared_memory_source import NEW, OLD, SIZES, Source
from tests.integration.weights_node import Node, sha256_of
from tests.transport_contract import CONTRACT, TOKEN, FakeGate, Pair, content, image_of, soon

READY = r'"event": ?"ready"'
LARGE = (32 * MIB, 1000, 30 * MIB + 5)


@pytest.fixture(autouse=True, scope="module")
def large_allocations_are_mappings() -> None:
    """As in a process that begins: glibc takes larger and larger ones from its heap as tests free them."""
    ctypes.CDLL(None).mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs on this machine takes: sources in this process find enough memory."""
    monkeypatch.setattr(exporter, "has_room", lambda nbytes: True)


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


def keeper_has_looked(gate: FakeGate, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let an exporter that is made from now on look often; blocks until it has looked once more, in full."""
    looked = threading.Semaphore(0)
    etag = gate.etag

    def tell() -> str:
        if threading.current_thread().name == "rfork-shared-memory":
            looked.release()
        return etag()

    def wait() -> None:
        while looked.acquire(blocking=False):
            pass
        for _ in range(2):
            assert looked.acquire(timeout=30)

    monkeypatch.setattr(gate, "etag", tell)
    monkeypatch.setattr(exporter, "LOOK_S", 0.01)
    return wait


def test_forks_that_come_far_apart_share_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long nobody asked: what the first one maps is what the second one gets."""
    gc.collect()  # images of other tests
    before = mapped()["Pss"]
    gate, source = FakeGate(), image_of(LARGE, seed=1)
    wait = keeper_has_looked(gate, monkeypatch)
    with contextlib.closing(transport().export(source, gate)) as exported:
        first = fork_of(exported.endpoint(), LARGE)
        wait()
        second = fork_of(exported.endpoint(), LARGE)
        assert [content(source)] * 2 == [content(first), content(second)]
        assert mapped()["Pss"] - before < 1.1 * source.layout.image_bytes


def test_what_is_kept_goes_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source lets go of its copy, and gives by pieces until there is room again."""
    gate, source = FakeGate(), image_of(LARGE, seed=1)
    wait = keeper_has_looked(gate, monkeypatch)
    request: Message = {"token": TOKEN, "begin": 0, "end": MIB, "wishes": []}
    answers: list[bool] = []
    with contextlib.closing(transport().export(source, gate)) as exported:
        for room in (True, False, True):
            monkeypatch.setattr(exporter, "has_room", lambda nbytes, room=room: room)
            wait()
            message, descriptors = asked(exported.endpoint(), request)
            close_all(descriptors)
            answers.append("sealed" in message)
    assert [True, False, True] == answers


def test_a_full_shelf_makes_no_more_and_drops_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks beyond those that may be kept come by pieces: they cost the source nothing, however many ask."""
    monkeypatch.setattr(shelf, "MOST_KEPT", 3)
    with pair() as made:
        files = []
        for _ in range(2):
            for chunk in range(5):
                request: Message = {
                    "token": TOKEN,
                    "begin": chunk * MIB,
                    "end": (chunk + 1) * MIB,
                    "wishes": [],
                }
                message, descriptors = asked(made.exporter.endpoint(), request)
                files.append(os.fstat(descriptors[0]).st_ino if "sealed" in message else 0)
                close_all(descriptors)
        assert (files[:5], [0, 0], 3) == (files[5:], files[3:5], len(set(files[:3])))


def test_readers_that_come_at_once_take_no_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for four chunks is that for four, though all readers ask before the first file is made."""
    readers = 12
    begun, made_bytes = threading.Barrier(readers), [0]
    monkeypatch.setattr(exporter, "has_room", lambda nbytes: made_bytes[0] + nbytes <= 4 * MIB)
    with pair() as made:

        def hold(nbytes: int) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                begun.wait(10)

        made.gate.before_slice = hold
        keep = made.exporter._shelf.keep  # type: ignore[attr-defined]

        def count(chunk: int, sealed: Sealed) -> None:
            made_bytes[0] += MIB
            keep(chunk, sealed)

        monkeypatch.setattr(made.exporter._shelf, "keep", count)  # type: ignore[attr-defined]

        def ask(chunk: int) -> bool:
            request: Message = {
                "token": TOKEN,
                "begin": chunk * MIB,
                "end": (chunk + 1) * MIB,
                "wishes": [],
            }
            message, descriptors = asked(made.exporter.endpoint(), request)
            close_all(descriptors)
            return "sealed" in message

        with ThreadPoolExecutor(readers) as pool:
            sealed = list(pool.map(ask, range(readers)))
    assert 4 >= sealed.count(True) > 0


def test_a_reader_that_keeps_pieces_keeps_no_memory() -> None:
    """They are empty once the connection has ended, and cannot be sealed against that."""
    with pair() as made:
        _, descriptors = asked(made.exporter.endpoint(), {"token": TOKEN, "begin": 0, "end": MIB})
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptors[0], 1033, 2)  # F_ADD_SEALS, F_SEAL_SHRINK
        made.exporter.close()
        assert 0 == os.fstat(descriptors[0]).st_size
        close_all(descriptors)


@pytest.mark.parametrize(("ends", "expected"), [(True, SourceGone), (False, SourceCorrupt)])
def test_a_piece_that_is_empty(
    ends: bool, expected: type[SourceError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that ended took it back; one that did not has broken its word."""
    done, ended = threading.Event(), threading.Event()
    really = read

    def read_late(*arguments: object) -> None:
        assert not ends or ended.wait(30)
        really(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(reader_module, "read", read_late)

    def serve(connection: Connection) -> None:
        connection.receive(soon())
        piece = memory_file(sealable=False)
        answer: Message = {"piece": 0, "begin": 0, "end": MIB}
        connection.send(answer, [piece.number], deadline=soon())
        if ends:
            connection.cut()
            ended.set()
        done.wait(30)

    server = LocalServer("empty", None, serve, nice=0)
    with reading(Endpoint("shared_memory", server.parameters), image_of(LARGE)) as reader:
        with pytest.raises(expected):
            reader.read(0, MIB, soon())
        done.set()
    server.close()


def test_a_chunk_that_is_given_whole_is_metered_whole() -> None:
    """Whatever part of it was asked for."""
    granted: list[int] = []
    with pair() as made:
        made.gate.before_slice = granted.append
        message, descriptors = asked(
            made.exporter.endpoint(), {"token": TOKEN, "begin": 5, "end": 6, "wishes": []}
        )
        close_all(descriptors)
        assert ("sealed" in message, message["begin"], message["end"]) == (True, 0, MIB)
    assert MIB == sum(granted)


def test_a_chunk_that_is_dropped_while_it_is_paid_for_is_paid_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pieces are those that were paid for."""
    monkeypatch.setattr(exporter, "PIECE_BYTES", MIB // 4)
    granted: list[int] = []
    with pair(shared_memory="copy") as made:
        endpoint = made.exporter.endpoint()
        close_all(asked(endpoint, {"token": TOKEN, "begin": 0, "end": MIB, "wishes": []})[1])

        def drop(nbytes: int) -> None:
            granted.append(nbytes)
            made.exporter._shelf.drop(0)  # type: ignore[attr-defined]

        made.gate.before_slice = drop
        made.connect().read(0, 2 * MIB, soon())
        assert content(made.source, 0, 2 * MIB) == content(made.target, 0, 2 * MIB)
    assert 2 * MIB == sum(granted)


def test_a_relay_compares_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of its weights waits for a slice at most, and what was compared across it is not given."""
    monkeypatch.setattr(exporter, "SLICE_BYTES", MIB // 4)
    with pair() as made:
        gate = FakeGate()
        relay = made.transport.export(made.target, gate)
        with contextlib.closing(relay):
            made.connect().read(0, 2 * MIB, soon())
            close_all(asked(relay.endpoint(), {"token": TOKEN, "begin": 0, "end": MIB, "wishes": []})[1])
            slices = {(begin, end) for begin, end in gate.admitted if end - begin < MIB}
            assert {(at, at + MIB // 4) for at in range(0, MIB, MIB // 4)} == slices
            reading = gate.reading

            def change(*arguments: object) -> contextlib.AbstractContextManager[None]:
                gate.generation += 1
                return reading(*arguments)  # type: ignore[arg-type]

            monkeypatch.setattr(gate, "reading", change)
            with pytest.raises(SourceChanged):
                fork_of(relay.endpoint(), LARGE)


def test_a_kernel_that_brings_no_pages_in_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 5.14 chunks are mapped all the same."""
    monkeypatch.setattr(pages, "MADV_POPULATE_READ", 222)
    with pair() as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
        assert content(made.source) == content(made.target)
        assert mapped()["Rss"] > 0.9 * LARGE[0]


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

    def refuse(*, sealable: bool = True) -> None:
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
