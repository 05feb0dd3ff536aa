"""A peer service without gRPC: calls seeds of the same process. For tests of the receiving side."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from rfork.errors import SourceUnavailable, SourceWeightsChanged
from rfork.image import ranges
from rfork.image.layout import Layout
from rfork.image.manifest import Manifest
from rfork.peer import codec
from rfork.peer.base import Progress
from rfork.peer.control_stream import POLL_INTERVAL_S, StreamEnd, converse
from rfork.peer.servicer import PeerBackend
from rfork.peer.v1 import peer_pb2
from rfork.settings import InstanceSettings
from rfork.transport.base import ControlStream, Endpoint, TokenSource


class InMemoryPeers:
    """The peer services of one imagined network, by address."""

    def __init__(self) -> None:
        self._hosts: dict[str, PeerBackend] = {}
        self._served = 0

    def service(self, host: PeerBackend, settings: InstanceSettings) -> InMemoryPeerServer:
        """A `rfork.peer.server.ServePeer` into this network."""
        return InMemoryPeerServer(self, host)

    def serve(self, host: PeerBackend) -> str:
        """Make `host` reachable; returns its address, which no other host ever has."""
        self._served += 1
        address = f"memory:{self._served}"
        self._hosts[address] = host
        return address

    def kill(self, address: str) -> None:
        """The process at `address` dies: it answers nobody any more."""
        self._hosts.pop(address, None)

    def host(self, address: str) -> PeerBackend:
        """Whoever lives at `address`; raises SourceUnavailable."""
        if address not in self._hosts:
            raise SourceUnavailable(f"{address}: connection refused")
        return self._hosts[address]

    def is_reachable(self, address: str, host: PeerBackend) -> bool:
        """Whether this host still answers there."""
        return self._hosts.get(address) is host

    def dial(self, address: str, token: TokenSource) -> InMemoryPeer:
        """A `rfork.peer.base.Dial` into this network."""
        return InMemoryPeer(self, address, token)


class InMemoryPeerServer:
    """One host's place in the network; see `rfork.peer.server.PeerService`."""

    def __init__(self, peers: InMemoryPeers, host: PeerBackend) -> None:
        self._peers = peers
        self._host = host
        self._address = "closed:0"

    @property
    def address(self) -> str:
        """Where others reach it."""
        return self._address

    def start(self) -> None:
        """See `PeerService.start`."""
        self._address = self._peers.serve(self._host)

    def stop(self) -> None:
        """See `PeerService.stop`."""
        self._peers.kill(self._address)


class InMemoryPeer:
    """One source's peer service; see `rfork.peer.base.Peer`."""

    def __init__(self, peers: InMemoryPeers, address: str, token: TokenSource) -> None:
        self._peers = peers
        self._address = address
        self._token = token
        self._events: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def manifest(self, own: Layout, deadline: float) -> Manifest:
        """See `Peer.manifest`."""
        return codec.manifest_from(self._parts(include_tensors=False), own)

    def full_manifest(self, deadline: float) -> Manifest:
        """See `Peer.full_manifest`."""
        return codec.manifest_from(self._parts(include_tensors=True), None)

    def open(self, layout_id: str, transports: tuple[str, ...], deadline: float) -> tuple[str, Endpoint]:
        """See `Peer.open`."""
        host = self._peers.host(self._address)
        return host.open_channel(host.check(self._token()), layout_id, list(transports), "127.0.0.1")

    def open_control_stream(self, channel_id: str) -> ControlStream:
        """See `Peer.talk`."""
        host = self._peers.host(self._address)
        fork_id = host.check(self._token())
        near, far = stream_pair()

        def follow() -> None:
            talking = threading.Thread(target=converse, args=(host, channel_id, far), daemon=True)
            talking.start()
            while talking.is_alive() and self._peers.is_reachable(self._address, host):
                if not host.has_channel(channel_id, fork_id):
                    break
                talking.join(POLL_INTERVAL_S / 10)
            far.close()  # what was said until then still arrives

        threading.Thread(target=follow, name="rfork-line", daemon=True).start()
        return near

    def watch(self, channel_id: str, keep_alive_s: float) -> Iterator[Progress]:
        """See `Peer.watch`."""
        host = self._peers.host(self._address)
        fork_id = host.check(self._token())
        generation = host.generation
        reported: tuple[ranges.Range, ...] = ()
        with host.on_change(lambda: self._events.put(True)):
            while host.has_channel(channel_id, fork_id):
                update = host.progress_since(reported)
                if host.generation != generation:
                    raise SourceWeightsChanged(f"{self._address}: the weights changed")
                yield update
                reported = ranges.normalise((*reported, *update.chunks))
                if not self._wait(keep_alive_s):
                    break
                self._peers.host(self._address)  # raises SourceUnavailable when it died
            else:
                if host.generation != generation:
                    raise SourceWeightsChanged(f"{self._address}: the weights changed")
        host.close_channel(channel_id)

    def renew(self, deadline: float) -> None:
        """See `Peer.renew`."""
        self._peers.host(self._address).check(self._token())

    def close_channel(self, channel_id: str, deadline: float) -> None:
        """See `Peer.leave`."""
        self._peers.host(self._address).close_channel(channel_id)

    def close(self) -> None:
        """See `Peer.close`."""
        self._events.put(False)

    def _wait(self, timeout: float) -> bool:
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return True

    def _parts(self, *, include_tensors: bool) -> Iterator[peer_pb2.GetManifestResponse]:
        host = self._peers.host(self._address)
        host.check(self._token())
        if host.manifest is None:
            raise SourceUnavailable(f"{self._address}: the relay knows no manifest yet")
        return codec.manifest_parts(host.manifest, host.generation, include_tensors=include_tensors)


def stream_pair() -> tuple[StreamEnd, StreamEnd]:
    """A line in memory: its two ends."""
    one, other = StreamEnd(), StreamEnd()
    for here, there in ((one, other), (other, one)):
        threading.Thread(target=_forward, args=(here, there), name="rfork-line", daemon=True).start()
    return one, other


def _forward(here: StreamEnd, there: StreamEnd) -> None:
    while (message := here.outgoing_waiting()) is not None:
        there.deliver_waiting(message)
    there.end(SourceUnavailable("the other side closed the line"))
