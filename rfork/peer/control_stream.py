"""Lines: what a reader and its source's exporter say to one another while bytes move.

`StreamEnd` is one end of a line, whatever carries it: `StreamServicer` gives the source's over gRPC, with a thread
for each line that runs `PeerBackend.converse`, and `rfork.peer.client` the target's. What the other side
says is bounded at both: who is not heard out has to wait, who does not listen is cut off.
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

from rfork.errors import RforkError, SourceBusy, SourceTimeout, SourceUnavailable
from rfork.logs import logger
from rfork.peer.call_guard import Context
from rfork.peer.v1 import peer_pb2
from rfork.transport.base import ControlStream

MAX_MESSAGE_BYTES = 64 << 10
MAX_QUEUED = 256
"""Messages that wait on one end, in either direction."""
MAX_QUEUED_BYTES = 1 << 20
"""And their bytes."""
MAX_CONTROL_STREAMS = 4
"""Of one fork at once: it needs one, and the next before the last has quite ended."""
MAX_THREADS = 128
"""Of all forks, those included that are over but whose thread has not ended yet."""
POLL_INTERVAL_S = 0.5

log = logger(__name__)


class StreamEnd:
    """One end of a line; see `rfork.transport.base.ControlStream`. Thread-safe.

    Whoever carries the line takes what was sent by `pop`, brings what came by `push`, and says by
    `end` that there will be no more. `stirred` is called, on any thread, when there is something to do.
    """

    def __init__(self, stirred: Callable[[], None] = lambda: None) -> None:
        self._on_wake = stirred
        self._changed = threading.Condition()
        self._outgoing: deque[bytes] = deque()
        self._incoming: deque[bytes] = deque()
        self._error: RforkError | None = None
        self._closed = False

    def send(self, message: bytes) -> None:
        """See `Line.send`. More than `MAX_QUEUED`, or `MAX_QUEUED_BYTES`, that are not taken end the line."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of a line has at most {MAX_MESSAGE_BYTES} bytes, not {len(message)}")
        with self._changed:
            self._raise_ended()
            if not _fits(self._outgoing, message):
                self._error = SourceUnavailable(f"the other side has not taken the last {len(self._outgoing)} messages")
            else:
                self._outgoing.append(message)
            self._changed.notify_all()
        self._on_wake()
        with self._changed:
            self._raise_ended()

    def receive(self, deadline: float) -> bytes:
        """See `Line.receive`. What came before the other side ended the line is still given."""
        with self._changed:
            while not self._incoming or self._closed:
                self._raise_ended()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    if self._incoming or self._error is not None:
                        continue
                    raise SourceTimeout("the other side of the line said nothing until the deadline")
            message = self._incoming.popleft()
            self._changed.notify_all()
        self._on_wake()
        return message

    def close(self) -> None:
        """See `Line.close`."""
        with self._changed:
            self._closed = True
        self.end(SourceUnavailable("the line was closed"))

    def end(self, error: RforkError) -> None:
        """There is no more to come, and why; the first reason stands."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._on_wake()

    @property
    def ended(self) -> bool:
        """Whether either side, or what carries it, has ended it."""
        with self._changed:
            return self._error is not None

    @property
    def is_broken(self) -> bool:
        """Whether it ended otherwise than by `close`: nobody waits for what was sent any more."""
        with self._changed:
            return self._error is not None and not self._closed

    def push(self, message: bytes) -> bool:
        """Bring what the other side sent; False while there is no room. An ended line drops it."""
        with self._changed:
            if self._error is None:
                if not _fits(self._incoming, message):
                    return False
                self._incoming.append(message)
                self._changed.notify_all()
            return True

    def deliver_waiting(self, message: bytes) -> None:
        """`push` on a thread that may wait for room."""
        while not self.push(message):
            with self._changed:
                self._changed.wait_for(
                    lambda: self._error is not None or _fits(self._incoming, message), POLL_INTERVAL_S
                )

    def pop(self) -> bytes | None:
        """The next message to carry; None: none now."""
        with self._changed:
            return self._outgoing.popleft() if self._outgoing else None

    def outgoing_waiting(self) -> bytes | None:
        """The next message to carry, waited for; None: the line has ended, and all that was sent is taken."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._outgoing) or self._error is not None)
            return self._outgoing.popleft() if self._outgoing else None

    def _raise_ended(self) -> None:
        if self._error is not None:
            # A new one each time: two threads may raise it at once.
            raise type(self._error)(str(self._error), hint=self._error.hint)


