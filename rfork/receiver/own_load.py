"""Decides when a target reads its own storage although it has sources: so that no fork is slower than a load from disk.

Runs on the target. Pure functions of what the sources have delivered and of what a sample of the storage has shown;
`OwnLoadMonitor` keeps both for `rfork.receiver.machine`. A fork first measures its storage, once its sources seem slow.
Storage that can be read chunk by chunk then becomes one more source. For a loader that fills the complete model, the
fork is abandoned, but only once the sources have been slower for a tenth of the loader's time.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Final, Literal

from rfork.schema import StorageAssignment

StorageScope = Literal["local", "loader", "remote"]
"""`local`: files of this host that may be readable chunk by chunk; `loader`: such files, but only for a loader."""
Decision = Literal["wait", "join", "abandon"]
"""`join`: read own storage besides the sources; `abandon`: end the fork, so that the own load replaces it."""
Step = Literal["measure"] | Decision

FIRST_CHECK_S: Final[dict[StorageScope, float]] = {"local": 0.2, "loader": 0.7, "remote": 2.0}
"""Time that sources have before their rate counts: a fork is not abandoned within a second anyway, and other
instances read remote storage too.
"""
MIN_LEFT_S: Final = 1.0
"""A fork that is expected to end within this time does not measure its storage."""
UPSTREAM_FIRST_CHECK_S: Final = 5.0
"""The same while a source reads storage for this instance: all would load the storage that one reads for them."""

JOIN_RATIO: Final = 0.25
"""Local storage is read if the sources need longer than this multiple of the storage's time: it saves a fifth."""
SLOWER_RATIO: Final = 1.15
"""Sources are slower than the own load if they need longer than this multiple of its time."""
UPSTREAM_RATIO: Final = 2.0
"""The same while a source reads storage for this instance."""
SAMPLED_LOADER_RATIO: Final = 1.5
"""The same if the time of a loader is only known from a sample of its files: loaders are slower than their disk."""

JOIN_WINDOW_S: Final = 0.2
"""Time over which the sources' rate is measured before storage joins them."""
ABANDON_FRACTION: Final = 0.1
"""Fraction of the own load's time for which sources must have been slower before the fork is abandoned."""
MIN_ABANDON_WINDOW_S, MAX_ABANDON_WINDOW_S = 1.0, 15.0
MIN_OVERDUE_S: Final = 0.25
"""A read is not replaced to save less than this."""


class RateMeter:
    """Recent rate of all sources together. A chunk in flight counts in proportion to its expected duration."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, now: float, received_bytes: float) -> None:
        """Record the bytes that had been received at `now`; the amount may decrease if a read has failed."""
        self._samples.append((now, received_bytes))
        while len(self._samples) > 2 and now - self._samples[1][0] >= MAX_ABANDON_WINDOW_S:
            self._samples.popleft()

    def rate(self, window_s: float) -> float | None:
        """Return the bytes per second over the last `window_s`; None if that long has not been recorded."""
        if not self._samples:
            return None
        last_at, last_bytes = self._samples[-1]
        before = next((sample for sample in reversed(self._samples) if last_at - sample[0] >= window_s), None)
        if before is None:
            return None
        return max(0.0, last_bytes - before[1]) / (last_at - before[0])


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """Load of this instance itself, as a sample of its storage has shown it."""

    name: str
    """Name of the fallback."""
    bytes_per_s: float
    """Rate of the sample."""
    load_s: float
    """Expected time of the complete load."""
    storage: StorageAssignment | None = None
    """The storage, if it can be read chunk by chunk."""
    is_local: bool = True
    """True if it is on this host, as far as its address shows."""
    replaces_fork: bool = True
    """False if it must not be loaded in place of the fork: it may contain another version of the weights."""
    is_sampled: bool = True
    """True if the time of a loader is not known from earlier loads, but only from a sample of its files."""


@dataclass(frozen=True, slots=True)
class ForkState:
    """State of a fork that reads from peers."""

    elapsed_s: float
    """Time since it had sources."""
    left_bytes: int
    """Bytes that are not verified yet."""
    rates: RateMeter
    has_manifest: bool
    """True if chunks of any origin can be verified."""
    is_upstream_reading: bool = False
    """True if a source has read storage for this instance, or has waited for one that did."""

    def left_s(self, window_s: float) -> float | None:
        """Return the time that the sources still need at the rate of the last `window_s`; None if it is unknown."""
        rate = self.rates.rate(window_s)
        if rate is None:
            return None
        return self.left_bytes / rate if rate else math.inf


class OwnLoadMonitor:
    """State of the comparison of one fork's sources with this instance's own load."""

    def __init__(self, scope: StorageScope | None) -> None:
        """`scope` is None if own storage must not be read while peers serve the fork."""
        self.own: OwnLoad | None = None
        """The own load, once it is measured."""
        self.reported_s: float | None = None
        """Duration of earlier loads of other instances, as the planner knows it."""
        self._scope = scope
        self._peers_since: float | None = None
        self._rates = RateMeter()
        self._is_measuring = False
        self._is_upstream_reading = False

    @property
    def first_sample_since(self) -> float | None:
        """Time since which the first sample of the sources' rate is due; None if nothing is compared, or no more."""
        return self._peers_since if self._scope is not None and self.own is None else None

    @property
    def is_active(self) -> bool:
        """True if there are peers to compare the own load with."""
        return self._scope is not None and self._peers_since is not None

    def peer_opened(self, now: float, received_bytes: int) -> None:
        """Record that a peer was opened; the first one begins the comparison."""
        if self._peers_since is None:
            self._peers_since = now
            self._rates.add(now, received_bytes)

    def add(self, now: float, received_bytes: float) -> None:
        """Record the bytes that had been received at `now`."""
        self._rates.add(now, received_bytes)

    def discard_rates(self) -> None:
        """Discard the recorded rates: this process was suspended."""
        self._rates = RateMeter()

    def measured(self, own: OwnLoad | None) -> None:
        """Record the result of a measurement; None: this instance cannot load the weights itself."""
        self._is_measuring = False
        if own is None:
            self.stop()
        else:
            self.own = with_reported_time(own, self.reported_s)

    def stop(self) -> None:
        """Compare no more: own storage cannot be read."""
        self._scope = self.own = None

    def step(self, now: float, left_bytes: int, *, has_manifest: bool, is_upstream_reading: bool) -> tuple[Step, str]:
        """Return what to do now, with the comparison that explains it."""
        self._is_upstream_reading = self._is_upstream_reading or is_upstream_reading
        if self._scope is None or self._peers_since is None or self._is_measuring or not left_bytes:
            return "wait", ""
        elapsed_s = now - self._peers_since
        fork = ForkState(elapsed_s, left_bytes, self._rates, has_manifest, self._is_upstream_reading)
        if self.own is None:
            self._is_measuring = should_measure(fork, self._scope)
            return "measure" if self._is_measuring else "wait", ""
        decision = decide(fork, self.own)
        if decision == "wait":
            return "wait", ""
        window_s = _join_window_s(self.own) if decision == "join" else abandon_window_s(self.own)
        return decision, _comparison(fork, self.own, window_s)


