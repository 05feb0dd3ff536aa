"""Implementation of the peer service's methods. Runs on the source, on the service's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, aclosing, suppress
from typing import Protocol, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, Message

from rfork.asyncio_timeout import timeout
from rfork.errors import RforkError
from rfork.image import ranges
from rfork.image.layout import Manifest
from rfork.net.health.v1 import health_pb2
from rfork.peer import call_guard, codec
from rfork.peer.base import BoxImage, Progress
from rfork.peer.call_guard import Context, LeaseChecker
from rfork.peer.control_stream import MAX_CONTROL_STREAMS, StreamBackend, StreamServicer
from rfork.peer.v1 import peer_pb2
from rfork.tracing import TRACEPARENT, TraceContext, use_context
from rfork.transport.base import Endpoint

SERVICE = "rfork.v1.Peer"
HEALTH_SERVICE = "grpc.health.v1.Health"
MIN_KEEP_ALIVE_S = 0.1
DEFAULT_KEEP_ALIVE_S = 1.0
MAX_PROGRESS_STREAMS = 16
"""Limit per fork: one for each of its channels."""
MAX_MANIFEST_CALLS = 2
"""Limit per fork: serializing a manifest of 100,000 tensors takes a few tenths of a second."""
MAX_BOX_CALLS = 2
"""Limit per fork."""
MAX_OPENINGS = 8
"""Limit of concurrent requests for boxes, each of which has a thread, over all forks; others wait."""
BOXES_TIMEOUT_S = 30.0
"""Time for a request for boxes to arrive."""
WEIGHTS_CHANGED = "the weights changed"

Result = TypeVar("Result")


class PeerBackend(StreamBackend, LeaseChecker, Protocol):
    """Methods of a seed that the peer service needs. Thread-safe.

    All methods except `control_stream`, `open_channel`, `placement` and `open_boxes` return quickly.
    """

    @property
    def generation(self) -> int:
        """Number of the image's generation."""
        ...

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of the image; None while a relay does not have it."""
        ...

    def progress_since(self, reported: tuple[ranges.Range, ...]) -> Progress:
        """Return the current state, with the readable chunks that are not in `reported`."""
        ...

    def open_channel(self, fork_id: str, layout_id: str, transports: list[str], address: str) -> tuple[str, Endpoint]:
        """Acquire a slot for the reader at this IP address; return the channel's id and the endpoint.

        May take a few seconds. Raises LayoutMismatch, SourceBusy or SourceWeightsChanged.
        """
        ...

    def placement(self) -> bytes:
        """Return the encoded placement map. May take a second. Raises LayoutMismatch if there is none."""
        ...

    def open_boxes(self, boxes: bytes) -> BoxImage:
        """Serve encoded boxes as an image. May take minutes.

        Raises LayoutMismatch, SourceBusy, SourceWeightsChanged, SourceCorrupt and PortInUse.
        """
        ...

    def close_channel(self, channel_id: str) -> None:
        """Release the slot; an unknown channel is not an error."""
        ...

    def on_change(self, listener: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `listener`, on any thread, after each change within the context."""
        ...


def handlers(backend: PeerBackend) -> Iterator[grpc.GenericRpcHandler[Message, Message]]:
    """Yield the handlers of the peer service, and the handler of gRPC's health check.

    Each method has a generic handler of its own, typed by the messages of that method.
    """
    guard, servicer = call_guard.CallGuard(backend), PeerServicer(backend)
    generic_handler = grpc.method_handlers_generic_handler
    get_manifest = guard.handler(servicer.get_manifest, peer_pb2.GetManifestRequest, max_calls=MAX_MANIFEST_CALLS)
    yield generic_handler(SERVICE, {"GetManifest": get_manifest})
    open_channel = guard.handler(servicer.open_channel, peer_pb2.OpenChannelRequest)
    yield generic_handler(SERVICE, {"OpenChannel": open_channel})
    watch_progress = guard.handler(
        servicer.watch_progress, peer_pb2.WatchProgressRequest, max_calls=MAX_PROGRESS_STREAMS
    )
    yield generic_handler(SERVICE, {"WatchProgress": watch_progress})
    close_channel = guard.handler(servicer.close_channel, peer_pb2.CloseChannelRequest)
    yield generic_handler(SERVICE, {"CloseChannel": close_channel})
    control_stream = guard.stream_handler(
        servicer.control_stream, peer_pb2.ControlStreamRequest, max_calls=MAX_CONTROL_STREAMS
    )
    yield generic_handler(SERVICE, {"ControlStream": control_stream})
    get_placement = guard.handler(servicer.get_placement, peer_pb2.GetPlacementRequest, max_calls=MAX_MANIFEST_CALLS)
    yield generic_handler(SERVICE, {"GetPlacement": get_placement})
    open_boxes = guard.stream_handler(servicer.open_boxes, peer_pb2.OpenBoxesRequest, max_calls=MAX_BOX_CALLS)
    yield generic_handler(SERVICE, {"OpenBoxes": open_boxes})
    check_health = guard.handler(_check_health, health_pb2.HealthCheckRequest, leased=False)
    yield generic_handler(HEALTH_SERVICE, {"Check": check_health})


