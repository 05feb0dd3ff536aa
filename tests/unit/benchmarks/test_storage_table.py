"""Rows and figures that `benchmarks.storage` computes from its runs."""

from __future__ import annotations

import pytest

from benchmarks.storage.cases import Destination, LoadMeasurement, Medium, Role, StorageCase, StorageResult
from benchmarks.storage.results import against_peers, figures, limits_of, notes, row

GB = 1_000_000_000
MIB = 1 << 20


def result(
    contender: str,
    *seconds: float,
    role: Role = "peer",
    image: str = "dense",
    medium: Medium = "cold",
    into: Destination = "fresh",
    verified: bool = False,
    extra_bytes: int = 0,
    note: str = "",
) -> StorageResult:
    """Return a case of 4 GB with one run for each of `seconds`."""
    runs = tuple(LoadMeasurement(each, each / 2, extra_bytes) for each in seconds)
    return StorageResult(StorageCase(image, medium, into, contender, role, verified), 4 * GB, runs, note)


def test_the_worst_row_is_the_one_closest_to_or_slower_than_a_peer() -> None:
    """It is chosen over images, media and destinations, each compared with its own best peer."""
    results = [
        result("rfork", 1.0, role="ours"),
        result("fast peer", 2.0),
        result("slow peer", 9.0),
        result("rfork", 1.0, role="ours", medium="warm"),
        result("fast peer", 0.8, medium="warm"),
        result("rfork", 1.0, role="ours", image="small"),
        result("fast peer", 1.5, image="small"),
    ]
    expected = [
        ("dense warm fresh: rfork / fast peer: 0.800", 0.8),
        ("small cold fresh: rfork / fast peer: 1.500", 1.5),
        ("dense cold fresh: rfork / fast peer: 2.000", 2.0),
    ]
    assert expected == [(each.line, each.ratio) for each in against_peers(results)]


def test_medians_are_compared() -> None:
    """One lucky run of a peer counts no more than one unlucky run of ours."""
    results = [result("rfork", 1.0, 9.0, 1.0, role="ours"), result("peer", 0.1, 2.0, 2.0)]
    assert [2.0] == [each.ratio for each in against_peers(results)]


@pytest.mark.parametrize(
    "other",
    [
        result("peer", 0.1, into="mapped"),
        result("peer", 0.1, into="existing"),
        result("peer", 0.1, medium="warm"),
        result("peer", 0.1, image="small"),
        result("limit", 0.1, role="limit"),
        result("memcpy", 0.1, role="shown"),
        result("rfork otherwise", 0.1, role="ours otherwise"),
        result("peer", note="it supports only CUDA"),
    ],
)
def test_only_comparable_rows_are_compared(other: StorageResult) -> None:
    """Another image, medium or type of memory, a contender that is no peer, and one that did not run are not
    comparable.
    """
    results = [result("rfork", 1.0, role="ours"), result("peer", 2.0), other]
    assert [2.0] == [each.ratio for each in against_peers(results)]


def test_a_row_without_a_peer_is_not_compared() -> None:
    """Its ratio would be infinite."""
    assert [] == against_peers([result("rfork", 1.0, role="ours"), result("peer", 2.0, image="small")])


def test_verifying_loaders_are_compared_with_each_other() -> None:
    """A peer that checks hashes is also a peer of our loaders that do not, if it is the best."""
    results = [
        result("rfork", 1.0, role="ours"),
        result("rfork snapshot", 1.6, role="ours otherwise", verified=True),
        result("peer", 1.2),
        result("peer, checked", 2.0, verified=True),
    ]
    assert 1.2 == figures(results)["storage_vs_best_peer"]
    assert 1.25 == figures(results)["storage_verified_vs_best_peer"]


