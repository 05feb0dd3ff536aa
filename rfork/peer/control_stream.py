"""Control streams: messages between a reader and its source's exporter during a transfer.

`StreamEnd` is one end, independent of how messages are carried. `StreamServicer` carries the messages of the
source's ends over gRPC, with one thread per stream that runs `StreamBackend.control_stream`;
`rfork.peer.client` carries those of the target's ends. Both sides bound the other side's messages: a sender
waits while the receiver is busy, and a stream whose messages are not read is closed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from typing import Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from rfork.asyncio_timeout import timeout
from rfork.errors import RforkError, SourceBusy, SourceTimeout, SourceUnavailable
from rfork.logs import logger
from rfork.peer.v1 import peer_pb2
from rfork.transport.base import ControlStream

MAX_MESSAGE_BYTES = 64 << 10
MAX_QUEUED_MESSAGES = 256
"""Limit of one end, per direction."""
MAX_QUEUED_BYTES = 1 << 20
"""Limit of one end, per direction."""
MAX_CONTROL_STREAMS = 4
"""Limit per fork: a fork needs one, and may open the next before the last has ended."""
MAX_THREADS = 128
"""Limit over all forks, including closed streams whose thread has not ended."""
POLL_INTERVAL_S = 0.5

log = logger(__name__)


class StreamEnd:
    """One end of a control stream; see `rfork.transport.base.ControlStream`. Thread-safe.

    The carrier of the messages fetches outgoing ones with `pop`, delivers incoming ones with `push`, and calls
    `end` when the stream is over. `on_wake` is called, on any thread, when there is work for the carrier.
    """

    def __init__(self, on_wake: Callable[[], None] = lambda: None) -> None:
        self._on_wake = on_wake
        self._changed = threading.Condition()
        self._outgoing: deque[bytes] = deque()
        self._incoming: deque[bytes] = deque()
        self._error: RforkError | None = None
        self._closed = False

    def send(self, message: bytes) -> None:
        """See `ControlStream.send`.

        More than `MAX_QUEUED_MESSAGES` unsent messages or `MAX_QUEUED_BYTES` unsent bytes close the stream.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a control message is limited to {MAX_MESSAGE_BYTES} bytes, got {len(message)}")
        with self._changed:
            self._check_open()
            if not _has_space(self._outgoing, message):
                self._error = SourceUnavailable(f"the other side did not read the last {len(self._outgoing)} messages")
            else:
                self._outgoing.append(message)
            self._changed.notify_all()
        self._on_wake()
        with self._changed:
            self._check_open()

    def receive(self, deadline: float) -> bytes:
        """See `ControlStream.receive`.

        Messages that arrived before the other side closed the stream are still returned.
        """
        with self._changed:
            while not self._incoming or self._closed:
                self._check_open()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    if self._incoming or self._error is not None:
                        continue
                    raise SourceTimeout("the other side sent no control message before the deadline")
            message = self._incoming.popleft()
            self._changed.notify_all()
        self._on_wake()
        return message

    def close(self) -> None:
        """See `ControlStream.close`."""
        with self._changed:
            self._closed = True
        self.end(SourceUnavailable("the control stream was closed"))

    def end(self, error: RforkError) -> None:
        """End the stream with `error`; the first error wins."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._on_wake()

    @property
    def has_ended(self) -> bool:
        """True if either side or the carrier has ended the stream."""
        with self._changed:
            return self._error is not None

    @property
    def is_broken(self) -> bool:
        """True if the stream ended other than by `close`: queued messages are then dropped."""
        with self._changed:
            return self._error is not None and not self._closed

    def push(self, message: bytes) -> bool:
        """Queue a message from the other side; return False if the queue is full. An ended stream drops it."""
        with self._changed:
            if self._error is None:
                if not _has_space(self._incoming, message):
                    return False
                self._incoming.append(message)
                self._changed.notify_all()
            return True

    def push_blocking(self, message: bytes) -> None:
        """Blocking `push`: wait while the queue is full."""
        while not self.push(message):
            with self._changed:
                self._changed.wait_for(
                    lambda: self._error is not None or _has_space(self._incoming, message), POLL_INTERVAL_S
                )

    def pop(self) -> bytes | None:
        """Return the next outgoing message; None if there is none."""
        with self._changed:
            return self._outgoing.popleft() if self._outgoing else None

    def pop_blocking(self) -> bytes | None:
        """Wait for the next outgoing message; None if the stream has ended and the queue is empty."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._outgoing) or self._error is not None)
            return self._outgoing.popleft() if self._outgoing else None

    def _check_open(self) -> None:
        if self._error is not None:
            # A new exception each time: two threads may raise it concurrently.
            raise type(self._error)(str(self._error), hint=self._error.hint)


