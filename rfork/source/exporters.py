"""What gives a seed's image over each transport, from when that can be used until the memory goes away.

Runs on the source. Exporters hold the image's memory and register it with devices, so they go before the
memory does, and are made anew for other memory: `open` and `close` may take turns; after `shut_down` nothing opens.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import torch

from rfork.errors import RforkError, SourceWeightsChanged, TransportUnavailable
from rfork.image.layout import Layout
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.transport.base import AccessGate, Exporter, Transport

log = logger(__name__)

STATELESS_TRANSPORTS: Final = frozenset({"http", "memory"})
"""Transports whose exporters touch the memory only while they answer a reader, and keep none of it."""


class ExporterSet(Mapping[str, Exporter]):
    """The open exporters by transport, best first. Thread-safe: what is looked up may be closed at once."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.one_sided = frozenset(transport.name for transport in transports if transport.one_sided)
        self._transports = tuple(transports)
        self._open: Mapping[str, Exporter] = {}  # replaced, never changed: who looks at it has no lock
        self._withdrawn: dict[str, TransportUnavailable] = {}  # why, by transport; the latest last
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
        """Whether nothing opens any more."""
        return self._ended

    def disabled_reason(self, names: Sequence[str]) -> TransportUnavailable | None:
        """Why the one of these that was withdrawn last was, if one was since all were opened."""
        reasons = [error for name, error in tuple(self._withdrawn.items()) if name in names]
        return type(reasons[-1])(str(reasons[-1]), hint=reasons[-1].hint) if reasons else None

    def open(self, image: Image, gate: AccessGate) -> None:
        """Open every transport that can be used for this image; nothing where some are open, or it has ended.

        Raises TransportUnavailable where none can, or what an exporter raises; there is then none.
        """
        with self._reconfigure_lock:
            if self._open or self._ended:
                return
            opened: dict[str, Exporter] = {}
            try:
                self._export(image, gate, opened)
            except BaseException:
                _close(opened)
                raise
            self._withdrawn.clear()
            self._open = opened

    def reopen_missing(self, image: Image, gate: AccessGate) -> bool:
        """Open what is not open and can be used, beside what is; whether there was any. Raises nothing."""
        with self._reconfigure_lock:
            if self._ended:
                return False
            more: dict[str, Exporter] = {}
            for transport in self._transports:
                if transport.name not in self._open and transport.name not in self._withdrawn:
                    try:
                        more[transport.name] = transport.export(image, gate)
                    except RforkError as error:
                        log.warning(
                            "transport cannot be used",
                            transport=transport.name,
                            error=error.kind,
                            detail=str(error),
                        )
            both = {**self._open, **more}
            self._open = {each.name: both[each.name] for each in self._transports if each.name in both}
            return bool(more)

    def _export(self, image: Image, gate: AccessGate, opened: dict[str, Exporter]) -> None:
        reasons: list[TransportUnavailable] = []
        for transport in self._transports:
            try:
                opened[transport.name] = transport.export(image, gate)
            except TransportUnavailable as error:
                log.warning(
                    "transport cannot be used",
                    transport=transport.name,
                    error=error.kind,
                    detail=str(error),
                    hint=error.hint,
                )
                reasons.append(error)
        if reasons and not opened:
            raise reasons[0]

    def disable(self, name: str, error: TransportUnavailable) -> None:
        """Offer this one no more: it said later that it cannot be used. One that is not open is no error."""
        with self._reconfigure_lock:
            exporter = self._open.get(name)
            if exporter is None:
                return
            self._withdrawn[name] = error
            self._open = {kept: other for kept, other in self._open.items() if kept != name}
            if not self._open:
                log.error(
                    "no transport is left: nothing can be given",
                    transport=name,
                    error=error.kind,
                    detail=str(error),
                    hint=error.hint,
                )
            exporter.close()

    def close(self, keep: Collection[str] = ()) -> None:
        """Close all, and return once no reader touches the image's memory. Safe to call twice.

        Those of `keep` stay open: whoever calls sees to it that they are asked for nothing.
        """
        with self._reconfigure_lock:
            before = self._open
            self._open = {name: exporter for name, exporter in before.items() if name in keep}
            _close({name: exporter for name, exporter in before.items() if name not in keep})

    def shut_down(self) -> None:
        """Close all for good."""
        self._ended = True
        self.close()


def _close(exporters: Mapping[str, Exporter]) -> None:
    """Close each, whatever another one says; the first error is raised when all have had their turn."""
    failed: list[Exception] = []
    for exporter in exporters.values():
        try:
            exporter.close()
        except Exception as error:
            failed.append(error)
    if failed:
        raise failed[0]


class ReleasedImage(Image):
    """An image over no memory: what a seed holds while its weights are put away.

    Whoever wants its bytes, their digests or their addresses gets SourceWeightsChanged.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout, [torch.empty(layout.image_bytes, dtype=torch.uint8, device="meta")])

    def _segments_covering(self, begin: int, end: int) -> tuple[int, int]:
        # Whatever touches the memory asks this first where it is; without it that is address 0.
        raise SourceWeightsChanged("the weights are put away: there is no memory to read")
