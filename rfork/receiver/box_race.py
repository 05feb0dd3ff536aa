"""Compares a fork across layouts with the engine's own load, and ends it while its sources are slower.

Runs on the target. `rfork.receiver.own_load` decides, as for the fork of one image: the parts together are the sources.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from rfork.errors import RforkError, SlowSources
from rfork.logs import logger
from rfork.receiver.machine import SLOW_SOURCES_HINT
from rfork.receiver.own_load import OwnLoad, OwnLoadMonitor

log = logger(__name__)

FIRST_BOX_S: Final = 10.0
"""Time that sources have to gather before their rate counts, unless bytes arrive earlier."""
SampleLoad = Callable[[int], OwnLoad]
"""Returns how long the engine's own loader takes for so many bytes, from a sample of its files. Raises RforkError."""


class PartFork(Protocol):
    """The fork of one part; see `rfork.receiver.session.ForkSession`."""

    @property
    def bytes_read(self) -> int:
        """Bytes that have been received so far."""
        ...

    def cancel(self) -> None:
        """End the fork soon."""
        ...


class BoxRace:
    """The comparison of one fork. Thread-safe, but `compare` is called by one thread at a time."""

    def __init__(self, sample_load: SampleLoad | None) -> None:
        """Without `sample_load`, nothing is compared."""
        self._sample_load = sample_load
        self._monitor = OwnLoadMonitor("loader" if sample_load is not None else None)
        self._began = 0.0
        self._lock = threading.Lock()
        self._sessions: set[PartFork] = set()
        self._ended_bytes = 0
        """Bytes of the parts that were fetched."""
        self._is_cancelled = False
        self._samples: list[OwnLoad | None] = []

    def begin(self) -> None:
        """Begin to receive parts: what was received earlier, before a model was built, shows no rate."""
        self._began = time.monotonic()
        self._monitor.discard_rates()

    @contextmanager
    def running(self, session: PartFork) -> Iterator[None]:
        """Count the bytes of one part's fork, which runs in the block. A part that fails is fetched again."""
        with self._lock:
            self._sessions.add(session)
            is_cancelled = self._is_cancelled
        if is_cancelled:
            session.cancel()
        ended_bytes = 0
        try:
            yield
            ended_bytes = session.bytes_read
        finally:
            with self._lock:
                self._sessions.remove(session)
                self._ended_bytes += ended_bytes

    def compare(self, needed_bytes: int) -> None:
        """Raise SlowSources if the own load of so many bytes is expected to end earlier than the fork of the rest."""
        now = time.monotonic()
        with self._lock:
            received_bytes = self._ended_bytes + sum(session.bytes_read for session in self._sessions)
            samples, self._samples = self._samples, []
        if not received_bytes and now - self._began < FIRST_BOX_S:
            return
        self._monitor.peer_opened(now, received_bytes)
        self._monitor.add(now, received_bytes)
        for sample in samples:
            self._monitor.measured(sample)
        left_bytes = max(0, needed_bytes - received_bytes)
        step, comparison = self._monitor.step(now, left_bytes, has_manifest=False, is_upstream_reading=False)
        if step == "measure":
            threading.Thread(target=self._sample, args=(needed_bytes,), name="rfork-measure", daemon=True).start()
        elif step == "abandon":
            raise SlowSources(f"the fork across layouts was abandoned: {comparison}", hint=SLOW_SOURCES_HINT)

    def cancel(self) -> None:
        """Cancel all forks that run, and those that begin later."""
        with self._lock:
            self._is_cancelled = True
            sessions = list(self._sessions)
        for session in sessions:
            session.cancel()

    def _sample(self, needed_bytes: int) -> None:
        own_load: OwnLoad | None = None
        try:
            if self._sample_load is not None:
                own_load = self._sample_load(needed_bytes)
        except RforkError as error:
            log.warning("own storage cannot be measured", reason=str(error))
        with self._lock:
            self._samples.append(own_load)
