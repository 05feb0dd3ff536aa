"""How much accusations of a source weigh together."""

from __future__ import annotations

import pytest

from planner.accusations import (
    MAX_KEPT,
    Accusation,
    Witness,
    accuser_credibility,
    active_accusations,
    address_of,
    apply_contradiction,
    total_credibility,
    with_accusation,
    with_reduced_credibility,
)

A = Witness("a", "host-a", "10.0.0.1")
B = Witness("b", "host-b", "10.0.0.2")
C = Witness("c", "host-c", "10.0.0.3")


def accusation(accuser: Witness, **changes: object) -> Accusation:
    """One that was made at 10, counts until 70, and weighs 1."""
    values = {"fork_id": f"fork-{accuser.instance_id}", "why": "SourceCorrupt", "at": 10.0, "until": 70.0}
    return Accusation(accuser, **values | {"generation": 0} | changes)  # type: ignore[arg-type]  # by name


TOTALS: dict[str, tuple[list[Accusation], float]] = {
    "none": ([], 0.0),
    "one reader": ([accusation(A)], 1.0),
    "two hosts": ([accusation(A), accusation(B)], 2.0),
    "one host twice": ([accusation(A), accusation(Witness("x", "host-a", "10.0.0.9"))], 1.0),
    "one address under two names": ([accusation(A), accusation(Witness("x", "host-x", "10.0.0.1"))], 1.0),
    "two names without addresses": (
        [accusation(Witness("a", "host-a")), accusation(Witness("b", "host-b"))],
        2.0,
    ),
    "the heavier of one host": ([accusation(A, weight=0.25), accusation(A, weight=0.5)], 0.5),
    "one with doubt": ([accusation(A), accusation(B, weight=0.5)], 1.5),
    "three, one with doubt": ([accusation(A), accusation(B, weight=0.5), accusation(C, weight=0.5)], 2.0),
}


@pytest.mark.parametrize("case", TOTALS)
def test_the_weight_of_all_is_that_of_readers_on_different_hosts(case: str) -> None:
    """A host counts once, however many names and instances it has."""
    known, expected = TOTALS[case]
    assert expected == total_credibility(known)


@pytest.mark.parametrize(("doubted", "accused", "expected"), [(0, 1, 1.0), (1, 1, 0.5), (0, 2, 0.5), (2, 4, 0.0625)])
def test_doubt_takes_weight_away(doubted: int, accused: int, expected: float) -> None:
    """Earlier contradictions halve it, and several sources at once share it."""
    assert expected == accuser_credibility(doubted, accused)


STANDING = [(69.9, 0, 1), (70.0, 0, 0), (11.0, 1, 0)]


@pytest.mark.parametrize(("now", "generation", "expected"), STANDING)
def test_an_accusation_counts_for_a_while_and_one_generation(now: float, generation: int, expected: int) -> None:
    """New weights are not accused of what the old ones were."""
    assert expected == len(active_accusations([accusation(A)], generation, now))


CONTRADICTIONS = [
    # who reads well, since when, the weight that is left, who is doubted
    (B, 11.0, 0.5, ("a",)),
    (B, 9.0, 1.0, ()),
    (A, 11.0, 1.0, ()),
    (Witness("x", "host-a", "10.0.0.9"), 11.0, 1.0, ()),
    (Witness("x", "host-x", "10.0.0.1"), 11.0, 1.0, ()),
]


@pytest.mark.parametrize(("witness", "since", "weight", "doubted"), CONTRADICTIONS)
def test_a_reader_on_another_host_contradicts_by_reading_well(
    witness: Witness, since: float, weight: float, doubted: tuple[str, ...]
) -> None:
    """Only what it read after the accusation says something."""
    left, found = apply_contradiction([accusation(A)], witness, since)
    assert weight == left[0].credibility
    assert doubted == found


def test_one_reader_contradicts_once() -> None:
    """It reports about every second."""
    once, _ = apply_contradiction([accusation(A)], B, 11.0)
    assert (once, ()) == apply_contradiction(once, B, 12.0)


def test_a_second_reader_halves_the_weight_again() -> None:
    """The accuser is counted as doubted once."""
    once, _ = apply_contradiction([accusation(A)], B, 11.0)
    twice, doubted = apply_contradiction(once, C, 12.0)
    assert 0.25 == twice[0].credibility
    assert () == doubted


def test_a_fork_accuses_a_source_once() -> None:
    """Its newest accusation stands."""
    first, second = accusation(A), accusation(A, at=20.0)
    assert (second,) == with_accusation((first,), second)


def test_only_so_many_accusations_are_kept() -> None:
    """The newest ones."""
    known: tuple[Accusation, ...] = ()
    for number in range(MAX_KEPT + 1):
        known = with_accusation(known, accusation(A, fork_id=f"f{number}"))
    assert [f"f{number}" for number in range(1, MAX_KEPT + 1)] == [each.fork_id for each in known]


def test_a_fork_that_accuses_more_sources_loses_weight_everywhere() -> None:
    """The others' accusations stay as they are."""
    left = with_reduced_credibility([accusation(A), accusation(B)], "fork-a", 0.5)
    assert [0.5, 1.0] == [each.credibility for each in left]


@pytest.mark.parametrize(
    ("client", "expected"),
    [("10.0.0.1", "10.0.0.1"), ("127.0.0.1", ""), ("::1", ""), ("fd00::1", "fd00::1"), (None, ""), ("x", "")],
)
def test_a_loopback_address_tells_no_callers_apart(client: str | None, expected: str) -> None:
    """Every process of the host has it."""
    assert expected == address_of(client)