def test_the_figures_are_the_worst_of_both_destinations() -> None:
    """They are relative to the disk's limit, which both share, and small tensors are relative to dense."""
    results = [
        result("limit: fio", 1.0, role="limit", into="none"),
        result("rfork", 1.25, role="ours"),
        result("rfork", 2.0, role="ours", into="existing"),
        result("rfork", 5.0, role="ours", image="small"),
        result("rfork", 4.0, role="ours", image="small", into="existing", extra_bytes=3 * MIB),
        result("rfork, direct=never", 4.0, role="ours otherwise", extra_bytes=7 * MIB),
        result("peer", 4.0, extra_bytes=900 * MIB),
    ]
    expected = {
        "storage_vs_best_peer": 3.2,
        "storage_cold_vs_medium": 0.5,
        "storage_small_vs_dense": 0.25,
        "storage_peak_rss_over": 7.0,
    }
    assert expected == figures(results)


def test_a_limit_of_one_destination_counts_only_for_it() -> None:
    """Fresh memory costs more than existing memory."""
    results = [
        result("limit: preadv", 0.5, role="limit", medium="warm", into="fresh"),
        result("limit: preadv", 0.25, role="limit", medium="warm", into="existing"),
        result("limit: preadv", 0.1, role="limit", medium="warm", into="existing", image="small"),
        result("limit: memcpy", 0.1, role="shown", medium="warm", into="existing"),
        result("rfork", 1.0, role="ours", medium="warm"),
        result("rfork", 1.0, role="ours", medium="warm", into="existing"),
    ]
    assert {"fresh": 8 * GB, "existing": 16 * GB} == limits_of(results, "warm")
    assert 0.25 == figures(results)["storage_warm_vs_medium"]


def test_the_faster_of_two_limits_counts() -> None:
    """Otherwise a slow reader would be the disk's limit, and a figure above 1."""
    results = [
        result("limit: O_DIRECT, huge pages", 0.5, role="limit", into="none"),
        result("limit: fio", 1.0, role="limit", into="none"),
    ]
    assert {"fresh": 8 * GB, "existing": 8 * GB} == limits_of(results, "cold")
    assert {"fresh": 8 * GB, "existing": 8 * GB} == limits_of(results[::-1], "cold")


def test_other_media_have_separate_figures() -> None:
    """They are named after the medium."""
    results = [
        result("rfork", 2.0, role="ours", medium="s3", image=image, into="existing") for image in ("dense", "small")
    ]
    assert {"storage_small_vs_dense_s3": 1.0, "storage_peak_rss_over": 0.0} == figures(results)


def test_notes_name_the_rows() -> None:
    """The worst row, all rows slower than a peer, the row with the most memory, and the contenders that could
    not run.
    """
    results = [
        result("rfork", 1.0, role="ours", extra_bytes=2),
        result("peer", 0.5),
        result("rfork", 1.0, role="ours", into="existing", extra_bytes=1),
        result("peer", 0.9, into="existing"),
        result("rfork", 1.0, role="ours", medium="s3"),
        result("peer", 3.0, medium="s3"),
        result("picky peer", note="it supports only CUDA"),
    ]
    slower_rows = "dense cold fresh: rfork / peer: 0.500; dense cold existing: rfork / peer: 0.900"
    expected = {
        "storage_vs_best_peer_worst_row": "dense cold fresh: rfork / peer: 0.500",
        "storage_vs_best_peer_slower_rows": slower_rows,
        "storage_peak_rss_over_row": "dense cold fresh: rfork",
        "not run: dense cold fresh: picky peer": "it supports only CUDA",
    }
    assert expected == notes(results)


def test_a_row_has_median_rate_maximum_memory_and_spread() -> None:
    """It has gigabytes per second of the median, the maximum memory of any run, and the spread of the runs."""
    expected = {
        "image": "dense",
        "medium": "cold",
        "into": "fresh",
        "contender": "peer",
        "GB/s": 2.0,
        "s": 2.0,
        "CPU s": 1.0,
        "+MiB": 5,
        "spread": 0.5,
        "runs": 3,
    }
    assert expected == row(result("peer", 2.0, 1.5, 2.5, extra_bytes=5 * MIB))


def test_a_limit_has_neither_memory_nor_cpu_time() -> None:
    """It loads no tensors, in no measured process."""
    limit_row = row(result("limit: fio", 2.0, role="limit", into="none"))
    assert "" == limit_row["into"]
    assert limit_row["CPU s"] is None
    assert limit_row["+MiB"] is None