def should_measure(fork: ForkState, scope: StorageScope) -> bool:
    """Return whether the sources are slow enough to open this instance's storage and read a sample of it."""
    if scope == "local" and not fork.has_manifest:
        scope = "loader"  # single chunks cannot be verified yet
    first_check_s = UPSTREAM_FIRST_CHECK_S if fork.is_upstream_reading else FIRST_CHECK_S[scope]
    left_s = fork.left_s(first_check_s if scope == "remote" else JOIN_WINDOW_S)
    if left_s is None or fork.elapsed_s < first_check_s:
        return False
    if fork.is_upstream_reading and scope == "remote":
        return left_s == math.inf  # samples of all the instances that wait would cost more than they save
    return left_s > max(MIN_LEFT_S, first_check_s)


def decide(fork: ForkState, own: OwnLoad) -> Decision:
    """Return what to do with storage that was measured."""
    slower_ratio = UPSTREAM_RATIO if fork.is_upstream_reading else SLOWER_RATIO
    if own.storage is not None and fork.has_manifest:
        ratio = JOIN_RATIO if own.is_local and not fork.is_upstream_reading else slower_ratio
        left_s = fork.left_s(_join_window_s(own))
        own_left_s = fork.left_bytes / own.bytes_per_s
        return "join" if left_s is not None and left_s > max(MIN_OVERDUE_S, ratio * own_left_s) else "wait"
    if not own.replaces_fork:
        return "wait"
    if own.storage is None and own.is_sampled:
        slower_ratio = max(slower_ratio, SAMPLED_LOADER_RATIO)
    window_s = abandon_window_s(own)
    left_s = fork.left_s(window_s)
    is_slower = fork.elapsed_s >= window_s and left_s is not None and left_s > slower_ratio * own.load_s
    return "abandon" if is_slower else "wait"


def with_reported_time(own: OwnLoad, reported_s: float | None) -> OwnLoad:
    """Return the own load with the time that loaders of other instances took; None: it is not known.

    A loader never counts as faster than the sample of its files.
    """
    if own.storage is not None or reported_s is None:
        return own
    return replace(own, load_s=max(own.load_s, reported_s), is_sampled=False)


def _join_window_s(own: OwnLoad) -> float:
    """Return how long the sources' rate is measured before storage joins them."""
    return JOIN_WINDOW_S if own.is_local else FIRST_CHECK_S["remote"]


def abandon_window_s(own: OwnLoad) -> float:
    """Return how long sources must have been slower than the own load before the fork is abandoned."""
    return min(max(ABANDON_FRACTION * own.load_s, MIN_ABANDON_WINDOW_S), MAX_ABANDON_WINDOW_S)


def _comparison(fork: ForkState, own: OwnLoad, window_s: float) -> str:
    """Return how long the sources and the own load would take."""
    left_s, rate = fork.left_s(window_s) or 0.0, fork.rates.rate(window_s) or 0.0
    left = f"the remaining {fork.left_bytes / 1e9:.3g} GB"
    sources = f"the sources need {left_s:.1f} s for {left}" if rate else f"the sources deliver nothing of {left}"
    return f"{sources} ({rate / 1e9:.2g} GB/s), {own.name} about {own.load_s:.1f} s"


def is_overdue(age_s: float, expected_s: float | None, own_s: float) -> bool:
    """Return whether own storage should read a chunk again that a source has been reading for `age_s`.

    `expected_s` is the usual duration of that source's reads, None if none has ended; `own_s` the time of the storage.
    A read that takes longer than usual is expected to take that much longer again.
    """
    left_s = age_s if expected_s is None else abs(expected_s - age_s)
    return left_s > max(MIN_OVERDUE_S, SLOWER_RATIO * own_s)
