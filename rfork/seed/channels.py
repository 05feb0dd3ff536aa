"""The open channels of a seed: a reader's place, and its way in, for as long as its lease lasts.

Runs on the source. A transport whose reads the seed does not see lets a reader in when its channel
opens, so it has to be told when that is over, whether the reader says so or its lease just ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from rfork.errors import RforkError, SourceChanged
from rfork.logs import logger
from rfork.seed.leases import LeaseBook
from rfork.transport.base import Endpoint, Exporter

SWEEP_S = 0.5
"""A reader whose lease has ended keeps its way in no longer than this."""

log = logger(__name__)


class Channels:
    """Opens and ends channels on `exporters` (by transport). `ended` is called after some were swept."""

    def __init__(
        self, leases: LeaseBook, exporters: Mapping[str, Exporter], ended: Callable[[], None]
    ) -> None:
        self._leases = leases
        self._exporters = exporters
        self._ended = ended
        self._lock = threading.Lock()
        self._ways: dict[str, Exporter] = {}  # by channel
        self._closing = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="rfork-leases", daemon=True)

    def start(self) -> None:
        """Begin to look for leases that have ended."""
        self._sweeper.start()

    def stop(self) -> None:
        """Look no more. Safe to call twice, and without a start."""
        self._closing.set()
        if self._sweeper.ident is not None:
            self._sweeper.join()

    def open(self, fork_id: str, transports: Sequence[str], reader: str) -> tuple[str, Endpoint]:
        """A channel for the reader at IP address `reader`, on the first transport that is exported.

        Raises SourceChanged when there is none of these transports, and SourceBusy.
        """
        name = next((name for name in transports if name in self._exporters), None)
        if name is None:
            raise SourceChanged(f"the source offers {sorted(self._exporters)}, not {list(transports)}")
        exporter = self._exporters[name]
        # All under the lock: a lease that ends meanwhile is then swept once its way in is known.
        with self._lock:
            channel_id = self._leases.open(fork_id)
            self._ways[channel_id] = exporter
            try:
                exporter.let_in(channel_id, reader)
            except BaseException:
                self._end(channel_id)
                raise
        return channel_id, exporter.endpoint()

    def close(self, channel_id: str) -> None:
        """Take the place and the way in back; a channel that is gone is no error."""
        with self._lock:
            self._end(channel_id)

    def _end(self, channel_id: str) -> None:
        self._leases.close(channel_id)
        exporter = self._ways.pop(channel_id, None)
        if exporter is not None:
            exporter.let_out(channel_id)

    def _sweep(self) -> None:
        while not self._closing.wait(SWEEP_S):
            swept = self._leases.sweep()
            for channel_id in swept:
                try:
                    self.close(channel_id)
                except (OSError, RforkError) as error:
                    log.error("a reader's lease ended and it could not be cut off: %s", error)
            if swept:
                self._ended()
