"""Exporters of a seed's image, one for each transport, while the image's memory exists. Runs on the source.

Exporters keep references to the image's memory and register it with devices. They are closed before the
memory is released, and created again for new memory: `open` and `close` may alternate; after `shut_down`
nothing opens.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from rfork.errors import RforkError, TransportUnavailable
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.transport.base import AccessGate, Exporter, Transport

log = logger(__name__)

STATELESS_TRANSPORTS: Final = frozenset({"http", "memory"})
"""Transports whose exporters access the memory only while they serve a reader, and keep no reference to it."""


class ExporterSet(Mapping[str, Exporter]):
    """The open exporters by transport, in order of preference. Thread-safe: a returned exporter may be closed
    at any time.
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.one_sided = frozenset(transport.name for transport in transports if transport.one_sided)
        self._transports = tuple(transports)
        self._open: Mapping[str, Exporter] = {}  # replaced, never modified: readers use no lock
        self._withdrawn: dict[str, TransportUnavailable] = {}  # reasons by transport; the latest last
        self._reconfigure_lock = threading.Lock()
        self._ended = False

    def __getitem__(self, name: str) -> Exporter:
        return self._open[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_shut_down(self) -> bool:
        """True if nothing opens any more."""
        return self._ended

    def disabled_reason(self, names: Sequence[str]) -> TransportUnavailable | None:
        """Return why the most recently disabled of these transports was disabled, if one was since all were
        opened.
        """
        reasons = [error for name, error in tuple(self._withdrawn.items()) if name in names]
        return type(reasons[-1])(str(reasons[-1]), hint=reasons[-1].hint) if reasons else None

    def open(self, image: Image, gate: AccessGate) -> None:
        """Open every usable transport for this image; does nothing if some are open or after a shutdown.

        Raises TransportUnavailable if none can be opened, or an exporter's error; none is open then.
        """
        with self._reconfigure_lock:
            if self._open or self._ended:
                return
            opened: dict[str, Exporter] = {}
            reasons: list[TransportUnavailable] = []
            try:
                for transport in self._transports:
                    try:
                        opened[transport.name] = transport.export(image, gate)
                    except TransportUnavailable as error:
                        _log_unusable(transport.name, error)
                        reasons.append(error)
            except BaseException:
                _close(opened)
                raise
            if reasons and not opened:
                raise reasons[0]
            self._withdrawn.clear()
            self._open = opened

    def reopen_missing(self, image: Image, gate: AccessGate) -> bool:
        """Open usable transports that are not open; return True if there were any. Raises nothing."""
        with self._reconfigure_lock:
            if self._ended:
                return False
            more: dict[str, Exporter] = {}
            for transport in self._transports:
                if transport.name not in self._open and transport.name not in self._withdrawn:
                    try:
                        more[transport.name] = transport.export(image, gate)
                    except RforkError as error:
                        _log_unusable(transport.name, error)
            both = {**self._open, **more}
            self._open = {each.name: both[each.name] for each in self._transports if each.name in both}
            return bool(more)

    def disable(self, name: str, error: TransportUnavailable) -> None:
        """Stop offering a transport that turned out to be unusable. One that is not open is not an error."""
        with self._reconfigure_lock:
            exporter = self._open.get(name)
            if exporter is None:
                return
            self._withdrawn[name] = error
            self._open = {kept: other for kept, other in self._open.items() if kept != name}
            if not self._open:
                log.error(
                    "no transport is left: the image cannot be served",
                    transport=name,
                    error=error.kind,
                    detail=str(error),
                    hint=error.hint,
                )
            exporter.close()

    def close(self, keep: Collection[str] = ()) -> None:
        """Close all, and return once no reader accesses the image's memory. Idempotent.

        Those in `keep` stay open: the caller ensures that they get no requests.
        """
        with self._reconfigure_lock:
            before = self._open
            self._open = {name: exporter for name, exporter in before.items() if name in keep}
            _close({name: exporter for name, exporter in before.items() if name not in keep})

    def shut_down(self) -> None:
        """Close all permanently."""
        self._ended = True
        self.close()


def _log_unusable(transport: str, error: RforkError) -> None:
    log.warning("transport cannot be used", transport=transport, error=error.kind, detail=str(error), hint=error.hint)


def _close(exporters: Mapping[str, Exporter]) -> None:
    """Close each one regardless of errors; raise the first error at the end."""
    failed: list[Exception] = []
    for exporter in exporters.values():
        try:
            exporter.close()
        except Exception as error:
            failed.append(error)
    if failed:
        raise failed[0]
