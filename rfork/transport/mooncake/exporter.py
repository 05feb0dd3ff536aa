"""Source side: registers the image's memory with an engine whose ports are filtered."""

from __future__ import annotations

import threading
import time

from rfork.errors import RforkError, SourceBusy, TransportUnavailable
from rfork.image.memory import Image
from rfork.image.registration import Region
from rfork.image.staging import CPU
from rfork.logs import logger
from rfork.thread_priority import lower_thread_priority
from rfork.transport.base import Endpoint, StatelessExporter
from rfork.transport.mooncake.engine import MooncakeEngine, regions_within_limit, register
from rfork.transport.mooncake.library import WireProtocol

log = logger(__name__)


class TransferEngineExporter(StatelessExporter):
    """One image, readable by the hosts that have an open channel. Runs on the source.

    Reads are one-sided: no code of the source runs. So this exporter cannot check the gate, count bytes or
    limit the rate. The lease is checked when the peer service opens a channel, which allows the reader's
    host. When the last channel of a host has closed, its connections are closed: over TCP it cannot read any
    more. Over RDMA its network card keeps its access until this exporter is closed.

    An allowed host may also write: the engine has no read-only access. A relay's unverified chunks are
    readable too, as are gaps between two tensors of one area (`rfork.image.registration`). Readers rely on
    WatchProgress to know which chunks are readable, and on the digests to verify them.

    Registering a large model takes seconds, so it runs on a separate thread while the inference engine
    starts. This thread and Mooncake's threads get the priority `nice`.

    Raises TransportUnavailable if the image has too many memory areas to register. Later errors are logged,
    and raised to readers.
    """

    def __init__(self, image: Image, host: str, protocol: WireProtocol, devices: str, nice: int = 0) -> None:
        regions = regions_within_limit(image, len(devices.split(",")) if protocol == "rdma" else 0)
        self._changed = threading.Condition()
        self._engine: MooncakeEngine | None = None
        self._endpoint: Endpoint | None = None
        self._error: TransportUnavailable | None = None
        self._closed = False
        # Also keeps the registered memory alive.
        self._image: Image | None = image
        self._thread = threading.Thread(
            target=self._prepare,
            args=(image, regions, host, protocol, devices, nice),
            name="rfork-register",
            daemon=True,
        )
        self._thread.start()

    def ready(self, deadline: float) -> bool:
        """See `Exporter.ready`: the memory has been registered, or registration failed."""
        with self._changed:
            return self._changed.wait_for(self._is_prepared, max(0.0, deadline - time.monotonic()))

    def endpoint(self) -> Endpoint:
        """Return the session and the addresses of the image. Raises as `authorize_peer`."""
        return self._registered()[1]

    def authorize_peer(self, channel_id: str, address: str) -> None:
        """Allow the reader's host to connect to the engine; see `Exporter.authorize_peer`.

        Raises TransportUnavailable if the memory could not be registered, SourceBusy if it is not registered
        yet.
        """
        self._registered()[0].packet_filter.allow(channel_id, address)

    def revoke_peer(self, channel_id: str) -> None:
        """Disconnect and block the reader's host, unless it has another channel; see `Exporter.revoke_peer`."""
        engine = self._engine
        if engine is not None:
            engine.packet_filter.deny(channel_id)

    def close(self) -> None:
        """Unregister the memory and close the engine; unfinished reads fail. Idempotent.

        Waits for a registration in progress, which cannot be cancelled.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            if self._engine is not None:
                self._engine.close()
            self._image = self._endpoint = None

    def _is_prepared(self) -> bool:
        return self._endpoint is not None or self._error is not None or self._closed

    def _registered(self) -> tuple[MooncakeEngine, Endpoint]:
        with self._changed:
            if self._error is not None:
                raise type(self._error)(str(self._error), hint=self._error.hint)
            if self._closed:
                raise SourceBusy("transfer_engine no longer serves this image")
            if self._engine is None or self._endpoint is None:
                raise SourceBusy("transfer_engine is still registering the image's memory")
            return self._engine, self._endpoint

    def _prepare(
        self, image: Image, regions: list[Region], host: str, protocol: WireProtocol, devices: str, nice: int
    ) -> None:
        lower_thread_priority(nice)
        started_at = time.monotonic()
        engine: MooncakeEngine | None = None
        try:
            engine = MooncakeEngine(host, protocol, devices)
            register(engine, image, regions)
            endpoint = Endpoint(
                "transfer_engine",
                {
                    "session": engine.session,
                    "protocol": protocol,
                    # On a device, adjacent areas may be registered separately.
                    "gather": "yes" if image.devices <= {CPU} else "no",
                },
                tuple(image.segments(0, image.layout.image_bytes)),
            )
        except Exception as error:
            if engine is not None:
                engine.close()
            self._record_failure(error)
            return
        seconds = round(time.monotonic() - started_at, 3)
        log.info(
            "weights registered for transfer_engine",
            protocol=protocol,
            devices=devices,
            areas=len(regions),
            seconds=seconds,
        )
        if protocol == "tcp":
            log.warning(
                "transfer_engine over plain TCP: while a fork reads, every process on its host can read and write the "
                "weights",
                session=engine.session,
                hint="unset RFORK_ALLOW_UNAUTHENTICATED_TCP unless these hosts are fully trusted",
            )
        with self._changed:
            self._engine, self._endpoint = engine, endpoint
            self._changed.notify_all()

    def _record_failure(self, error: Exception) -> None:
        if isinstance(error, TransportUnavailable):
            reported_error = error
        else:  # out of memory, missing library or a bug: the other transports must continue
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
