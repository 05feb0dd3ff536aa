"""Calls to the peer service of one source. Runs on the target."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import grpc

from rfork.errors import SourceCorrupt, SourceUnavailable, SourceUnreachable, TargetError
from rfork.image.layout import Layout
from rfork.image.manifest import Manifest
from rfork.peer import codec
from rfork.peer.base import Progress
from rfork.peer.control_stream import MAX_MESSAGE_BYTES, StreamEnd
from rfork.peer.v1 import peer_pb2, peer_pb2_grpc
from rfork.settings import TlsSettings
from rfork.tls_files import client_context
from rfork.tracing import inject
from rfork.transport.base import CONNECT_S, ControlStream, Endpoint, TokenSource

Response = TypeVar("Response")


class PeerClient:
    """One source's peer service over gRPC; see `rfork.peer.base.Peer`. Thread-safe."""

    def __init__(self, address: str, token: TokenSource, tls: TlsSettings) -> None:
        self.address = address
        self._token = token
        self._reached = False
        options = [
            ("grpc.max_receive_message_length", -1),
            # Each source's channel is its own connection: closing one must not touch another fork.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),  # settings alone read the environment; proxies do not apply
            # By this name gRPC bounds one attempt to connect, which else takes up to 20 s.
            ("grpc.min_reconnect_backoff_ms", round(CONNECT_S * 1000)),
        ]
        credentials = channel_credentials(tls)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options)
        self._stub = peer_pb2_grpc.PeerStub(self._channel)

    def manifest(self, own: Layout, deadline: float) -> Manifest:
        """See `Peer.manifest`."""
        return self._manifest(own, include_tensors=False, deadline=deadline)

    def full_manifest(self, deadline: float) -> Manifest:
        """See `Peer.full_manifest`."""
        return self._manifest(None, include_tensors=True, deadline=deadline)

    def _manifest(self, own: Layout | None, *, include_tensors: bool, deadline: float) -> Manifest:
        request = peer_pb2.GetManifestRequest(include_tensors=include_tensors)
        return self._call(
            lambda: codec.manifest_from(
                self._stub.GetManifest(request, timeout=_remaining(deadline), metadata=self._metadata()), own
            )
        )

    def open(self, layout_id: str, transports: tuple[str, ...], deadline: float) -> tuple[str, Endpoint]:
        """See `Peer.open`."""
        request = peer_pb2.OpenChannelRequest(layout_id=layout_id, transports=transports)
        message = self._call(
            lambda: self._stub.OpenChannel(request, timeout=_remaining(deadline), metadata=self._metadata())
        )
        return message.channel_id, codec.endpoint_of(message)

    def open_control_stream(self, channel_id: str) -> ControlStream:
        """See `Peer.open_control_stream`."""

        def on_wake() -> None:
            # One that is closed here ends by itself, once all that was sent is carried.
            if line.is_broken:
                call.cancel()  # type: ignore[no-untyped-call]

        line = StreamEnd(on_wake)
        try:
            call = self._stub.ControlStream(_outgoing_messages(channel_id, line), metadata=self._metadata())
        except ValueError as error:  # `close` came first
            raise codec.error_of(error, self.address) from None
        try:
            threading.Thread(target=self._receive_loop, args=(call, line), name="rfork-line", daemon=True).start()
        except RuntimeError as error:
            line.end(TargetError(f"no thread for a line: {error}"))
            raise TargetError(f"no thread for a line to {self.address}: {error}") from None
        return line

    def _receive_loop(self, call: Iterator[peer_pb2.ControlStreamResponse], line: StreamEnd) -> None:
        """Bring what the source says to our end, until either side ends the line."""
        try:
            for message in call:
                if len(message.content) > MAX_MESSAGE_BYTES:
                    line.end(SourceCorrupt(f"{self.address}: a message of {len(message.content)} bytes"))
                line.deliver_waiting(message.content)
            line.end(SourceUnavailable(f"{self.address}: the source closed the line"))
        except (grpc.RpcError, ValueError) as error:
            line.end(codec.error_of(error, self.address))

    def watch(self, channel_id: str, keep_alive_s: float) -> Iterator[Progress]:
        """See `Peer.watch`."""
        request = peer_pb2.WatchProgressRequest(channel_id=channel_id, keep_alive_ms=round(keep_alive_s * 1000))
        try:
            for message in self._stub.WatchProgress(request, metadata=self._metadata()):
                yield codec.progress_of(message)
        except (grpc.RpcError, ValueError) as error:  # ValueError: `close` came first
            raise codec.error_of(error, self.address) from None

    def renew(self, deadline: float) -> None:
        """See `Peer.renew`."""
        # The source reads the lease off any call; this one closes no channel.
        self.close_channel("", deadline)

    def close_channel(self, channel_id: str, deadline: float) -> None:
        """See `Peer.close_channel`."""
        request = peer_pb2.CloseChannelRequest(channel_id=channel_id)
        self._call(lambda: self._stub.CloseChannel(request, timeout=_remaining(deadline), metadata=self._metadata()))

    def close(self) -> None:
        """See `Peer.close`."""
        self._channel.close()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._token()}"), *inject().items())

    def _call(self, call: Callable[[], Response]) -> Response:
        began = time.monotonic()
        try:
            response = call()
        except (grpc.RpcError, ValueError) as error:
            seconds = time.monotonic() - began
            # A connection that is refused fails at once: one that takes all its time gets no answer.
            if not self._reached and _is_unavailable(error) and seconds >= CONNECT_S * 0.9:
                raise SourceUnreachable(f"no connection to {self.address} within {seconds:.1f} s") from None
            raise codec.error_of(error, self.address) from None
        self._reached = True
        return response


def _outgoing_messages(channel_id: str, line: StreamEnd) -> Iterator[peer_pb2.ControlStreamRequest]:
    """What this side says on a line; iterated on a thread of gRPC's."""
    yield peer_pb2.ControlStreamRequest(channel_id=channel_id)
    while (message := line.outgoing_waiting()) is not None:
        yield peer_pb2.ControlStreamRequest(content=message)


def _is_unavailable(error: Exception) -> bool:
    return isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.UNAVAILABLE


def _remaining(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def channel_credentials(tls: TlsSettings) -> grpc.ChannelCredentials | None:
    """Credentials for a gRPC client; None where TLS is off. Raises SettingsError for files of no use."""
    if not tls.enabled:
        return None
    client_context(tls)  # names a file that cannot be used; gRPC would only fail to connect
    authorities = tls.ca.read_bytes() if tls.ca is not None else None
    key = tls.key.read_bytes() if tls.key is not None else None
    certificate = tls.certificate.read_bytes() if tls.certificate is not None else None
    return grpc.ssl_channel_credentials(authorities, key, certificate)
