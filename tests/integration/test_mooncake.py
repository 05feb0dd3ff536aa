"""The transfer_engine transport over loopback TCP, between processes that die, stop and restart."""

from __future__ import annotations

import contextlib
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from rfork.errors import SourceError, SourceTimeout, SourceUnavailable, TargetError, TransportUnavailable
from rfork.image.memory import Image, Segment
from rfork.settings import InstanceSettings
from rfork.transport.base import Endpoint
from rfork.transport.bpf_filter import PacketFilter
from rfork.transport.mooncake import TransferEngineTransport
from rfork.transport.mooncake.engine import MooncakeEngine
from rfork.transport.mooncake.library import library_state
from rfork.transport.mooncake.reader import TransferEngineReader
from tests.integration.bad_peer_node import accepts_connections
from tests.integration.mooncake_node import SETTINGS, MooncakeSeedProcess, UnusedGate, image_of, pattern

STATE = library_state()
pytestmark = [
    pytest.mark.skipif(
        bool(STATE.error),
        reason=f"mooncake-transfer-engine-non-cuda is unavailable: {STATE.error} ({STATE.hint})",
    )
]
MIXED = [3, 4096, 1 << 20, 17] + [8191] * 500 + [(20 << 20) + 5, 1]
LARGE = [1 << 26]


StartSeed = Callable[..., MooncakeSeedProcess]


@pytest.fixture
def start_seed() -> Iterator[StartSeed]:
    """Start seeds that end with the test."""
    with contextlib.ExitStack() as seeds:

        def start(sizes: list[int], salt: int = 0) -> MooncakeSeedProcess:
            seed = MooncakeSeedProcess(sizes, salt)
            seeds.callback(seed.kill)
            return seed

        yield start


def empty_target(sizes: list[int]) -> tuple[Image, list[torch.Tensor]]:
    """Return a target image of zeros, and its tensors."""
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    return image_of(sizes, tensors), tensors


def connect(endpoint: Endpoint, image: Image, seconds: float = 10.0) -> TransferEngineReader:
    """Open a reader with a deadline `seconds` from now."""
    transport = TransferEngineTransport(SETTINGS)
    return transport.connect(endpoint, image, lambda: "token", time.monotonic() + seconds)


def wrong_tensors(tensors: list[torch.Tensor], salt: int = 0) -> list[int]:
    """Return the indices of tensors that differ from the seed's."""
    return [
        index for index, tensor in enumerate(tensors) if not torch.equal(tensor, pattern(index, tensor.numel(), salt))
    ]