def _fits(waiting: deque[bytes], message: bytes) -> bool:
    return len(waiting) < MAX_QUEUED and sum(map(len, waiting)) + len(message) <= MAX_QUEUED_BYTES


class StreamBackend(Protocol):
    """What lines need of the seed they lead to; see `rfork.peer.servicer.PeerBackend`."""

    def has_channel(self, channel_id: str, fork_id: str) -> bool:
        """Whether this fork holds an open channel of this id."""
        ...

    def control_stream(self, channel_id: str, line: ControlStream) -> None:
        """Talk until the line ends; blocks."""
        ...


class StreamServicer:
    """The source's ends of all lines. Its methods run on the service's event loop, `converse` on threads."""

    def __init__(self, host: StreamBackend) -> None:
        self._host = host
        self._threads: Counter[str] = Counter()
        self._lock = threading.Lock()

    async def serve(
        self,
        channel_id: str,
        fork_id: str,
        requests: AsyncIterator[peer_pb2.ControlStreamRequest],
        context: Context[peer_pb2.ControlStreamRequest, peer_pb2.ControlStreamResponse],
        changed: asyncio.Event,
        wake: Callable[[], None],
    ) -> AsyncGenerator[peer_pb2.ControlStreamResponse, None]:
        """What the host's exporter says on one line, until either side ends it or the channel is no more.

        `wake` sets `changed` from any thread. Raises SourceBusy where too many threads talk already.
        """
        line = StreamEnd(wake)
        self._start(channel_id, fork_id, line)
        hearing = asyncio.ensure_future(_receive_loop(requests, line, changed))
        try:
            while self._host.has_channel(channel_id, fork_id):
                changed.clear()
                ended = line.ended
                while (message := line.pop()) is not None:
                    yield peer_pb2.ControlStreamResponse(content=message)
                if ended:  # asked before: all that was sent until then is carried
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_INTERVAL_S):
                        await changed.wait()
        finally:
            hearing.cancel()
            line.end(SourceUnavailable("the reader's channel or its line is closed"))

    def _start(self, channel_id: str, fork_id: str, line: StreamEnd) -> None:
        with self._lock:
            if self._threads[fork_id] >= MAX_CONTROL_STREAMS or self._threads.total() >= MAX_THREADS:
                raise SourceBusy(f"there are {self._threads.total()} lines to this source already")
            self._threads[fork_id] += 1
        thread = threading.Thread(
            target=self._run_handler, args=(channel_id, fork_id, line), name="rfork-line", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # no thread to be had
            self._remove(fork_id)
            raise SourceBusy(f"no thread is left for a line: {error}") from None

    def _run_handler(self, channel_id: str, fork_id: str, line: StreamEnd) -> None:
        try:
            converse(self._host, channel_id, line)
        finally:
            self._remove(fork_id)

    def _remove(self, fork_id: str) -> None:
        with self._lock:
            self._threads[fork_id] -= 1
            if not self._threads[fork_id]:
                del self._threads[fork_id]


def converse(host: StreamBackend, channel_id: str, line: ControlStream) -> None:
    """Run the source's end until it is over. Never raises: a bug in one line is that reader's alone."""
    try:
        host.control_stream(channel_id, line)
    except RforkError as error:
        log.debug("a line ended", channel=channel_id, because=str(error))
    except Exception:
        log.exception("a line broke", channel=channel_id)
    finally:
        line.close()


async def _receive_loop(
    requests: AsyncIterator[peer_pb2.ControlStreamRequest], line: StreamEnd, changed: asyncio.Event
) -> None:
    """Bring what the reader says, as fast as it is heard out: gRPC holds the reader back meanwhile."""
    try:
        async for request in requests:
            if len(request.content) > MAX_MESSAGE_BYTES:
                break
            while not line.push(request.content):
                await asyncio.sleep(0.01)
    except (DecodeError, grpc.RpcError, grpc.aio.UsageError) as error:
        log.debug("a line's reader cannot be understood", because=str(error))
    finally:
        line.end(SourceUnavailable("the reader closed the line"))
        changed.set()
