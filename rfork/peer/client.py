"""gRPC client of one source's peer service. Runs on the target."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import grpc

from rfork.errors import SourceCorrupt, SourceUnavailable, SourceUnreachable, TargetError
from rfork.image.layout import Layout, Manifest
from rfork.net.tls import client_context
from rfork.peer import codec
from rfork.peer.base import BoxImage, Progress
from rfork.peer.control_stream import MAX_MESSAGE_BYTES, StreamEnd
from rfork.peer.v1 import peer_pb2, peer_pb2_grpc
from rfork.settings import TlsSettings
from rfork.tracing import inject
from rfork.transport.base import CONNECT_TIMEOUT_S, ControlStream, Endpoint, TokenSource

Response = TypeVar("Response")


class PeerClient:
    """Peer service of one source over gRPC; see `rfork.peer.base.Peer`. Thread-safe."""

    def __init__(self, address: str, token: TokenSource, tls: TlsSettings) -> None:
        self.address = address
        self._token = token
        self._has_connected = False
        options = [
            ("grpc.max_receive_message_length", -1),
            # A separate connection per source: closing it must not affect other forks.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),  # only rfork's settings read the environment; proxies do not apply
            # This option also limits one connection attempt, which otherwise takes up to 20 s.
            ("grpc.min_reconnect_backoff_ms", round(CONNECT_TIMEOUT_S * 1000)),
        ]
        credentials = channel_credentials(tls)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options)
        self._stub = peer_pb2_grpc.PeerStub(self._channel)

    def manifest(self, layout: Layout, deadline: float) -> Manifest:
        """See `Peer.manifest`."""
        return self._manifest(layout, include_tensors=False, deadline=deadline)

    def full_manifest(self, deadline: float) -> Manifest:
        """See `Peer.full_manifest`."""
        return self._manifest(None, include_tensors=True, deadline=deadline)

    def _manifest(self, layout: Layout | None, *, include_tensors: bool, deadline: float) -> Manifest:
        request = peer_pb2.GetManifestRequest(include_tensors=include_tensors)
        return self._call(
            lambda: codec.manifest_from(
                self._stub.GetManifest(request, timeout=_remaining(deadline), metadata=self._metadata()), layout
            )
        )

    def placement(self, deadline: float) -> bytes:
        """See `Peer.placement`."""
        request = peer_pb2.GetPlacementRequest()
        return self._call(
            lambda: codec.placement_from(
                self._stub.GetPlacement(request, timeout=_remaining(deadline), metadata=self._metadata())
            )
        )

    def open_boxes(self, boxes: bytes, deadline: float) -> BoxImage:
        """See `Peer.open_boxes`."""
        codec.check_boxes_size(len(boxes))
        message = self._call(
            lambda: self._stub.OpenBoxes(
                codec.boxes_parts(boxes), timeout=_remaining(deadline), metadata=self._metadata()
            )
        )
        return codec.box_image_of(message)

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
            # After a local close the call ends by itself, once all messages have been sent.
            if stream.is_broken:
                call.cancel()  # type: ignore[no-untyped-call]

        stream = StreamEnd(on_wake)
        try:
            call = self._stub.ControlStream(_outgoing_messages(channel_id, stream), metadata=self._metadata())
        except ValueError as error:  # `close` was called first
            raise codec.error_from_call(error, self.address) from None
        try:
            threading.Thread(target=self._receive_loop, args=(call, stream), name="rfork-control", daemon=True).start()
        except RuntimeError as error:
            stream.end(TargetError(f"cannot start a thread for a control stream: {error}"))
            raise TargetError(f"cannot start a thread for a control stream to {self.address}: {error}") from None
        return stream

    def _receive_loop(self, call: Iterator[peer_pb2.ControlStreamResponse], stream: StreamEnd) -> None:
        """Pass the source's messages to the local end until either side closes the stream."""
        try:
            for message in call:
                if len(message.content) > MAX_MESSAGE_BYTES:
                    stream.end(
                        SourceCorrupt(
                            f"{self.address}: a message has {len(message.content)} bytes, more than {MAX_MESSAGE_BYTES}"
                        )
                    )
                stream.push_blocking(message.content)
            stream.end(SourceUnavailable(f"{self.address}: the source closed the control stream"))
        except (grpc.RpcError, ValueError) as error:
            stream.end(codec.error_from_call(error, self.address))

    def watch(self, channel_id: str, keep_alive_s: float) -> Iterator[Progress]:
        """See `Peer.watch`."""
        request = peer_pb2.WatchProgressRequest(channel_id=channel_id, keep_alive_ms=round(keep_alive_s * 1000))
        try:
            for message in self._stub.WatchProgress(request, metadata=self._metadata()):
                yield codec.progress_of(message)
        except (grpc.RpcError, ValueError) as error:  # ValueError: `close` was called first
            raise codec.error_from_call(error, self.address) from None

    def renew(self, deadline: float) -> None:
        """See `Peer.renew`."""
        # The source reads the lease from any call; this one closes no channel.
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
        started_at = time.monotonic()
        try:
            response = call()
        except (grpc.RpcError, ValueError) as error:
            seconds = time.monotonic() - started_at
            # A refused connection fails immediately; an attempt that uses its full timeout got no reply.
            if not self._has_connected and _is_unavailable(error) and seconds >= CONNECT_TIMEOUT_S * 0.9:
                raise SourceUnreachable(f"no connection to {self.address} within {seconds:.1f} s") from None
            raise codec.error_from_call(error, self.address) from None
        self._has_connected = True
        return response


def _outgoing_messages(channel_id: str, stream: StreamEnd) -> Iterator[peer_pb2.ControlStreamRequest]:
    """Yield this side's messages; iterated on a gRPC thread."""
    yield peer_pb2.ControlStreamRequest(channel_id=channel_id)
    while (message := stream.pop_blocking()) is not None:
        yield peer_pb2.ControlStreamRequest(content=message)


def _is_unavailable(error: Exception) -> bool:
    return isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.UNAVAILABLE


def _remaining(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def channel_credentials(tls: TlsSettings) -> grpc.ChannelCredentials | None:
    """Return credentials for a gRPC client; None without TLS. Raises SettingsError for invalid files."""
    if not tls.enabled:
        return None
    client_context(tls)  # names an invalid file; gRPC would only fail to connect
    authorities = tls.ca.read_bytes() if tls.ca is not None else None
    key = tls.key.read_bytes() if tls.key is not None else None
    certificate = tls.certificate.read_bytes() if tls.certificate is not None else None
    return grpc.ssl_channel_credentials(authorities, key, certificate)
