"""The source side: the image's memory registered with an engine of its own, whose ports are guarded."""

from __future__ import annotations

import threading

from rfork.errors import SettingsError
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.transport.base import Endpoint, Plain
from rfork.transport.transfer_engine.engine import Engine, Protocol

MOST_AREAS = 10_000
"""From about 12,000 areas on, the engine's handshake message passes its 1 MiB limit, and every read fails."""

log = logger(__name__)


class TransferEngineExporter(Plain):
    """One image, readable by the hosts of those that hold a channel. Runs on the source.

    Reads are one-sided: no code of the source runs for them. So nothing here asks the gate, counts
    bytes or holds a rate; the lease is checked where the peer service opens a channel, which lets the
    reader's host in. Once the last channel of a host has ended its connections are cut: over TCP it then
    reads no more. Over RDMA its network card keeps what it was granted until this exporter is closed.

    Whoever is let in may also write: the engine knows no readers that only read. A relay's unverified
    chunks are readable too: readers rely on WatchProgress for what may be read, and on the digests for
    what arrived.

    Raises SettingsError when the image lies in too many areas to register, or the engine cannot start.
    """

    def __init__(self, image: Image, host: str, protocol: Protocol, devices: str) -> None:
        areas = image.allocations()
        if len(areas) > MOST_AREAS:
            raise SettingsError(
                f"the image lies in {len(areas)} memory areas, transfer_engine takes at most {MOST_AREAS}",
                hint="use RFORK_TRANSPORTS=http, or load the model into fewer, larger allocations",
            )
        self._lock = threading.Lock()
        self._engine = Engine(host, protocol, devices)
        try:
            self._engine.register(areas)
        except SettingsError:
            self._engine.close()
            raise
        # Also keeps the registered memory alive.
        self._image: Image | None = image
        self._endpoint = Endpoint(
            "transfer_engine",
            {
                "session": self._engine.session,
                "protocol": protocol,
                # On a device, areas that are near one another may be registered apart.
                "gather": "yes" if image.device.type == "cpu" else "no",
            },
            tuple(image.segments(0, image.layout.image_bytes)),
        )
        if protocol == "tcp":
            log.warning(
                "transfer_engine over plain TCP: while a reader has a channel, every process on its host "
                "reads AND WRITES the weights; unset RFORK_UNGUARDED_TCP unless you trust those hosts wholly",
                session=self._engine.session,
            )

    def endpoint(self) -> Endpoint:
        """The session, and the address of every byte of the image."""
        return self._endpoint

    def let_in(self, channel_id: str, address: str) -> None:
        """Let the reader's host reach the engine; see `Exporter.let_in`. Raises SourceBusy."""
        self._engine.packet_filter.let_in(channel_id, address)

    def let_out(self, channel_id: str) -> None:
        """Shut it out and cut it off, unless it has another channel; see `Exporter.let_out`."""
        self._engine.packet_filter.let_out(channel_id)

    def close(self) -> None:
        """Unregister the memory and take the engine down, reads under way included. Safe to call twice."""
        with self._lock:
            self._engine.close()
            self._image = None
