"""Selection of contenders, rounds, parts and files in `benchmarks.storage`; nothing is run."""

from __future__ import annotations

import pytest

from benchmarks.harness import Options
from benchmarks.storage.__main__ import parse
from benchmarks.storage.cases import MEDIA, Load, LoadTarget, Part, StorageCase, StorageContender
from benchmarks.storage.images import SHARDS, FileFormat, Tensors
from benchmarks.storage.runner import entries, estimate_s, formats_by_image, minutes, rounds_of, written_bytes
from rfork.errors import RforkError

ALL: list[Part] = [(image, medium) for image in SHARDS for medium in MEDIA]
QUICK = ALL[:-1]
DENSE_BYTES, SMALL_BYTES = 4_033_081_344, 1_064_955_904
EVERYTHING: frozenset[FileFormat] = frozenset({"safetensors", "tensorizer", "pickled", "snapshot"})


def loader(max_rounds: int | None = None) -> StorageContender:
    """Return a loader that is never run."""

    def load() -> Tensors:
        return {}

    def prepare(target: LoadTarget) -> Load:
        return load

    return StorageContender("peer", prepare, max_rounds=max_rounds)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ALL),
        (["--quick"], QUICK),
        (["--only", "dense/cold"], [("dense", "cold")]),
        (["--only", "s3"], [("dense", "s3"), ("small", "s3")]),
        (["--quick", "--only", "small/"], [("small", "cold"), ("small", "warm"), ("small", "s3")]),
    ],
)
def test_parts_are_selected_by_name(arguments: list[str], expected: list[Part]) -> None:
    """The name is that of image and medium; --quick alone leaves out the longest parts."""
    _, parts, _ = parse(arguments)
    assert expected == parts


def test_an_unknown_name_lists_the_known_ones() -> None:
    """The error is one line."""
    with pytest.raises(RforkError, match="images are dense, small, media cold, warm, s3") as raised:
        parse(["--only", "tape"])
    assert 1 == len(str(raised.value).splitlines())


def test_the_common_options_are_accepted() -> None:
    """They can be combined with the benchmark's own options."""
    options, _, every = parse(["--only", "s3", "--quick", "--rounds", "2", "--all"])
    assert options.quick
    assert every
    assert 2 == options.rounds


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("part", ALL)
def test_no_two_contenders_share_a_row(part: Part, every: bool) -> None:
    """Otherwise the runs of both would count as one's."""
    cases = [case for case, _ in entries(part, every)]
    assert len(cases) == len(set(cases))


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("part", ALL)
def test_every_row_of_ours_has_a_peer(part: Part, every: bool) -> None:
    """The peer uses the same type of memory; without one the row could not be compared."""
    found = {
        role: {case.comparison_key for case, _ in entries(part, every) if case.role == role}
        for role in ("ours", "peer")
    }
    assert set() == found["ours"] - found["peer"]
    assert found["ours"]


def test_rows_depend_on_the_option_for_all() -> None:
    """All rows have both destinations; otherwise those that differ."""
    ours = {
        every: {case.comparison_key for part in ALL for case, _ in entries(part, every) if case.role == "ours"}
        for every in (True, False)
    }
    assert {(*part, into) for part in ALL for into in ("fresh", "existing")} == ours[True]
    assert {
        ("dense", "cold", "fresh"),
        ("dense", "cold", "existing"),
        ("dense", "warm", "fresh"),
        ("dense", "warm", "existing"),
        ("dense", "s3", "fresh"),
        ("small", "cold", "existing"),
        ("small", "warm", "existing"),
        ("small", "s3", "fresh"),
    } == ours[False]


def test_the_default_number_of_rounds_is_three() -> None:
    """With and without --quick."""
    assert 3 == parse([])[0].rounds
    assert 3 == parse(["--quick"])[0].rounds


@pytest.mark.parametrize(
    ("case", "max_rounds", "expected"),
    [
        (StorageCase("dense", "cold", "fresh", "peer"), None, 5),
        (StorageCase("dense", "cold", "fresh", "peer"), 3, 3),
        (StorageCase("dense", "cold", "fresh", "peer"), 9, 5),
        (StorageCase("dense", "cold", "mapped", "peer"), None, 3),
        (StorageCase("small", "s3", "fresh", "peer"), None, 3),
    ],
)
def test_side_rows_run_less_often(case: StorageCase, max_rounds: int | None, expected: int) -> None:
    """They never run more often than the requested rounds."""
    assert expected == rounds_of(case, loader(max_rounds), 5)
    assert 1 == rounds_of(case, loader(max_rounds), 1)


def test_only_formats_that_are_read_are_written() -> None:
    """--all writes three formats more; everything in S3 is also on disk."""
    assert {"dense": frozenset({"safetensors"})} == formats_by_image([("dense", "cold")], every=False)
    assert {"dense": EVERYTHING, "small": EVERYTHING} == formats_by_image(ALL, every=True)
    both = DENSE_BYTES + SMALL_BYTES
    assert (4 * both, 3 * both) == written_bytes(ALL, quick=False, every=True)
    assert (both, both) == written_bytes(ALL, quick=False, every=False)
    assert (4 * SMALL_BYTES, 0) == written_bytes([("small", "warm")], quick=False, every=True)


def test_the_estimate_grows_with_rounds_and_parts() -> None:
    """It is printed in words that are no more precise than it is."""

    def seconds(parts: list[Part], rounds: int) -> float:
        return estimate_s(parts, Options("storage", False, rounds, None, None), False)

    assert seconds(ALL[:1], 1) < seconds(ALL[:1], 2) < seconds(ALL[:2], 2)
    assert ["10 s", "90 s", "2 min", "21 min"] == [minutes(each) for each in (1, 90, 91, 1201)]
