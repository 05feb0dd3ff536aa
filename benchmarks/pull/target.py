"""Target process of `benchmarks.pull`: one module, and all contenders that fill it."""

from __future__ import annotations

import ctypes
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import nn

import rfork
from benchmarks.harness import Contender
from benchmarks.pull.source import (
    IN_FLIGHT,
    REQUEST_BYTES,
    PlainEngine,
    PullOffer,
    areas_of,
    part_of,
    settings_for,
    transfer_views,
)
from rfork.errors import RforkError
from rfork.image.capture import capture
from rfork.receiver.report import ForkReport

MERGED_BYTES = 64 << 20
POLL_S = 0.0002

TransferPiece = tuple[int, int, int]
"""Piece of a tensor: local address, remote address, length in bytes."""


class PullTarget:
    """A module of this process, its expected bytes, and the contenders that fill it."""

    def __init__(self, name: str, make: Callable[[bool], nn.Module], quick: bool, offer: PullOffer) -> None:
        self.name = name
        self.module, self.original = make(quick), make(quick)
        self.image = capture(self.module)
        self.bytes = self.image.layout.image_bytes
        self.expected = capture(self.original).manifest().digests
        self.pieces = [
            (local, remote, length)
            for (local, length), (remote, _) in zip(areas_of(self.module), offer.areas[name], strict=True)
        ]

    def run_checked(self, pull: Callable[[], float | None]) -> Contender:
        """Run `pull` into zeroed tensors and check every byte; returns the seconds that it reports, else its
        wall time.
        """

        def run() -> float:
            for region in self.image.regions:
                region.zero_()
            began = time.perf_counter()
            reported_seconds = pull()
            seconds = time.perf_counter() - began if reported_seconds is None else reported_seconds
            if self.image.manifest().digests != self.expected:
                raise RforkError(f"wrong bytes in {self.name}")
            return seconds

        return run

    def rfork(
        self,
        planner: str,
        transport: str,
        *,
        verify: bool,
        keep: Callable[[ForkReport], None],
        shared_memory: str | None = None,
    ) -> Callable[[], float]:
        """Fork as a user of rfork does; returns the seconds of its transfer phase. `keep` receives each
        report.
        """
        options = settings_for(planner, (transport,), verify=verify, shared_memory=shared_memory)

        def pull() -> float:
            report = rfork.fork(self.module, model=self.name, settings=options)
            if report.seed is not None:
                report.seed.close()
            if report.outcome != "forked" or {share.transport for share in report.sources} != {transport}:
                raise RforkError(f"not a fork over {transport}: {report.line()}")
            keep(report)
            return report.phases["transfer"]

        return pull

    def sockets(self, connections: list[socket.socket]) -> Callable[[], None]:
        """Read over four bare sockets, each for a quarter of the image."""

        def receive(part: int) -> None:
            connection = connections[part]
            connection.sendall(f"{self.name} {part}".encode().ljust(REQUEST_BYTES))
            with self.image.writable(*part_of(self.image, part)) as views:
                transfer_views(views, lambda window: connection.recvmsg_into(window, 0, socket.MSG_WAITALL)[0])

        def pull() -> None:
            with ThreadPoolExecutor(IN_FLIGHT) as threads:
                list(threads.map(receive, range(IN_FLIGHT)))

        return pull

    def mooncake_batch(self, engine: PlainEngine, session: str) -> Callable[[], None]:
        """Read one batch with one entry per tensor."""
        local, remote, lengths = (list(column) for column in zip(*self.pieces, strict=True))

        def pull() -> None:
            if engine.batch_transfer_sync_read(session, local, remote, lengths) != 0:
                raise RforkError("Mooncake's batch read failed")

        return pull

    def mooncake_merged(self, engine: PlainEngine, session: str) -> Callable[[], None]:
        """Read pieces that are adjacent on both sides, four in flight."""

        def pull() -> None:
            waiting = deque(merge_pieces(self.pieces))
            in_flight: list[int] = []
            while waiting or in_flight:
                while waiting and len(in_flight) < IN_FLIGHT:
                    local, remote, length = waiting.popleft()
                    in_flight.append(engine.batch_transfer_async_read(session, [local], [remote], [length]))
                states = [engine.transfer_check_status(read) for read in in_flight]
                if any(state < 0 for state in states):
                    raise RforkError("a Mooncake read failed")
                ended = [read for read, state in zip(in_flight, states, strict=True) if state == 1]
                in_flight = [read for read in in_flight if read not in ended]
                if not ended:
                    time.sleep(POLL_S)

        return pull

    def memcpy(self) -> Callable[[], None]:
        """Copy tensor by tensor from this process's own memory, on one core: the limit."""
        copies = [
            (local, source, length)
            for (local, length), (source, _) in zip(areas_of(self.module), areas_of(self.original), strict=True)
        ]

        def pull() -> None:
            for local, source, length in copies:
                ctypes.memmove(local, source, length)

        return pull


def merge_pieces(pieces: Sequence[TransferPiece]) -> Iterator[TransferPiece]:
    """Return the same bytes with pieces joined that are adjacent on both sides, in parts of at most
    MERGED_BYTES.
    """
    runs: list[TransferPiece] = []
    for local, remote, length in sorted(pieces):
        if runs and (local, remote) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + length)
        else:
            runs.append((local, remote, length))
    for local, remote, length in runs:
        for offset in range(0, length, MERGED_BYTES):
            yield local + offset, remote + offset, min(MERGED_BYTES, length - offset)