def test_concurrent_reads_arrive_complete(start_seed: StartSeed) -> None:
    """Every byte of large, small and unaligned tensors arrives, read in chunks by several threads."""
    seed = start_seed(MIXED)
    image, tensors = empty_target(MIXED)
    reader = connect(seed.endpoint, image)
    threads = [
        threading.Thread(target=reader.read, args=(begin, end, time.monotonic() + 30))
        for begin, end in image.layout.chunks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader.close()
    assert wrong_tensors(tensors) == []


def test_only_the_requested_range_changes(start_seed: StartSeed) -> None:
    """A partial read leaves all other bytes, and the gaps between tensors, unchanged."""
    sizes = [100, 5000, 300]
    seed = start_seed(sizes)
    image, tensors = empty_target(sizes)
    reader = connect(seed.endpoint, image)
    reader.read(50, 5150, time.monotonic() + 10)
    reader.read(7, 7, time.monotonic() + 10)
    reader.close()
    expected_bytes = torch.cat([pattern(index, size, 0) for index, size in enumerate(sizes)])
    expected = torch.zeros_like(expected_bytes)
    expected[50:5150] = expected_bytes[50:5150]
    assert torch.equal(torch.cat(tensors), expected)


def read_until_error(reader: TransferEngineReader, image: Image, seconds: float) -> SourceError:
    """Read the image repeatedly until the source fails, and return the error."""
    while True:
        try:
            reader.read(0, image.layout.image_bytes, time.monotonic() + seconds)
        except SourceError as error:
            return error


def test_a_killed_seed_is_unavailable_and_another_continues(start_seed: StartSeed) -> None:
    """SIGKILL during a read is SourceUnavailable; a reader of another seed continues in this process."""
    killed, healthy = start_seed(LARGE), start_seed(MIXED)
    image, _ = empty_target(LARGE)
    other, tensors = empty_target(MIXED)
    reader, second = connect(killed.endpoint, image), connect(healthy.endpoint, other)
    reader.read(0, 1 << 20, time.monotonic() + 10)
    timer = threading.Timer(0.1, killed.send_signal, [signal.SIGKILL])
    timer.start()
    error = read_until_error(reader, image, 10)
    timer.join()
    second.read(0, other.layout.image_bytes, time.monotonic() + 30)
    reader.close()
    second.close()
    assert type(error) is SourceUnavailable
    assert wrong_tensors(tensors) == []


@pytest.mark.slow  # logic: tests/unit/receiver/test_runner.py
def test_a_stopped_seed_times_out_and_writes_nothing_later(start_seed: StartSeed) -> None:
    """SIGSTOP during a read is SourceTimeout, and no byte arrives once the seed continues."""
    seed = start_seed(LARGE)
    image, tensors = empty_target(LARGE)
    reader = connect(seed.endpoint, image)
    timer = threading.Timer(0.1, seed.send_signal, [signal.SIGSTOP])
    timer.start()
    error = read_until_error(reader, image, 1)
    timer.join()
    before = tensors[0].clone()
    seed.send_signal(signal.SIGCONT)
    fresh_image, _ = empty_target(LARGE)
    fresh = connect(seed.endpoint, fresh_image)
    fresh.read(0, 1 << 24, time.monotonic() + 10)
    fresh.close()
    reader.close()
    assert type(error) is SourceTimeout
    assert torch.equal(tensors[0], before)


def test_a_local_failure_does_not_blame_the_source(start_seed: StartSeed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake that fails locally is this side's failure, and its engine is closed."""
    closed: list[MooncakeEngine] = []
    close = MooncakeEngine.close

    def noted(engine: MooncakeEngine) -> None:
        closed.append(engine)
        close(engine)

    def failing(engine: MooncakeEngine, session: str, local: int, remote: int, length: int) -> int:
        raise MemoryError("no memory for a read")

    monkeypatch.setattr(MooncakeEngine, "close", noted)
    monkeypatch.setattr(MooncakeEngine, "start_read", failing)
    seed = start_seed([4096])
    image, _ = empty_target([4096])
    with pytest.raises(TargetError, match="no memory for a read"):
        connect(seed.endpoint, image)
    assert 1 == len(closed)


def test_a_closed_reader_rejects_reads(start_seed: StartSeed) -> None:
    """After close, which may be called twice, reads raise SourceUnavailable."""
    seed = start_seed([4096])
    image, _ = empty_target([4096])
    reader = connect(seed.endpoint, image)
    reader.close()
    reader.close()
    with pytest.raises(SourceUnavailable, match="closed"):
        reader.read(0, 4096, time.monotonic() + 10)


def test_a_silent_peer_times_out_and_does_not_block_a_healthy_one(start_seed: StartSeed) -> None:
    """A peer that accepts and never responds is SourceTimeout at the deadline; others read meanwhile."""
    seed = start_seed(MIXED)
    image, tensors = empty_target(MIXED)
    reader = connect(seed.endpoint, image)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        session = f"127.0.0.1:{silent.getsockname()[1]}"
        parameters = {**seed.endpoint.parameters, "session": session}
        fake = Endpoint("transfer_engine", parameters, seed.endpoint.segments)
        errors: list[SourceError] = []

        def read_silent_peer() -> None:
            try:
                connect(fake, image, seconds=8)
            except SourceError as error:
                errors.append(error)

        reader_thread = threading.Thread(target=read_silent_peer)
        reader_thread.start()
        reader.read(0, image.layout.image_bytes, time.monotonic() + 30)
        still_waiting = reader_thread.is_alive()
        reader_thread.join()
    reader.close()
    assert [type(error) for error in errors] == [SourceTimeout]
    assert still_waiting
    assert wrong_tensors(tensors) == []


def test_a_port_without_a_listener_is_unavailable(free_port: int) -> None:
    """An endpoint where nothing listens is SourceUnavailable."""
    image, _ = empty_target([64])
    endpoint = Endpoint(
        "transfer_engine",
        {"session": f"127.0.0.1:{free_port}", "protocol": "tcp", "gather": "yes"},
        (Segment(0, 4096, 64),),
    )
    with pytest.raises(SourceUnavailable, match="not reachable"):
        connect(endpoint, image)


class _Forward(socketserver.BaseRequestHandler):
    """Forwards one handshake to the seed currently behind the port."""

    def handle(self) -> None:
        server = self.server
        assert isinstance(server, FixedPort)
        host, _, port = server.session.rpartition(":")
        with socket.create_connection((host, int(port))) as seed:
            upload_thread = threading.Thread(target=_pump, args=(self.request, seed))
            upload_thread.start()
            _pump(seed, self.request)
            upload_thread.join()


class FixedPort(socketserver.ThreadingTCPServer):
    """A handshake port that stays the same while the seeds behind it are replaced."""

    session = ""


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def test_a_seed_restarted_on_the_same_port_is_read_correctly(start_seed: StartSeed) -> None:
    """A new reader of the same session reads the new process's bytes, not stale addresses."""
    sizes = [1 << 16]
    seen: list[list[int]] = []
    with FixedPort(("127.0.0.1", 0), _Forward) as fixed, contextlib.ExitStack() as readers:
        serving = threading.Thread(target=fixed.serve_forever)
        serving.start()
        readers.callback(serving.join)
        readers.callback(fixed.shutdown)
        for salt in (1, 2):
            seed = start_seed(sizes, salt)
            fixed.session = seed.endpoint.parameters["session"]
            session = f"127.0.0.1:{fixed.server_address[1]}"
            parameters = {**seed.endpoint.parameters, "session": session}
            image, tensors = empty_target(sizes)
            reader = connect(Endpoint("transfer_engine", parameters, seed.endpoint.segments), image)
            readers.callback(reader.close)
            reader.read(0, 1 << 16, time.monotonic() + 10)
            seen.append(wrong_tensors(tensors, salt))
            seed.kill()
    assert seen == [[], []]


def test_a_closed_exporter_serves_nothing() -> None:
    """After the exporter's close, which may be called twice, reads raise SourceUnavailable."""
    source = image_of([1 << 16], [pattern(0, 1 << 16, 0)])
    image, tensors = empty_target([1 << 16])
    exporter = TransferEngineTransport(SETTINGS).export(source, UnusedGate())
    assert exporter.ready(time.monotonic() + 10)
    exporter.authorize_peer("channel", "127.0.0.1")
    reader = connect(exporter.endpoint(), image)
    exporter.close()
    exporter.close()
    with pytest.raises(SourceUnavailable):
        reader.read(0, 1 << 16, time.monotonic() + 10)
    reader.close()
    assert int(tensors[0].sum()) == 0


def test_every_listener_on_a_port_is_filtered() -> None:
    """Sockets of both families, or on several addresses, may share a port."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = first.getsockname()[1]
        stack.enter_context(socket.create_server(("127.0.0.2", port)))
        ports = PacketFilter()
        stack.callback(ports.close)
        before = [accepts_connections(address, port, 0.3) for address in ("127.0.0.1", "127.0.0.2")]
        ports.add(port)
        after = [accepts_connections(address, port, 0.3) for address in ("127.0.0.1", "127.0.0.2")]
    assert [True, True] == before
    assert [False, False] == after


def test_tcp_is_refused_unless_allowed() -> None:
    """Without allow_unauthenticated_tcp a machine without RDMA neither exports nor connects."""
    transport = TransferEngineTransport(InstanceSettings())
    image, _ = empty_target([64])
    with pytest.raises(TransportUnavailable, match="any process on a reader's host could read"):
        transport.export(image, UnusedGate())
