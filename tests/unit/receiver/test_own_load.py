"""When a target reads its own storage although it has sources: tables over pure functions."""

from __future__ import annotations

import math

import pytest

from rfork.receiver.own_load import (
    MAX_ABANDON_WINDOW_S,
    Decision,
    ForkState,
    OwnLoad,
    RateMeter,
    StorageScope,
    abandon_window_s,
    decide,
    is_overdue,
    should_measure,
    with_reported_time,
)
from rfork.schema import StorageAssignment

GB = 10**9
FILES = StorageAssignment(kind="checkpoint", uri="file:///files", chunks=())


def fork(
    bytes_per_s: float,
    *,
    elapsed_s: float = 30.0,
    left_bytes: int = 10 * GB,
    has_manifest: bool = True,
    is_upstream_reading: bool = False,
) -> ForkState:
    """Return a fork whose sources have had one rate since it began."""
    rates = RateMeter()
    for tick in range(int(elapsed_s * 4) + 1):
        rates.add(tick / 4, bytes_per_s * tick / 4)
    return ForkState(elapsed_s, left_bytes, rates, has_manifest, is_upstream_reading)


def files(bytes_per_s: float = 1 * GB, *, is_local: bool = True, replaces_fork: bool = True) -> OwnLoad:
    """Return 10 GB of files that can be read chunk by chunk."""
    load_s = 10 * GB / bytes_per_s
    return OwnLoad("checkpoint", bytes_per_s, load_s, FILES, is_local=is_local, replaces_fork=replaces_fork)


def loader(load_s: float = 10.0, *, replaces_fork: bool = True, is_sampled: bool = False) -> OwnLoad:
    """Return a loader that fills the complete model."""
    return OwnLoad("loader", 10 * GB / load_s, load_s, replaces_fork=replaces_fork, is_sampled=is_sampled)


@pytest.mark.parametrize(
    ("state", "own", "expected"),
    [
        (fork(5.0 * GB), files(), "wait"),  # the files would save less than a fifth
        (fork(3.9 * GB), files(), "join"),
        (fork(0.1 * GB), files(), "join"),
        (fork(0.0), files(), "join"),
        (fork(1.0 * GB), files(is_local=False), "wait"),  # other instances read them too
        (fork(0.8 * GB), files(is_local=False), "join"),
        (fork(0.8 * GB, is_upstream_reading=True), files(), "wait"),  # one instance reads them for all
        (fork(0.4 * GB, is_upstream_reading=True), files(), "join"),
        (fork(0.1 * GB), files(replaces_fork=False), "join"),  # each chunk is verified, whatever the files are
        (fork(0.1 * GB, has_manifest=False), files(), "abandon"),  # nothing verifies single chunks
        (fork(0.1 * GB, has_manifest=False), files(replaces_fork=False), "wait"),
        (fork(1.0 * GB), loader(), "wait"),
        (fork(0.8 * GB), loader(), "abandon"),
        (fork(0.8 * GB), loader(is_sampled=True), "wait"),  # a loader is slower than its disk
        (fork(0.6 * GB), loader(is_sampled=True), "abandon"),
        (fork(0.8 * GB, is_upstream_reading=True), loader(), "wait"),
        (fork(0.4 * GB, is_upstream_reading=True), loader(), "abandon"),
        (fork(0.0), loader(replaces_fork=False), "wait"),  # it may load another version
        (fork(0.0, elapsed_s=0.9), loader(1.0), "wait"),
        (fork(0.0, elapsed_s=1.0), loader(1.0), "abandon"),
        (fork(0.0, elapsed_s=2.9), loader(30.0), "wait"),  # less than a tenth of the loader's time
        (fork(0.0, elapsed_s=3.0), loader(30.0), "abandon"),
        (fork(0.1 * GB, left_bytes=GB), loader(), "wait"),  # the rest takes no longer than the complete load
        (fork(0.1 * GB, left_bytes=2 * GB), loader(), "abandon"),
        (fork(5.0, elapsed_s=0.0), files(), "wait"),
    ],
)
def test_decisions(state: ForkState, own: OwnLoad, expected: Decision) -> None:
    """10 GB are left of 10 GB, and the own load takes 10 s, unless the row states otherwise."""
    assert expected == decide(state, own)