def _has_space(queue: deque[bytes], message: bytes) -> bool:
    """Return True if the message fits into the queue."""
    return len(queue) < MAX_QUEUED_MESSAGES and sum(map(len, queue)) + len(message) <= MAX_QUEUED_BYTES


class StreamBackend(Protocol):
    """Methods of a seed that control streams need. Thread-safe."""

    def has_channel(self, channel_id: str, fork_id: str) -> bool:
        """Return True if this fork has an open channel with this id."""
        ...

    def control_stream(self, channel_id: str, stream: ControlStream) -> None:
        """Let the channel's exporter serve the control stream until it ends.

        Blocks, so it runs on a separate thread; for an unknown channel the stream ends immediately.
        """
        ...


class StreamServicer:
    """The source's ends of all control streams. Runs on the service's event loop, with one thread per stream."""

    def __init__(self, backend: StreamBackend) -> None:
        self._backend = backend
        self._threads_by_fork: Counter[str] = Counter()
        self._lock = threading.Lock()

    async def serve(
        self,
        channel_id: str,
        fork_id: str,
        requests: AsyncIterator[peer_pb2.ControlStreamRequest],
        changed: asyncio.Event,
        wake: Callable[[], None],
    ) -> AsyncGenerator[peer_pb2.ControlStreamResponse, None]:
        """Yield the exporter's messages until either side ends the stream or the channel is closed.

        `wake` sets `changed` from any thread. Raises SourceBusy if there are too many streams.
        """
        stream = StreamEnd(on_wake=wake)
        self._start_thread(channel_id, fork_id, stream)
        receive_task = asyncio.ensure_future(_receive_loop(requests, stream, changed))
        try:
            while self._backend.has_channel(channel_id, fork_id):
                changed.clear()
                has_ended = stream.has_ended  # before the loop, which then carries all messages sent until the end
                while (message := stream.pop()) is not None:
                    yield peer_pb2.ControlStreamResponse(content=message)
                if has_ended:
                    break
                with suppress(TimeoutError):
                    async with timeout(POLL_INTERVAL_S):
                        await changed.wait()
        finally:
            receive_task.cancel()
            stream.end(SourceUnavailable("the reader's channel or its control stream is closed"))

    def _start_thread(self, channel_id: str, fork_id: str, stream: StreamEnd) -> None:
        with self._lock:
            total = self._threads_by_fork.total()
            if self._threads_by_fork[fork_id] >= MAX_CONTROL_STREAMS or total >= MAX_THREADS:
                raise SourceBusy(f"too many control streams to this source ({total})")
            self._threads_by_fork[fork_id] += 1
        thread = threading.Thread(
            target=self._run, args=(channel_id, fork_id, stream), name="rfork-control", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            self._remove_thread(fork_id)
            raise SourceBusy(f"cannot start a thread for a control stream: {error}") from None

    def _run(self, channel_id: str, fork_id: str, stream: StreamEnd) -> None:
        try:
            serve_control_stream(self._backend, channel_id, stream)
        finally:
            self._remove_thread(fork_id)

    def _remove_thread(self, fork_id: str) -> None:
        with self._lock:
            self._threads_by_fork[fork_id] -= 1
            if not self._threads_by_fork[fork_id]:
                del self._threads_by_fork[fork_id]


def serve_control_stream(backend: StreamBackend, channel_id: str, stream: ControlStream) -> None:
    """Serve the source's end until the stream is over. Never raises: an error affects only this reader."""
    try:
        backend.control_stream(channel_id, stream)
    except RforkError as error:
        log.debug("control stream ended", channel=channel_id, reason=str(error))
    except Exception:
        log.exception("control stream failed", channel=channel_id)
    finally:
        stream.close()


async def _receive_loop(
    requests: AsyncIterator[peer_pb2.ControlStreamRequest], stream: StreamEnd, changed: asyncio.Event
) -> None:
    """Queue the reader's messages; while the queue is full, gRPC's flow control stops the reader."""
    try:
        async for request in requests:
            if len(request.content) > MAX_MESSAGE_BYTES:
                break
            while not stream.push(request.content):
                await asyncio.sleep(0.01)
    except (DecodeError, grpc.RpcError, grpc.aio.UsageError) as error:
        log.debug("invalid message on a control stream", reason=str(error))
    finally:
        stream.end(SourceUnavailable("the reader closed the control stream"))
        changed.set()
