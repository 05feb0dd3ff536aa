"""The chunk copies that a shared_memory source caches for later readers, and its behaviour when memory is
low.
"""

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
from rfork.transport.same_host import memory_file as memory_file_module
from rfork.transport.same_host.connection import Message, UnixSocketConnection, close_all
from rfork.transport.same_host.memory_file import memory_file, read
from rfork.transport.same_host.server import LocalServer
from rfork.transport.shared_memory import exporter, sealed_chunk
from rfork.transport.shared_memory.sealed_chunk import SealedChunk
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
    """Make exporters created from now on poll often; the returned function blocks until one more poll has
    completed.
    """
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


def test_readers_far_apart_share_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later reader maps the same file as the first reader, however much time passes in between."""
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


def test_cached_copies_are_dropped_when_memory_is_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source drops its cached copies and serves in pieces until memory is available again."""
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


def test_a_full_cache_neither_adds_nor_drops_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks beyond the cache limit are served in pieces; they cost the source no memory, however many
    readers request them.
    """
    monkeypatch.setattr(sealed_chunk, "MAX_CACHED_CHUNKS", 3)
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
        assert files[:5] == files[5:]
        assert [0, 0] == files[3:5]
        assert 3 == len(set(files[:3]))


def test_concurrent_readers_use_no_more_memory_than_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for four chunks, exactly four are cached, even if all readers send requests before the
    first file exists.
    """
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
            # Models real memory: the pages are used before the reservation ends.
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
    """Pieces that a reader keeps are empty after the connection ends; the reader cannot seal them against
    truncation.
    """
    with pair() as made:
        _, descriptors = send_request(made.exporter.endpoint(), {"token": TOKEN, "begin": 0, "end": MIB})
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptors[0], 1033, 2)  # F_ADD_SEALS, F_SEAL_SHRINK
        made.exporter.close()
        assert 0 == os.fstat(descriptors[0]).st_size
        close_all(descriptors)


@pytest.mark.parametrize(("ends", "expected"), [(True, SourceUnavailable), (False, SourceCorrupt)])
def test_an_empty_piece_is_a_source_error(
    ends: bool, expected: type[SourceError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that has closed truncated the piece; one that is still open has broken the protocol."""
    done, ended = threading.Event(), threading.Event()
    really = read

    def read_late(*arguments: object) -> None:
        assert not ends or ended.wait(30)
        really(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(memory_file_module, "read", read_late)

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


def test_a_chunk_that_is_served_complete_is_metered_complete() -> None:
    """The meter counts all bytes of the chunk, whichever part was requested."""
    granted: list[int] = []
    with pair() as made:
        made.gate.before_slice = granted.append
        message, descriptors = send_request(
            made.exporter.endpoint(), {"token": TOKEN, "begin": 5, "end": 6, "alignment": []}
        )
        close_all(descriptors)
        assert "sealed" in message
        assert message["begin"] == 0
        assert message["end"] == MIB
    assert MIB == sum(granted)


def test_a_chunk_dropped_while_it_is_metered_is_metered_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pieces are not charged a second time."""
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
