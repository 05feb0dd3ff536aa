"""What the peer service answers, call by call. Runs on the source, on the service's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, suppress
from typing import Protocol
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from rfork.errors import RforkError
from rfork.image import ranges
from rfork.image.manifest import Manifest
from rfork.peer import call_guard, codec
from rfork.peer.base import Progress
from rfork.peer.call_guard import Context
from rfork.peer.control_stream import MAX_CONTROL_STREAMS, StreamServicer
from rfork.peer.v1 import peer_pb2
from rfork.tracing import TRACEPARENT, TraceContext, use_context
from rfork.transport.base import ControlStream, Endpoint

SERVICE = "rfork.v1.Peer"
HEALTH = "grpc.health.v1.Health"
MIN_KEEPALIVE_S = 0.1
DEFAULT_KEEP_ALIVE_S = 1.0
MAX_STREAMS = 16
"""Progress streams of one fork at once: one for each channel that it may have."""
MAX_MANIFEST_CALLS = 2
"""Of one fork at once: a manifest of 100,000 tensors takes some tenths of a second to write."""
CHANGED = "the weights changed"


class PeerBackend(Protocol):
    """What the peer service needs of the seed it speaks for; thread-safe.

    All but `control_stream` and `open_channel` are quick.
    """

    generation: int

    @property
    def manifest(self) -> Manifest | None:
        """What the image holds; None while a relay has not learnt it."""
        ...

    def progress_since(self, reported: tuple[ranges.Range, ...]) -> Progress:
        """How it stands: with those of the chunks it can give that are not in `reported`."""
        ...

    def check(self, token: str) -> str:
        """The fork_id that a token was leased to; raises LeaseRejected or SourceWeightsChanged."""
        ...

    def open_channel(self, fork_id: str, layout_id: str, transports: list[str], address: str) -> tuple[str, Endpoint]:
        """Give the reader at this IP address a slot: its channel's id, how to read. May wait some seconds.

        Raises LayoutMismatch, SourceBusy or SourceWeightsChanged.
        """
        ...

    def has_channel(self, channel_id: str, fork_id: str) -> bool:
        """Whether this fork holds an open channel of this id."""
        ...

    def close_channel(self, channel_id: str) -> None:
        """Take the place back; one that is gone is no error."""
        ...

    def control_stream(self, channel_id: str, line: ControlStream) -> None:
        """Let what gives this channel its bytes talk with the reader, until the line ends.

        Blocks, so it runs on a thread of its own; a channel that is gone ends the line at once.
        """
        ...

    def on_change(self, listener: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `listener`, on any thread, after each change inside the `with` block."""
        ...


def handlers(host: PeerBackend) -> Iterator[grpc.GenericRpcHandler[Message, Message]]:
    """The peer service, and of gRPC's health service the one question that ends by itself."""
    admitted, servicer = call_guard.CallGuard(host.check), PeerServicer(host)
    serves = grpc.method_handlers_generic_handler
    manifest = admitted.handler(servicer.get_manifest, peer_pb2.GetManifestRequest, max_calls=MAX_MANIFEST_CALLS)
    yield serves(SERVICE, {"GetManifest": manifest})
    opened = admitted.handler(servicer.open_channel, peer_pb2.OpenChannelRequest)
    yield serves(SERVICE, {"OpenChannel": opened})
    watch = admitted.handler(servicer.watch_progress, peer_pb2.WatchProgressRequest, max_calls=MAX_STREAMS)
    yield serves(SERVICE, {"WatchProgress": watch})
    closed = admitted.handler(servicer.close_channel, peer_pb2.CloseChannelRequest)
    yield serves(SERVICE, {"CloseChannel": closed})
    lines = admitted.stream_handler(
        servicer.control_stream, peer_pb2.ControlStreamRequest, max_calls=MAX_CONTROL_STREAMS
    )
    yield serves(SERVICE, {"ControlStream": lines})
    health = admitted.handler(_check_health, health_pb2.HealthCheckRequest, leased=False)
    yield serves(HEALTH, {"Check": health})