class PeerServicer:
    """Methods of ``peer.proto``, called with the fork_id of the caller's lease."""

    def __init__(self, backend: PeerBackend) -> None:
        self._backend = backend
        self._streams = StreamServicer(backend)
        self._openings = asyncio.Semaphore(MAX_OPENINGS)

    async def get_manifest(
        self,
        request: peer_pb2.GetManifestRequest,
        context: Context[peer_pb2.GetManifestRequest, peer_pb2.GetManifestResponse],
        fork_id: str,
    ) -> AsyncGenerator[peer_pb2.GetManifestResponse, None]:
        """Send the manifest; a relay without one waits until it has it."""
        changed, subscription = self._change_events()
        with subscription:
            had_provisional_id, generation = False, self._backend.generation
            self._backend.check(call_guard.token_of(context))  # raises if fenced since it was authorized
            while True:
                changed.clear()
                previous_generation = generation
                manifest, generation = self._backend.manifest, self._backend.generation
                # A relay that receives its manifest may drop provisional chunks first: that change of
                # generation is not a fence.
                if generation != previous_generation and not had_provisional_id:
                    await context.abort(grpc.StatusCode.ABORTED, WEIGHTS_CHANGED)
                if manifest is not None:
                    break
                had_provisional_id = self._backend.progress_since(()).provisional_id is not None
                await changed.wait()
        for part in codec.manifest_parts(manifest, generation, include_tensors=request.include_tensors):
            yield part

    async def open_channel(
        self,
        request: peer_pb2.OpenChannelRequest,
        context: Context[peer_pb2.OpenChannelRequest, peer_pb2.OpenChannelResponse],
        fork_id: str,
    ) -> AsyncGenerator[peer_pb2.OpenChannelResponse, None]:
        """Send one message: the channel and its endpoint."""
        address = _address(context.peer())
        # On a thread, because the transport may still be preparing its endpoint.
        with use_context(TraceContext.parse(call_guard.metadata_value(context, TRACEPARENT))):
            opening = asyncio.ensure_future(
                asyncio.to_thread(
                    self._backend.open_channel, fork_id, request.layout_id, list(request.transports), address
                )
            )
        try:
            channel_id, endpoint = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._release_channel)
            raise
        try:
            self._backend.check(call_guard.token_of(context))
        except RforkError:  # fenced since it was authorized: the fence may have missed this channel
            self._backend.close_channel(channel_id)
            raise
        yield codec.endpoint_message(channel_id, endpoint, self._backend.generation)

    def _release_channel(self, opening: asyncio.Future[tuple[str, Endpoint]]) -> None:
        """Close a channel whose caller was cancelled."""
        if not opening.cancelled() and opening.exception() is None:
            self._backend.close_channel(opening.result()[0])

    async def watch_progress(
        self,
        request: peer_pb2.WatchProgressRequest,
        context: Context[peer_pb2.WatchProgressRequest, peer_pb2.WatchProgressResponse],
        fork_id: str,
    ) -> AsyncGenerator[peer_pb2.WatchProgressResponse, None]:
        """Stream progress; the end of the stream, for any reason, releases the reader slot."""
        channel_id = request.channel_id
        generation = self._backend.generation
        if not self._backend.has_channel(channel_id, fork_id):
            self._backend.check(call_guard.token_of(context))  # raises if fenced: a fence closes channels too
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no channel {channel_id!r}")
        keep_alive_s = max(request.keep_alive_ms / 1000 or DEFAULT_KEEP_ALIVE_S, MIN_KEEP_ALIVE_S)
        reported: tuple[ranges.Range, ...] = ()
        changed, subscription = self._change_events()
        try:
            with subscription:
                while self._backend.has_channel(channel_id, fork_id):
                    changed.clear()
                    progress = self._backend.progress_since(reported)
                    # Check after reading the progress, so that it belongs to this generation.
                    if self._backend.generation != generation:
                        await context.abort(grpc.StatusCode.ABORTED, WEIGHTS_CHANGED)
                    yield codec.progress_message(progress, generation)
                    reported = ranges.normalise((*reported, *progress.chunks))
                    await _wait_for(changed, keep_alive_s)
            if self._backend.generation != generation:
                await context.abort(grpc.StatusCode.ABORTED, WEIGHTS_CHANGED)
        finally:
            self._backend.close_channel(channel_id)

    async def close_channel(
        self,
        request: peer_pb2.CloseChannelRequest,
        context: Context[peer_pb2.CloseChannelRequest, peer_pb2.CloseChannelResponse],
        fork_id: str,
    ) -> AsyncGenerator[peer_pb2.CloseChannelResponse, None]:
        """Close a channel. With an unknown channel it only renews the lease."""
        if self._backend.has_channel(request.channel_id, fork_id):
            self._backend.close_channel(request.channel_id)
        yield peer_pb2.CloseChannelResponse()

    async def control_stream(
        self,
        first: peer_pb2.ControlStreamRequest,
        requests: AsyncIterator[peer_pb2.ControlStreamRequest],
        context: Context[peer_pb2.ControlStreamRequest, peer_pb2.ControlStreamResponse],
        fork_id: str,
    ) -> AsyncGenerator[peer_pb2.ControlStreamResponse, None]:
        """Carry the control stream of a channel until the channel or either side closes it."""
        generation = self._backend.generation
        if not self._backend.has_channel(first.channel_id, fork_id):
            self._backend.check(call_guard.token_of(context))  # raises if fenced: a fence closes channels too
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no channel {first.channel_id!r}")
        changed, subscription = self._change_events()
        wake = _thread_safe_setter(changed)
        with subscription:
            responses = self._streams.serve(first.channel_id, fork_id, requests, changed, wake)
            async with aclosing(responses):
                async for response in responses:
                    yield response
        if self._backend.generation != generation:
            await context.abort(grpc.StatusCode.ABORTED, WEIGHTS_CHANGED)

    async def get_placement(
        self,
        request: peer_pb2.GetPlacementRequest,
        context: Context[peer_pb2.GetPlacementRequest, peer_pb2.GetPlacementResponse],
        fork_id: str,
    ) -> AsyncGenerator[peer_pb2.GetPlacementResponse, None]:
        """Send the placement map, which is encoded at the first request."""
        data = await asyncio.to_thread(self._backend.placement)
        for part in codec.placement_parts(data):
            yield part

    async def open_boxes(
        self,
        first: peer_pb2.OpenBoxesRequest,
        requests: AsyncIterator[peer_pb2.OpenBoxesRequest],
        context: Context[peer_pb2.OpenBoxesRequest, peer_pb2.OpenBoxesResponse],
        fork_id: str,
    ) -> AsyncGenerator[peer_pb2.OpenBoxesResponse, None]:
        """Send one message: the image of the boxes. If the caller is cancelled, the next one finds the image."""
        await self._openings.acquire()
        opening: asyncio.Future[BoxImage] | None = None
        try:
            boxes = await _read_boxes(first, requests, context)
            opening = _run_on_thread(lambda: self._backend.open_boxes(boxes))
            opening.add_done_callback(self._opening_ended)
        finally:
            if opening is None:
                self._openings.release()
        yield codec.box_image_message(await asyncio.shield(opening))

    def _opening_ended(self, opening: asyncio.Future[BoxImage]) -> None:
        self._openings.release()
        if not opening.cancelled():
            opening.exception()  # retrieved here too, as the caller may be gone

    def _change_events(self) -> tuple[asyncio.Event, AbstractContextManager[None]]:
        """Return an event that is set after each change of the backend, and the context in which it is."""
        event = asyncio.Event()
        return event, self._backend.on_change(_thread_safe_setter(event))


