"""Peer service without gRPC: calls seeds in the same process. For tests of the receiver."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from rfork.errors import SourceUnavailable, SourceWeightsChanged
from rfork.image import ranges
from rfork.image.layout import Layout, Manifest
from rfork.peer import codec
from rfork.peer.base import BoxImage, Progress
from rfork.peer.control_stream import POLL_INTERVAL_S, StreamEnd, serve_control_stream
from rfork.peer.servicer import PeerBackend
from rfork.peer.v1 import peer_pb2
from rfork.settings import InstanceSettings
from rfork.transport.base import ControlStream, Endpoint, TokenSource


class InMemoryPeers:
    """Simulated network: the peer services of seeds in this process, by address."""

    def __init__(self) -> None:
        self._backends: dict[str, PeerBackend] = {}
        self._served = 0

    def service(self, backend: PeerBackend, settings: InstanceSettings) -> InMemoryPeerServer:
        """Create a service in this network; a `rfork.peer.server.ServePeer`."""
        return InMemoryPeerServer(self, backend)

    def serve(self, backend: PeerBackend) -> str:
        """Make `backend` reachable and return its address, which is never reused."""
        self._served += 1
        address = f"memory:{self._served}"
        self._backends[address] = backend
        return address

    def kill(self, address: str) -> None:
        """Simulate the death of the process at `address`."""
        self._backends.pop(address, None)

    def backend(self, address: str) -> PeerBackend:
        """Return the backend at `address`. Raises SourceUnavailable."""
        if address not in self._backends:
            raise SourceUnavailable(f"{address}: connection refused")
        return self._backends[address]

    def is_reachable(self, address: str, backend: PeerBackend) -> bool:
        """Return True if this backend is reachable at the address."""
        return self._backends.get(address) is backend

    def dial(self, address: str, token: TokenSource) -> InMemoryPeer:
        """Connect to a peer in this network; a `rfork.peer.base.Dial`."""
        return InMemoryPeer(self, address, token)


class InMemoryPeerServer:
    """Service of one backend in the network; see `rfork.peer.server.PeerService`."""

    def __init__(self, peers: InMemoryPeers, backend: PeerBackend) -> None:
        self._peers = peers
        self._backend = backend
        self._address = "closed:0"

    @property
    def address(self) -> str:
        """Address for other instances."""
        return self._address

    def start(self) -> None:
        """See `PeerService.start`."""
        self._address = self._peers.serve(self._backend)

    def stop(self) -> None:
        """See `PeerService.stop`."""
        self._peers.kill(self._address)


class InMemoryPeer:
    """Peer service of one source; see `rfork.peer.base.Peer`."""

    def __init__(self, peers: InMemoryPeers, address: str, token: TokenSource) -> None:
        self._peers = peers
        self._address = address
        self._token = token
        self._events: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True after a change of the source, False once this peer is closed."""

    def manifest(self, own: Layout, deadline: float) -> Manifest:
        """See `Peer.manifest`."""
        return codec.manifest_from(self._parts(include_tensors=False), own)

    def full_manifest(self, deadline: float) -> Manifest:
        """See `Peer.full_manifest`."""
        return codec.manifest_from(self._parts(include_tensors=True), None)

    def placement(self, deadline: float) -> bytes:
        """See `Peer.placement`."""
        return codec.placement_from(codec.placement_parts(self._authorized().placement()))

    def open_boxes(self, boxes: bytes, deadline: float) -> BoxImage:
        """See `Peer.open_boxes`."""
        return self._authorized().open_boxes(boxes)

    def open(self, layout_id: str, transports: tuple[str, ...], deadline: float) -> tuple[str, Endpoint]:
        """See `Peer.open`."""
        backend = self._peers.backend(self._address)
        return backend.open_channel(backend.check(self._token()), layout_id, list(transports), "127.0.0.1")

    def open_control_stream(self, channel_id: str) -> ControlStream:
        """See `Peer.open_control_stream`."""
        backend = self._peers.backend(self._address)
        fork_id = backend.check(self._token())
        local_end, remote_end = stream_pair()

        def run() -> None:
            thread = threading.Thread(target=serve_control_stream, args=(backend, channel_id, remote_end), daemon=True)
            thread.start()
            while thread.is_alive() and self._peers.is_reachable(self._address, backend):
                if not backend.has_channel(channel_id, fork_id):
                    break
                thread.join(POLL_INTERVAL_S / 10)
            remote_end.close()  # messages sent before still arrive

        threading.Thread(target=run, name="rfork-control", daemon=True).start()
        return local_end

    def watch(self, channel_id: str, keep_alive_s: float) -> Iterator[Progress]:
        """See `Peer.watch`."""
        backend = self._peers.backend(self._address)
        fork_id = backend.check(self._token())
        generation = backend.generation
        reported: tuple[ranges.Range, ...] = ()
        with backend.on_change(lambda: self._events.put(True)):
            while backend.has_channel(channel_id, fork_id):
                update = backend.progress_since(reported)
                if backend.generation != generation:
                    raise SourceWeightsChanged(f"{self._address}: the weights changed")
                yield update
                reported = ranges.normalise((*reported, *update.chunks))
                if not self._wait(keep_alive_s):
                    break
                self._peers.backend(self._address)  # raises SourceUnavailable if it died
            else:
                if backend.generation != generation:
                    raise SourceWeightsChanged(f"{self._address}: the weights changed")
        backend.close_channel(channel_id)

    def renew(self, deadline: float) -> None:
        """See `Peer.renew`."""
        self._peers.backend(self._address).check(self._token())

    def close_channel(self, channel_id: str, deadline: float) -> None:
        """See `Peer.close_channel`."""
        self._peers.backend(self._address).close_channel(channel_id)

    def close(self) -> None:
        """See `Peer.close`."""
        self._events.put(False)

    def _wait(self, timeout: float) -> bool:
        """Wait for a change of the source; return False if this peer was closed."""
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return True

    def _authorized(self) -> PeerBackend:
        """Return the backend, which has accepted the lease."""
        backend = self._peers.backend(self._address)
        backend.check(self._token())
        return backend

    def _parts(self, *, include_tensors: bool) -> Iterator[peer_pb2.GetManifestResponse]:
        backend = self._authorized()
        if backend.manifest is None:
            raise SourceUnavailable(f"{self._address}: the relay has no manifest yet")
        return codec.manifest_parts(backend.manifest, backend.generation, include_tensors=include_tensors)


def stream_pair() -> tuple[StreamEnd, StreamEnd]:
    """Return the two connected ends of an in-memory control stream."""
    first, second = StreamEnd(), StreamEnd()
    for source, destination in ((first, second), (second, first)):
        threading.Thread(target=_forward, args=(source, destination), name="rfork-control", daemon=True).start()
    return first, second


def _forward(source: StreamEnd, destination: StreamEnd) -> None:
    while (message := source.pop_blocking()) is not None:
        destination.push_blocking(message)
    destination.end(SourceUnavailable("the other side closed the control stream"))
