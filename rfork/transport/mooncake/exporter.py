"""The source side: the image's memory registered with an engine of its own, whose ports are guarded."""

from __future__ import annotations

import threading
import time

from rfork.errors import RforkError, SourceBusy, TransportUnavailable
from rfork.image.memory import Image
from rfork.image.registration import Region
from rfork.image.storages import CPU
from rfork.logs import logger
from rfork.thread_priority import lower_thread_priority
from rfork.transport.base import Endpoint, StatelessExporter
from rfork.transport.mooncake.engine import MooncakeEngine
from rfork.transport.mooncake.library import WireProtocol
from rfork.transport.mooncake.registration import regions_within_limit, register

log = logger(__name__)


class TransferEngineExporter(StatelessExporter):
    """One image, readable by the hosts of those that hold a channel. Runs on the source.

    Reads are one-sided: no code of the source runs for them. So nothing here asks the gate, counts
    bytes or holds a rate; the lease is checked where the peer service opens a channel, which lets the
    reader's host in. Once the last channel of a host has ended its connections are cut: over TCP it then
    reads no more. Over RDMA its network card keeps what it was granted until this exporter is closed.

    Whoever is let in may also write: the engine knows no readers that only read. A relay's unverified
    chunks are readable too, as is what lies between two tensors of one area (`rfork.image.registration`): readers
    rely on WatchProgress for what may be read, and on the digests for what arrived.

    The engine starts and registers on a thread of its own, as that takes seconds for a large model: the
    engine's own start-up goes on meanwhile. Its threads, and those that it starts, are nicer by `nice`.
    Raises TransportUnavailable when the image lies in too many areas to register; what goes wrong later is
    logged, and raised to whoever wants to read.
    """

    def __init__(self, image: Image, host: str, protocol: WireProtocol, devices: str, nice: int = 0) -> None:
        found = regions_within_limit(image, len(devices.split(",")) if protocol == "rdma" else 0)
        self._changed = threading.Condition()
        self._engine: MooncakeEngine | None = None
        self._endpoint: Endpoint | None = None
        self._error: TransportUnavailable | None = None
        self._closed = False
        # Also keeps the registered memory alive.
        self._image: Image | None = image
        self._thread = threading.Thread(
            target=self._prepare,
            args=(image, found, host, protocol, devices, nice),
            name="rfork-register",
            daemon=True,
        )
        self._thread.start()

    def ready(self, deadline: float) -> bool:
        """See `FakeSpanExporter.ready`: the memory is registered, or could not be."""
        with self._changed:
            return self._changed.wait_for(self._is_ready, max(0.0, deadline - time.monotonic()))

    def endpoint(self) -> Endpoint:
        """The session, and the address of every byte of the image. Raises as `authorize_peer`."""
        return self._registered()[1]

    def authorize_peer(self, channel_id: str, address: str) -> None:
        """Let the reader's host reach the engine; see `FakeSpanExporter.authorize_peer`.

        Raises TransportUnavailable where the memory could not be registered, SourceBusy where it is not yet.
        """
        self._registered()[0].packet_filter.allow(channel_id, address)

    def revoke_peer(self, channel_id: str) -> None:
        """Shut it out and cut it off, unless it has another channel; see `FakeSpanExporter.revoke_peer`."""
        engine = self._engine
        if engine is not None:
            engine.packet_filter.deny(channel_id)

    def close(self) -> None:
        """Unregister the memory and take the engine down, reads under way included. Safe to call twice.

        Waits for a registration that is under way: it cannot be broken off.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            if self._engine is not None:
                self._engine.close()
            self._image = self._endpoint = None

    def _is_ready(self) -> bool:
        return self._endpoint is not None or self._error is not None or self._closed

    def _registered(self) -> tuple[MooncakeEngine, Endpoint]:
        with self._changed:
            if self._error is not None:
                raise type(self._error)(str(self._error), hint=self._error.hint)
            if self._closed:
                raise SourceBusy("transfer_engine gives this image no more")
            if self._engine is None or self._endpoint is None:
                raise SourceBusy("transfer_engine is still registering the image's memory")
            return self._engine, self._endpoint

    def _prepare(
        self, image: Image, found: list[Region], host: str, protocol: WireProtocol, devices: str, nice: int
    ) -> None:
        lower_thread_priority(nice)
        began = time.monotonic()
        engine: MooncakeEngine | None = None
        try:
            engine = MooncakeEngine(host, protocol, devices)
            register(engine, image, found)
            endpoint = Endpoint(
                "transfer_engine",
                {
                    "session": engine.session,
                    "protocol": protocol,
                    # On a device, areas that are near one another may be registered apart.
                    "gather": "yes" if image.devices <= {CPU} else "no",
                },
                tuple(image.segments(0, image.layout.image_bytes)),
            )
        except Exception as error:
            if engine is not None:
                engine.close()
            self._failed(error)
            return
        seconds = round(time.monotonic() - began, 3)
        log.info("memory registered", over=protocol, devices=devices, areas=len(found), seconds=seconds)
        if protocol == "tcp":
            log.warning(
                "transfer_engine over plain TCP: while a reader has a channel, every process on its host "
                "reads AND WRITES the weights; unset RFORK_ALLOW_UNAUTHENTICATED_TCP unless you trust those hosts wholly",
                session=engine.session,
            )
        with self._changed:
            self._engine, self._endpoint = engine, endpoint
            self._changed.notify_all()

    def _failed(self, error: Exception) -> None:
        if isinstance(error, TransportUnavailable):
            reported_error = error
        else:  # out of memory, no library any more, or a bug: the other transports have to go on
            hint = error.hint if isinstance(error, RforkError) else ""
            reported_error = TransportUnavailable(f"{type(error).__name__}: {error}", hint=hint)
        log.error(
            "transport cannot be used",
            transport="transfer_engine",
            error=reported_error.kind,
            detail=str(reported_error),
            hint=reported_error.hint,
        )
        with self._changed:
            self._error = reported_error
            self._changed.notify_all()
