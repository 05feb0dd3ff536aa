"""Target side: reads granted ranges from the source's memory into the target's image."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch

from rfork.cuda.device import flush_rdma_writes
from rfork.errors import SourceCorrupt, SourceError, SourceTimeout, SourceUnavailable, TransportUnavailable
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.transport.base import ControlStream, OpenControlStream, TokenSource
from rfork.transport.mooncake.read_plan import AddressMap, ContiguousPiece, common_pieces
from rfork.transport.nixl import protocol
from rfork.transport.nixl.agent import MemoryMap, NixlAgent, NixlReadState
from rfork.transport.nixl.library import Descriptor
from rfork.transport.nixl.protocol import AgentDescription, PagedDescription
from rfork.transport.same_host.connection import Message, decode, encode, get_int, get_str, raise_error

MAX_STREAMS: Final = 2
"""Control streams of one reader, each with one granted range; a source accepts four for each fork."""
TRANSFER_BYTES: Final = 16 * MIB
"""Maximum bytes of one transfer: within a host, starting it copies them, which cannot be interrupted."""
TRANSFER_DESCRIPTORS: Final = 4096
MAX_INFLIGHT: Final = 4
"""Transfers of one read in flight."""
MIN_WAIT_S, MAX_WAIT_S = 0.0001, 0.004
GRACE_S: Final = 1.0
"""Time that running transfers get after a deadline, because stopping them breaks the reader."""
PROBE_TIMEOUT_S: Final = 5.0

log = logger(__name__)


@dataclass(slots=True)
class DescriptorBatch:
    """Descriptors of one transfer: all local ones on one type of memory, and all remote ones."""

    on_gpus: tuple[bool, bool]
    local: list[Descriptor] = field(default_factory=list)
    remote: list[Descriptor] = field(default_factory=list)
    bytes: int = 0


def plan_transfers(pieces: Sequence[ContiguousPiece], local: MemoryMap, remote: MemoryMap) -> list[DescriptorBatch]:
    """Return the transfers that fill `pieces`, each within `TRANSFER_BYTES` and `TRANSFER_DESCRIPTORS`."""
    open_transfers: dict[tuple[bool, bool], DescriptorBatch] = {}
    transfers: list[DescriptorBatch] = []
    for piece in pieces:
        devices = local.device(piece.local), remote.device(piece.remote)
        on_gpus = devices[0] is not None, devices[1] is not None
        offset = 0
        while offset < piece.length:
            transfer = open_transfers.get(on_gpus)
            if transfer is None or transfer.bytes >= TRANSFER_BYTES or len(transfer.local) >= TRANSFER_DESCRIPTORS:
                transfer = open_transfers[on_gpus] = DescriptorBatch(on_gpus)
                transfers.append(transfer)
            length = min(piece.length - offset, TRANSFER_BYTES - transfer.bytes)
            transfer.local.append((piece.local + offset, length, devices[0] or 0))
            transfer.remote.append((piece.remote + offset, length, devices[1] or 0))
            transfer.bytes += length
            offset += length
    return transfers


class NixlReader:
    """Reads one source's image over a separate agent. Runs on the target; thread-safe.

    NIXL cannot stop a single transfer. If transfers do not end after deadline and grace period, the agent is
    destroyed, which stops them. The reader is then broken, and further reads raise the same error.

    `flushed_gpus`: GPUs of the image whose writes by network cards must be flushed after each read.
    """

    def __init__(
        self,
        agent: NixlAgent,
        image: Image,
        token: TokenSource,
        open_control_stream: OpenControlStream,
        *,
        remote: AddressMap,
        flushed_gpus: Sequence[torch.device] = (),
    ) -> None:
        self.agent = agent
        self._image = image
        self._token = token
        self._open_control_stream = open_control_stream
        self._remote = remote
        self._remote_memory = MemoryMap()
        self.peer = ""
        """Name of the source's agent, once `open` has returned."""
        self._probe = torch.zeros(protocol.PROBE_BYTES, dtype=torch.uint8)
        self._flushed_gpus = flushed_gpus
        self._changed = threading.Condition()
        self._broken = threading.Event()
        self._error: SourceError | None = None
        self._active_calls = 0
        self._closing = False
        self._is_closed = False
        self._streams: set[ControlStream] = set()
        self._stream_count = 0
        self._idle: list[ControlStream] = []

    def open(self, deadline: float) -> None:
        """Make the source start an agent, and read a few bytes of it.

        Raises as `read`, and TransportUnavailable or a subclass if the two agents cannot communicate.
        """
        with self._in_use():
            description = self._describe(deadline)
            self._remote_memory = MemoryMap(description.memory())
            self.agent.register_regions([(self._probe.data_ptr(), self._probe.numel())])
            self.peer = description.agent
            probe = DescriptorBatch((False, False))
            probe.local.append((self._probe.data_ptr(), protocol.PROBE_BYTES, 0))
            probe.remote.append((description.probe, protocol.PROBE_BYTES, 0))
            try:
                self.agent.load_peer(description.metadata, description.agent)
                self._run_transfers([probe], min(deadline, time.monotonic() + PROBE_TIMEOUT_S))
            except (SourceUnavailable, SourceTimeout) as error:
                if self._closing:
                    raise
                hint = "use another transport between these two machines"
                raise TransportUnavailable(f"nixl cannot read from the source: {error}", hint=hint) from error
            if bytes(self._probe.tolist()) != description.nonce:
                raise SourceCorrupt("nixl read other bytes than the source's")

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Copy image range `[begin, end)` into the target image; see `Reader.read`.

        Raises ValueError for a range outside the image, and TargetError if a GPU of this side fails.
        """
        self._image.segments(begin, end)
        with self._in_use():
            received, lost_at = begin, -1
            while received < end:
                try:
                    for slice_end in self._read_slices(received, end, deadline):
                        received = slice_end
                except SourceUnavailable as error:
                    # A lost stream is replaced once: a source that closed it reports the reason on the next request.
                    self._check()
                    if received == lost_at:
                        raise
                    lost_at = received
                    log.info("control stream replaced", reason=str(error), missing=end - received)
        for gpu in self._flushed_gpus:
            flush_rdma_writes(gpu)

    def set_rate_limit(self, rate: int | None) -> None:
        """Does nothing: the source throttles. See `Reader.set_rate_limit`."""

    def close(self) -> None:
        """Destroy the agent; reads in progress raise SourceUnavailable. Idempotent."""
        self._closing = True
        self._fail(SourceUnavailable("the reader was closed"))
        with self._changed:
            if self._active_calls == 0:
                self._close_agent()
            self._changed.wait_for(lambda: self._is_closed)

    def _describe(self, deadline: float) -> AgentDescription:
        pages: list[str] = []
        with self._stream(deadline) as stream:
            count = 1
            while len(pages) < count:
                stream.send(encode({"operation": "describe", "page": len(pages)}))
                reply = _receive(stream, deadline)
                raise_error(reply)
                pages.append(get_str(reply, "page"))
                count = get_int(reply, "pages")
                if not 0 < count <= protocol.MAX_PAGES:
                    raise SourceCorrupt(f"the source describes its agent in {count} pages")
        return PagedDescription(pages).joined()

    def _read_slices(self, begin: int, end: int, deadline: float) -> Iterator[int]:
        """Read a range slice by slice over one control stream. Yield the end of what has been received after each.

        The request for a slice releases the previous one, whose bytes count once the reply confirms that.
        """
        with self._stream(deadline) as stream:
            at = begin
            while at < end:
                release = int(at > begin)
                request: Message = {
                    "operation": "acquire",
                    "token": self._token(),
                    "begin": at,
                    "end": end,
                    "release": release,
                }
                stream.send(encode(request))
                reply = _receive(stream, deadline)
                if release:
                    _check_released(reply)
                    yield at
                raise_error(reply)
                granted = get_int(reply, "granted")
                if not 0 < granted <= end - at:
                    raise SourceCorrupt(f"the source granted {granted} of {end - at} bytes")
                pieces = common_pieces(self._remote.segments(at, at + granted), self._image.segments(at, at + granted))
                self._run_transfers(plan_transfers(pieces, self.agent.memory, self._remote_memory), deadline)
                at += granted
            stream.send(encode({"operation": "release"}))
            _check_released(_receive(stream, deadline))
        yield end

    def _run_transfers(self, transfers: Sequence[DescriptorBatch], deadline: float) -> None:
        """Run all transfers. Raises SourceUnavailable or SourceTimeout once none is running any more."""
        waiting, running = deque(transfers), list[int]()
        wait, error = MIN_WAIT_S, None
        try:
            while waiting or running:
                self._check()
                if time.monotonic() >= deadline:
                    raise SourceTimeout("the source's bytes did not arrive before the deadline")
                while waiting and len(running) < MAX_INFLIGHT:
                    transfer = waiting.popleft()
                    running.append(
                        self.agent.start_read(
                            self.peer,
                            transfer.local,
                            transfer.remote,
                            local_on_gpu=transfer.on_gpus[0],
                            remote_on_gpu=transfer.on_gpus[1],
                        )
                    )
                if self._poll(running):
                    wait = MIN_WAIT_S
                elif not self._broken.wait(wait):
                    wait = min(wait * 1.5, MAX_WAIT_S)
        except SourceError as raised:
            error = raised
        except BaseException:
            # An interrupt or a bug: transfers may be running that no call polls any more.
            self._fail(SourceUnavailable("the reader was interrupted"))
            raise
        if error is not None:
            self._drain(running, error)
            raise error

    def _poll(self, running: list[int]) -> bool:
        """Remove finished transfers; return True if there were any. Raises SourceUnavailable if one has failed."""
        states = [(handle, self.agent.state(handle)) for handle in running]
        ended = [handle for handle, state in states if state is not NixlReadState.RUNNING]
        for handle in ended:
            running.remove(handle)
            self.agent.release(handle)
        if any(state is NixlReadState.FAILED for _, state in states):
            raise SourceUnavailable("the source disconnected, or aborted a read")
        return bool(ended)

    def _drain(self, running: list[int], error: SourceError) -> None:
        """Wait until no transfer is running; destroy the agent if that takes too long, or if it is broken anyway."""
        expires_at = time.monotonic() + GRACE_S
        while running and time.monotonic() < expires_at and not self._broken.is_set():
            try:
                if not self._poll(running):
                    self._broken.wait(MAX_WAIT_S)
            except SourceUnavailable:
                pass
        if running or isinstance(error, SourceUnavailable):
            self._fail(type(error)(str(error)))

    @contextmanager
    def _stream(self, deadline: float) -> Iterator[ControlStream]:
        """Lend a control stream, opened if necessary. It is closed on errors: a range may still be granted on it."""
        with self._changed:
            available = self._changed.wait_for(
                lambda: self._error is not None or self._idle or self._stream_count < MAX_STREAMS,
                max(0.0, deadline - time.monotonic()),
            )
            self._check()
            if not available or time.monotonic() >= deadline:
                raise SourceTimeout("no request to the source was possible before the deadline")
            stream = self._idle.pop() if self._idle else None
            self._stream_count += stream is None
        try:
            if stream is None:
                stream = self._open_control_stream()
                with self._changed:
                    self._streams.add(stream)
                    self._check()  # a concurrent `close` has not closed this stream
            yield stream
        except BaseException:
            if stream is not None:
                stream.close()
            with self._changed:
                if stream is not None:
                    self._streams.discard(stream)
                self._stream_count -= 1
                self._changed.notify_all()
            raise
        with self._changed:
            self._idle.append(stream)
            self._changed.notify_all()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the agent within the context; when leaving a broken reader, wait until its agent is destroyed."""
        with self._changed:
            self._check()
            self._active_calls += 1
        try:
            yield
        except SourceUnavailable:
            self._check()  # prefer the reason why either side closed the reader
            raise
        finally:
            with self._changed:
                self._active_calls -= 1
                if self._broken.is_set() and self._active_calls == 0:
                    self._close_agent()
                # Only after that no more bytes can arrive.
                self._changed.wait_for(lambda: self._is_closed or not self._broken.is_set())

    def _check(self) -> None:
        """Raise the error that broke the reader, if any."""
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _fail(self, error: SourceError) -> None:
        """Break the reader: every read in progress stops. Only the first error counts."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._broken.set()
            streams = tuple(self._streams)
            self._changed.notify_all()
        for stream in streams:
            stream.close()

    def _close_agent(self) -> None:
        if not self._is_closed:
            self.agent.close()
            self._is_closed = True
            self._changed.notify_all()


def _receive(stream: ControlStream, deadline: float) -> Message:
    return decode(stream.receive(deadline))


def _check_released(reply: Message) -> None:
    """Raise the error in the reply, or SourceCorrupt, unless it confirms the release of the granted range."""
    if reply.get("released") != 1:
        raise_error(reply)
        raise SourceCorrupt("the source did not confirm that a range was released")