@pytest.mark.parametrize(
    ("state", "scope", "expected"),
    [
        (fork(1.0 * GB, elapsed_s=0.25), "local", True),
        (fork(1.0 * GB, elapsed_s=0.0), "local", False),
        (fork(20 * GB, elapsed_s=0.25), "local", False),  # it ends in half a second
        (fork(0.0, elapsed_s=0.25), "local", True),
        (fork(1.0 * GB, elapsed_s=0.5, has_manifest=False), "local", False),
        (fork(1.0 * GB, elapsed_s=0.75, has_manifest=False), "local", True),
        (fork(1.0 * GB, elapsed_s=0.5), "loader", False),
        (fork(1.0 * GB, elapsed_s=0.75), "loader", True),
        (fork(1.0 * GB, elapsed_s=1.0), "remote", False),
        (fork(1.0 * GB, elapsed_s=2.0), "remote", True),
        (fork(8.0 * GB, elapsed_s=2.0), "remote", False),
        (fork(1.0 * GB, elapsed_s=2.0, is_upstream_reading=True), "local", False),
        (fork(1.0 * GB, elapsed_s=5.0, is_upstream_reading=True), "local", True),
        (fork(0.1 * GB, elapsed_s=9.0, is_upstream_reading=True), "remote", False),  # as many samples as instances
        (fork(0.0, elapsed_s=9.0, is_upstream_reading=True), "remote", True),
    ],
)
def test_storage_is_measured_once_sources_seem_slow(state: ForkState, scope: StorageScope, expected: bool) -> None:
    """Remote storage later than local files, and last the storage that one instance reads for all."""
    assert expected == should_measure(state, scope)


@pytest.mark.parametrize(
    ("age_s", "expected_s", "own_s", "expected"),
    [
        (0.2, None, 0.1, False),
        (0.3, None, 0.1, True),  # nothing has ever arrived
        (0.1, 8.0, 0.1, True),  # eight seconds are left
        (7.9, 8.0, 0.1, False),  # it is about to arrive
        (8.2, 8.0, 0.1, False),
        (9.0, 8.0, 0.1, True),  # it is late
        (1.0, 8.0, 6.5, False),  # storage would not be faster
        (1.0, 8.0, 6.0, True),
    ],
)
def test_overdue_reads(age_s: float, expected_s: float | None, own_s: float, expected: bool) -> None:
    """A read is replaced if storage completes it much sooner than its source is expected to."""
    assert expected == is_overdue(age_s, expected_s, own_s)


def test_the_rate_is_that_of_the_last_seconds() -> None:
    """A source that has stopped has no rate, however fast it was."""
    rates = RateMeter()
    for tick in range(9):
        rates.add(tick / 2, min(tick, 4) * 100.0)
    assert 0.0 == rates.rate(2.0)
    assert 100.0 == rates.rate(4.0)


def test_a_rate_needs_its_complete_window() -> None:
    """Before that it is not known."""
    rates = RateMeter()
    rates.add(0.0, 0.0)
    rates.add(0.5, 100.0)
    assert rates.rate(1.0) is None
    assert 200.0 == rates.rate(0.5)


def test_a_meter_keeps_only_the_longest_window() -> None:
    """Its memory does not grow with the duration of the fork."""
    rates = RateMeter()
    for tick in range(10_000):
        rates.add(tick / 4, 0.0)
    assert len(rates._samples) <= 4 * MAX_ABANDON_WINDOW_S + 2


def test_sources_that_deliver_nothing_need_for_ever() -> None:
    """So every own load is faster."""
    assert math.inf == fork(0.0).left_s(1.0)


@pytest.mark.parametrize(("load_s", "expected"), [(1.0, 1.0), (60.0, 6.0), (3600.0, MAX_ABANDON_WINDOW_S)])
def test_evidence_against_sources(load_s: float, expected: float) -> None:
    """It takes a tenth of the loader's time, within bounds: the fork then ends 1.1 times later than the load alone."""
    assert expected == abandon_window_s(loader(load_s))


@pytest.mark.parametrize(("reported_s", "expected"), [(None, 10.0), (25.0, 25.0), (5.0, 10.0)])
def test_the_time_of_a_loader_is_that_of_earlier_loads(reported_s: float | None, expected: float) -> None:
    """But not less than its files need."""
    assert expected == with_reported_time(loader(), reported_s).load_s


def test_a_reported_time_needs_no_allowance() -> None:
    """A loader is slower than its disk, but it was measured itself."""
    assert not with_reported_time(loader(is_sampled=True), 12.0).is_sampled


def test_files_are_as_fast_as_their_sample() -> None:
    """Loads of other instances, by any loader, are no measure of single chunks."""
    assert files() == with_reported_time(files(), 60.0)