def _thread_safe_setter(event: asyncio.Event) -> Callable[[], None]:
    """Return a function that sets an event of the running loop from any thread."""
    loop = asyncio.get_running_loop()

    def set_event() -> None:
        # The loop may be closed; the thread that made the change must not fail for that.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(event.set)

    return set_event


def _run_on_thread(function: Callable[[], Result]) -> asyncio.Future[Result]:
    """Run a function on a thread of its own: the threads of `asyncio.to_thread` are few, and needed by channels."""
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="rfork-boxes", daemon=True).start()
    return asyncio.wrap_future(result)


async def _read_boxes(
    first: peer_pb2.OpenBoxesRequest,
    requests: AsyncIterator[peer_pb2.OpenBoxesRequest],
    context: Context[peer_pb2.OpenBoxesRequest, peer_pb2.OpenBoxesResponse],
) -> bytes:
    """Return the parts of a request for boxes. Raises LayoutMismatch if they are too large."""
    data = bytearray(first.content)
    try:
        async with timeout(BOXES_TIMEOUT_S):
            async for part in requests:
                data += part.content
                codec.check_boxes_size(len(data))
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not arrive in time")
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is invalid")
    return bytes(data)


async def _check_health(
    request: health_pb2.HealthCheckRequest,
    context: Context[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    fork_id: str,
) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
    if request.service not in ("", SERVICE):
        await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
    yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


def _address(peer: str) -> str:
    """Return the IP address of gRPC's peer name: ``ipv4:10.0.0.1:4242`` or ``ipv6:%5B::1%5D:4242``."""
    return unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]")


async def _wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until the event is set, or until the timeout."""
    # Not wait_for(): before Python 3.12 it loses a cancellation that coincides with the event.
    with suppress(TimeoutError):
        async with timeout(timeout_s):
            await event.wait()
