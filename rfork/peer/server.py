"""The peer service of one instance. Runs on the source.

An asyncio gRPC server on a thread of its own: a progress stream that waits costs no thread, so many
readers, or many strangers, do not starve the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, suppress
from typing import NoReturn, Protocol, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from rfork.errors import PortInUse, RforkError
from rfork.image import ranges
from rfork.image.manifest import Manifest
from rfork.peer import codec
from rfork.peer.base import Progress
from rfork.peer.v1 import peer_pb2, peer_pb2_grpc
from rfork.settings import Settings, TlsSettings, host_port
from rfork.transport.base import Endpoint
from rfork.transport.tls import server_context

Request = TypeVar("Request")
Response = TypeVar("Response")

SERVICE = "rfork.v1.Peer"
LARGEST_REQUEST = 64 << 10
LEAST_KEEP_ALIVE_S = 0.1
DEFAULT_KEEP_ALIVE_S = 1.0
MOST_CALLS = 512
STOP_GRACE_S = 0.5


class PeerHost(Protocol):
    """What the peer service needs of the seed it speaks for; every method is quick and thread-safe."""

    generation: int

    @property
    def manifest(self) -> Manifest | None:
        """What the image holds; None while a relay has not learnt it."""
        ...

    def news(self, told: tuple[ranges.Range, ...]) -> Progress:
        """How it stands: with those of the chunks it can give that are not in `told`."""
        ...

    def check(self, token: str) -> str:
        """The fork_id that a token was leased to; raises LeaseRefused or SourceChanged."""
        ...

    def open_channel(self, fork_id: str, layout_id: str, transports: list[str]) -> tuple[str, Endpoint]:
        """Give a place: its channel's id, how to read. Raises LayoutMismatch, SourceBusy, SourceChanged."""
        ...

    def has_channel(self, channel_id: str, fork_id: str) -> bool:
        """Whether this fork holds an open channel of this id."""
        ...

    def close_channel(self, channel_id: str) -> None:
        """Take the place back; one that is gone is no error."""
        ...

    def on_change(self, listener: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `listener`, on any thread, after each change inside the `with` block."""
        ...


class PeerService(Protocol):
    """What makes one `PeerHost` reachable."""

    @property
    def address(self) -> str:
        """Where others reach it."""
        ...

    def start(self) -> None:
        """Begin to answer."""
        ...

    def stop(self) -> None:
        """End all calls."""
        ...


ServePeer = Callable[[PeerHost, Settings], PeerService]
"""Makes the (not yet started) service of a host; `PeerServer` is the one over gRPC."""


class PeerServer:
    """Serves one `PeerHost` on `settings.bind`:`settings.peer_port`."""

    def __init__(self, host: PeerHost, settings: Settings) -> None:
        self._host = host
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._server: grpc.aio.Server | None = None
        self._thread = threading.Thread(target=self._run, name="rfork-peer", daemon=True)
        self._port = 0

    @property
    def address(self) -> str:
        """host:port that others are told."""
        return host_port(self._settings.reachable_at, self._port)

    def start(self) -> None:
        """Listen; raises PortInUse."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def stop(self) -> None:
        """End all calls and join the thread."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _start(self) -> None:
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # or two processes could share one port unnoticed
                ("grpc.max_receive_message_length", LARGEST_REQUEST),
                ("grpc.max_send_message_length", -1),  # an address map of 100,000 segments is some MB
            ],
            maximum_concurrent_rpcs=MOST_CALLS,
        )
        peer_pb2_grpc.add_PeerServicer_to_server(_Servicer(self._host), server)
        servicer = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        await servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        where = host_port(self._settings.bind, self._settings.peer_port)
        try:
            credentials = server_credentials(self._settings.tls)
            if credentials is None:
                self._port = server.add_insecure_port(where)
            else:
                self._port = server.add_secure_port(where, credentials)
        except RuntimeError:
            raise PortInUse(
                self._settings.bind, self._settings.peer_port, setting="RFORK_PEER_PORT"
            ) from None
        await server.start()
        self._server = server

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)


def server_credentials(tls: TlsSettings) -> grpc.ServerCredentials | None:
    """Credentials for a gRPC server; None where TLS is off. Raises SettingsError for files of no use."""
    if tls.certificate is None or tls.key is None:
        return None
    server_context(tls)  # names a file that cannot be used; gRPC would only fail to open the port
    authorities = tls.ca.read_bytes() if tls.ca is not None else None
    return grpc.ssl_server_credentials(
        [(tls.key.read_bytes(), tls.certificate.read_bytes())], authorities, authorities is not None
    )


class _Servicer(peer_pb2_grpc.PeerServicer):
    def __init__(self, host: PeerHost) -> None:
        self._host = host

    async def GetManifest(  # gRPC's name
        self,
        request: peer_pb2.GetManifestRequest,
        context: grpc.aio.ServicerContext[peer_pb2.GetManifestRequest, peer_pb2.GetManifestResponse],
    ) -> AsyncIterator[peer_pb2.GetManifestResponse]:
        """A relay that does not know its manifest yet answers once it does."""
        await self._admit(context)
        changed, subscription = self._changes()
        with subscription:
            while (manifest := self._host.manifest) is None:
                changed.clear()
                await changed.wait()
        for part in codec.manifest_parts(
            manifest, self._host.generation, include_tensors=request.include_tensors
        ):
            yield part

    async def OpenChannel(
        self,
        request: peer_pb2.OpenChannelRequest,
        context: grpc.aio.ServicerContext[peer_pb2.OpenChannelRequest, peer_pb2.OpenChannelResponse],
    ) -> peer_pb2.OpenChannelResponse:
        fork_id = await self._admit(context)
        try:
            channel_id, endpoint = self._host.open_channel(
                fork_id, request.layout_id, list(request.transports)
            )
        except RforkError as error:
            await _abort(context, error)
        return codec.endpoint_message(channel_id, endpoint, self._host.generation)

    async def WatchProgress(
        self,
        request: peer_pb2.WatchProgressRequest,
        context: grpc.aio.ServicerContext[peer_pb2.WatchProgressRequest, peer_pb2.WatchProgressResponse],
    ) -> AsyncIterator[peer_pb2.WatchProgressResponse]:
        """The stream's end, however it comes, gives the reader's place back."""
        fork_id = await self._admit(context)
        channel_id = request.channel_id
        if not self._host.has_channel(channel_id, fork_id):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no channel {channel_id!r}")
        keep_alive_s = max(request.keep_alive_ms / 1000 or DEFAULT_KEEP_ALIVE_S, LEAST_KEEP_ALIVE_S)
        generation = self._host.generation
        told: tuple[ranges.Range, ...] = ()
        changed, subscription = self._changes()
        try:
            with subscription:
                while self._host.has_channel(channel_id, fork_id):
                    changed.clear()
                    news = self._host.news(told)
                    # Asked after the news is made: what is told is then of this generation.
                    if self._host.generation != generation:
                        await context.abort(grpc.StatusCode.ABORTED, "the weights changed")
                    yield codec.progress_message(news, generation)
                    told = ranges.normalise((*told, *news.chunks))
                    await _wait(changed, keep_alive_s)
        finally:
            self._host.close_channel(channel_id)

    async def CloseChannel(
        self,
        request: peer_pb2.CloseChannelRequest,
        context: grpc.aio.ServicerContext[peer_pb2.CloseChannelRequest, peer_pb2.CloseChannelResponse],
    ) -> peer_pb2.CloseChannelResponse:
        fork_id = await self._admit(context)
        if self._host.has_channel(request.channel_id, fork_id):
            self._host.close_channel(request.channel_id)
        return peer_pb2.CloseChannelResponse()

    def _changes(self) -> tuple[asyncio.Event, AbstractContextManager[None]]:
        """An event of this loop that is set, from any thread, whenever the host changes."""
        event = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            # The loop may be closed by now: whoever made the change is not to hear of that.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

        return event, self._host.on_change(wake)

    async def _admit(self, context: grpc.aio.ServicerContext[Request, Response]) -> str:
        metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
        header = metadata.get("authorization", "")
        text = header if isinstance(header, str) else header.decode("ascii", "replace")
        try:
            return self._host.check(text.removeprefix("Bearer "))
        except RforkError as error:
            await _abort(context, error)


async def _wait(event: asyncio.Event, timeout: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout)
    except TimeoutError:
        return


async def _abort(context: grpc.aio.ServicerContext[Request, Response], error: RforkError) -> NoReturn:
    await context.abort(codec.STATUS_OF.get(type(error), grpc.StatusCode.INTERNAL), str(error))
