"""Copies that a source of shared_memory keeps for readers yet to come, and memory that is short."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from rfork.errors import SourceCorrupt, SourceError, SourceUnavailable
from rfork.image.chunks import MIB
from rfork.transport.base import Endpoint
from rfork.transport.shared_memory import chunk_cache, exporter
from rfork.transport.shared_memory import reader as reader_module
from rfork.transport.shared_memory.memfd import SealedChunk, memory_file, read
from rfork.transport.unix_socket.connection import UnixSocketConnection, close_all
from rfork.transport.unix_socket.messages import Message
from rfork.transport.unix_socket.server import LocalServer
from tests.integration.shared_memory.pairs import (
    LARGE,
    fork_of,
    mapped_chunk_bytes,
    open_reader,
    pair,
    send_request,
    transport,
)
from tests.transport_contract import TOKEN, FakeGate, content, image_of, soon


def cache_poll_waiter(gate: FakeGate, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let an exporter that is made from now on look often; blocks until it has looked once more, in full."""
    polls = threading.Semaphore(0)
    etag = gate.version_tag

    def etag_and_count() -> str:
        if threading.current_thread().name == "rfork-shared-memory":
            polls.release()
        return etag()

    def wait() -> None:
        while polls.acquire(blocking=False):
            pass
        for _ in range(2):
            assert polls.acquire(timeout=30)

    monkeypatch.setattr(gate, "version_tag", etag_and_count)
    monkeypatch.setattr(exporter, "POLL_INTERVAL_S", 0.01)
    return wait


def test_forks_that_come_far_apart_share_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long nobody asked: what the first one maps is what the second one gets."""
    gc.collect()  # images of other tests
    before = mapped_chunk_bytes()["Pss"]
    gate, source = FakeGate(), image_of(LARGE, seed=1)
    wait = cache_poll_waiter(gate, monkeypatch)
    with contextlib.closing(transport().export(source, gate)) as exported:
        first = fork_of(exported.endpoint(), LARGE)
        wait()
        second = fork_of(exported.endpoint(), LARGE)
        assert [content(source)] * 2 == [content(first), content(second)]
        assert mapped_chunk_bytes()["Pss"] - before < 1.1 * source.layout.image_bytes


def test_what_is_kept_goes_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source lets go of its copy, and gives by pieces until there is room again."""
    gate, source = FakeGate(), image_of(LARGE, seed=1)
    wait = cache_poll_waiter(gate, monkeypatch)
    request: Message = {"token": TOKEN, "begin": 0, "end": MIB, "alignment": []}
    sealed_replies: list[bool] = []
    with contextlib.closing(transport().export(source, gate)) as exported:
        for fits in (True, False, True):
            monkeypatch.setattr(exporter, "fits_in_memory", lambda nbytes, enough_memory=fits: enough_memory)
            wait()
            message, descriptors = send_request(exported.endpoint(), request)
            close_all(descriptors)
            sealed_replies.append("sealed" in message)
    assert [True, False, True] == sealed_replies


def test_a_full_shelf_makes_no_more_and_drops_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks beyond those that may be kept come by pieces: they cost the source nothing, however many ask."""
    monkeypatch.setattr(chunk_cache, "MAX_CACHED_CHUNKS", 3)
    with pair() as made:
        files = []
        for _ in range(2):
            for chunk in range(5):
                request: Message = {
                    "token": TOKEN,
                    "begin": chunk * MIB,
                    "end": (chunk + 1) * MIB,
                    "alignment": [],
                }
                message, descriptors = send_request(made.exporter.endpoint(), request)
                files.append(os.fstat(descriptors[0]).st_ino if "sealed" in message else 0)
                close_all(descriptors)
        assert (files[:5], [0, 0], 3) == (files[5:], files[3:5], len(set(files[:3])))


def test_readers_that_come_at_once_take_no_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for four chunks is that for four, though all readers ask before the first file is made."""
    readers = 12
    begun, allocated = threading.Barrier(readers), list[int]()
    monkeypatch.setattr(exporter, "fits_in_memory", lambda nbytes: sum(allocated) + nbytes <= 4 * MIB)
    with pair() as made:

        def wait_for_all(nbytes: int) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                begun.wait(10)

        made.gate.before_slice = wait_for_all
        make = made.exporter._build  # type: ignore[attr-defined]

        def count(*arguments: object) -> SealedChunk:
            # As the memory is: taken before the promise of it ends.
            sealed: SealedChunk = make(*arguments)
            allocated.append(sealed.layout.size)
            return sealed

        monkeypatch.setattr(made.exporter, "_build", count)

        def request_chunk(chunk: int) -> bool:
            request: Message = {
                "token": TOKEN,
                "begin": chunk * MIB,
                "end": (chunk + 1) * MIB,
                "alignment": [],
            }
            message, descriptors = send_request(made.exporter.endpoint(), request)
            close_all(descriptors)
            return "sealed" in message

        with ThreadPoolExecutor(readers) as pool:
            sealed = list(pool.map(request_chunk, range(readers)))
    assert 4 >= sealed.count(True) > 0


def test_a_reader_that_keeps_pieces_keeps_no_memory() -> None:
    """They are empty once the connection has ended, and cannot be sealed against that."""
    with pair() as made:
        _, descriptors = send_request(made.exporter.endpoint(), {"token": TOKEN, "begin": 0, "end": MIB})
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptors[0], 1033, 2)  # F_ADD_SEALS, F_SEAL_SHRINK
        made.exporter.close()
        assert 0 == os.fstat(descriptors[0]).st_size
        close_all(descriptors)


@pytest.mark.parametrize(("ends", "expected"), [(True, SourceUnavailable), (False, SourceCorrupt)])
def test_a_piece_that_is_empty(ends: bool, expected: type[SourceError], monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that ended took it back; one that did not has broken its word."""
    done, ended = threading.Event(), threading.Event()
    really = read

    def read_late(*arguments: object) -> None:
        assert not ends or ended.wait(30)
        really(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(reader_module, "read", read_late)

    def serve(connection: UnixSocketConnection) -> None:
        connection.receive(soon())
        piece = memory_file(sealable=False)
        reply: Message = {"piece": 0, "begin": 0, "end": MIB}
        connection.send(reply, [piece.number], deadline=soon())
        if ends:
            connection.abort()
            ended.set()
        done.wait(30)

    server = LocalServer("empty", None, serve, nice=0)
    with open_reader(Endpoint("shared_memory", server.parameters), image_of(LARGE)) as reader:
        with pytest.raises(expected):
            reader.read(0, MIB, soon())
        done.set()
    server.close()


def test_a_chunk_that_is_given_whole_is_metered_whole() -> None:
    """Whatever part of it was asked for."""
    granted: list[int] = []
    with pair() as made:
        made.gate.before_slice = granted.append
        message, descriptors = send_request(
            made.exporter.endpoint(), {"token": TOKEN, "begin": 5, "end": 6, "alignment": []}
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
    with pair(shm_mode="copy") as made:
        endpoint = made.exporter.endpoint()
        close_all(send_request(endpoint, {"token": TOKEN, "begin": 0, "end": MIB, "alignment": []})[1])

        def drop(nbytes: int) -> None:
            granted.append(nbytes)
            made.exporter._chunk_cache.drop(0)  # type: ignore[attr-defined]

        made.gate.before_slice = drop
        made.connect().read(0, 2 * MIB, soon())
        assert content(made.source, 0, 2 * MIB) == content(made.target, 0, 2 * MIB)
    assert 2 * MIB == sum(granted)