class PeerServicer:
    """What each method of ``peer.proto`` says to a fork that showed its lease."""

    def __init__(self, host: PeerBackend) -> None:
        self._host = host
        self._lines = StreamServicer(host)

    async def get_manifest(
        self,
        request: peer_pb2.GetManifestRequest,
        context: Context[peer_pb2.GetManifestRequest, peer_pb2.GetManifestResponse],
        fork_id: str,
    ) -> AsyncGenerator[peer_pb2.GetManifestResponse, None]:
        """A relay that does not know its manifest yet answers once it does."""
        changed, subscription = self._change_events()
        with subscription:
            drafted, generation = False, self._host.generation
            self._host.check(call_guard.token_of(context))  # it was let in, and may have been fenced since
            while True:
                changed.clear()
                manifest, before, generation = self._host.manifest, generation, self._host.generation
                # A relay that learns its manifest may drop chunks of its draft first: only a fence matters.
                if generation != before and not drafted:
                    await context.abort(grpc.StatusCode.ABORTED, CHANGED)
                if manifest is not None:
                    break
                drafted = self._host.progress_since(()).provisional_id is not None
                await changed.wait()
        for part in codec.manifest_parts(manifest, generation, include_tensors=request.include_tensors):
            yield part

    async def open_channel(
        self,
        request: peer_pb2.OpenChannelRequest,
        context: Context[peer_pb2.OpenChannelRequest, peer_pb2.OpenChannelResponse],
        fork_id: str,
    ) -> AsyncGenerator[peer_pb2.OpenChannelResponse, None]:
        """One message: the channel, and how to read on it."""
        address = _address(context.peer())
        # On a thread: a transport may not be ready yet.
        with use_context(TraceContext.parse(call_guard.metadata_value(context, TRACEPARENT))):
            opening = asyncio.ensure_future(
                asyncio.to_thread(
                    self._host.open_channel, fork_id, request.layout_id, list(request.transports), address
                )
            )
        try:
            channel_id, endpoint = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._release_channel)
            raise
        try:
            self._host.check(call_guard.token_of(context))
        except RforkError:  # fenced since it was let in: the other channels may have been ended before this
            self._host.close_channel(channel_id)
            raise
        yield codec.endpoint_message(channel_id, endpoint, self._host.generation)

    def _release_channel(self, opening: asyncio.Future[tuple[str, Endpoint]]) -> None:
        """Nobody waits for this channel any more."""
        if not opening.cancelled() and opening.exception() is None:
            self._host.close_channel(opening.result()[0])

    async def watch_progress(
        self,
        request: peer_pb2.WatchProgressRequest,
        context: Context[peer_pb2.WatchProgressRequest, peer_pb2.WatchProgressResponse],
        fork_id: str,
    ) -> AsyncGenerator[peer_pb2.WatchProgressResponse, None]:
        """The stream's end, however it comes, gives the reader's place back."""
        channel_id = request.channel_id
        generation = self._host.generation
        if not self._host.has_channel(channel_id, fork_id):
            self._host.check(call_guard.token_of(context))  # a fence ends channels too
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no channel {channel_id!r}")
        keep_alive_s = max(request.keep_alive_ms / 1000 or DEFAULT_KEEP_ALIVE_S, MIN_KEEPALIVE_S)
        reported: tuple[ranges.Range, ...] = ()
        changed, subscription = self._change_events()
        try:
            with subscription:
                while self._host.has_channel(channel_id, fork_id):
                    changed.clear()
                    progress_since = self._host.progress_since(reported)
                    # Asked after the news is made: what is told is then of this generation.
                    if self._host.generation != generation:
                        await context.abort(grpc.StatusCode.ABORTED, CHANGED)
                    yield codec.progress_message(progress_since, generation)
                    reported = ranges.normalise((*reported, *progress_since.chunks))
                    await _wait(changed, keep_alive_s)
            if self._host.generation != generation:
                await context.abort(grpc.StatusCode.ABORTED, CHANGED)
        finally:
            self._host.close_channel(channel_id)

    async def close_channel(
        self,
        request: peer_pb2.CloseChannelRequest,
        context: Context[peer_pb2.CloseChannelRequest, peer_pb2.CloseChannelResponse],
        fork_id: str,
    ) -> AsyncGenerator[peer_pb2.CloseChannelResponse, None]:
        """Also what renews a lease: with a channel that is none, it only shows the token."""
        if self._host.has_channel(request.channel_id, fork_id):
            self._host.close_channel(request.channel_id)
        yield peer_pb2.CloseChannelResponse()

    async def control_stream(
        self,
        first: peer_pb2.ControlStreamRequest,
        requests: AsyncIterator[peer_pb2.ControlStreamRequest],
        context: Context[peer_pb2.ControlStreamRequest, peer_pb2.ControlStreamResponse],
        fork_id: str,
    ) -> AsyncGenerator[peer_pb2.ControlStreamResponse, None]:
        """The line of one channel: ends with that, or when either side closes it."""
        generation = self._host.generation
        if not self._host.has_channel(first.channel_id, fork_id):
            self._host.check(call_guard.token_of(context))  # a fence ends channels too
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no channel {first.channel_id!r}")
        changed, subscription = self._change_events()
        wake = self._wake_on_change(changed)
        with subscription:
            carried = self._lines.serve(first.channel_id, fork_id, requests, context, changed, wake)
            async with aclosing(carried) as messages:
                async for message in messages:
                    yield message
        if self._host.generation != generation:
            await context.abort(grpc.StatusCode.ABORTED, CHANGED)

    def _change_events(self) -> tuple[asyncio.Event, AbstractContextManager[None]]:
        """An event of this loop that is set, from any thread, whenever the host changes."""
        event = asyncio.Event()
        return event, self._host.on_change(self._wake_on_change(event))

    def _wake_on_change(self, event: asyncio.Event) -> Callable[[], None]:
        """Sets an event of this loop, from any thread."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            # The loop may be closed by now: whoever made the change is not to hear of that.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

        return wake


async def _check_health(
    request: health_pb2.HealthCheckRequest,
    context: Context[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    fork_id: str,
) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
    if request.service not in ("", SERVICE):
        await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
    yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


def _address(peer: str) -> str:
    """The IP address in gRPC's name of a caller: ``ipv4:10.0.0.1:4242``, or ``ipv6:%5B::1%5D:4242``."""
    return unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]")


async def _wait(event: asyncio.Event, timeout: float) -> None:
    # Not wait_for(): before Python 3.12 that loses the end of a call which comes together with the event.
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()
