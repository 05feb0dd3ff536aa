"""Total credibility of the accusations of a source."""

from __future__ import annotations

import pytest

from planner.core.faults import (
    MAX_KEPT,
    accuser_credibility,
    address_of,
    apply_contradiction,
    total_credibility,
    with_accusation,
    with_reduced_credibility,
)
from planner.core.records import Accusation, Witness, active_accusations

A = Witness("a", "host-a", "10.0.0.1")
B = Witness("b", "host-b", "10.0.0.2")
C = Witness("c", "host-c", "10.0.0.3")


def accusation(accuser: Witness, **changes: object) -> Accusation:
    """Return an accusation at 10 that counts until 70, with full credibility."""
    values = {"fork_id": f"fork-{accuser.instance_id}", "reason": "SourceCorrupt", "at": 10.0, "until": 70.0}
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
    "the more credible one of a host": ([accusation(A, credibility=0.25), accusation(A, credibility=0.5)], 0.5),
    "one doubted": ([accusation(A), accusation(B, credibility=0.5)], 1.5),
    "three, two doubted": ([accusation(A), accusation(B, credibility=0.5), accusation(C, credibility=0.5)], 2.0),
}


@pytest.mark.parametrize("case", TOTALS)
def test_total_credibility_counts_different_hosts(case: str) -> None:
    """A host counts once, however many names and instances it has."""
    known, expected = TOTALS[case]
    assert expected == total_credibility(known)


@pytest.mark.parametrize(("doubted", "accused", "expected"), [(0, 1, 1.0), (1, 1, 0.5), (0, 2, 0.5), (2, 4, 0.0625)])
def test_doubt_reduces_credibility(doubted: int, accused: int, expected: float) -> None:
    """Earlier contradictions halve it, and accusing several sources divides it."""
    assert expected == accuser_credibility(doubted, accused)


STANDING = [(69.9, 0, 1), (70.0, 0, 0), (11.0, 1, 0)]


@pytest.mark.parametrize(("now", "generation", "expected"), STANDING)
def test_an_accusation_expires_and_applies_to_one_generation(now: float, generation: int, expected: int) -> None:
    """New weights are not blamed for the old ones."""
    assert expected == len(active_accusations([accusation(A)], generation, now))


CONTRADICTIONS = [
    # witness, time of its reads, remaining credibility, contradicted accusers
    (B, 11.0, 0.5, ("a",)),
    (B, 9.0, 1.0, ()),
    (A, 11.0, 1.0, ()),
    (Witness("x", "host-a", "10.0.0.9"), 11.0, 1.0, ()),
    (Witness("x", "host-x", "10.0.0.1"), 11.0, 1.0, ()),
]


@pytest.mark.parametrize(("witness", "since", "weight", "doubted"), CONTRADICTIONS)
def test_a_reader_on_another_host_contradicts_an_accusation(
    witness: Witness, since: float, weight: float, doubted: tuple[str, ...]
) -> None:
    """Only what it read after the accusation counts."""
    left, found = apply_contradiction([accusation(A)], witness, since)
    assert weight == left[0].credibility
    assert doubted == found


def test_one_reader_contradicts_once() -> None:
    """Its repeated reports do not count again."""
    once, _ = apply_contradiction([accusation(A)], B, 11.0)
    assert (once, ()) == apply_contradiction(once, B, 12.0)


def test_a_second_reader_halves_the_credibility_again() -> None:
    """The accuser is counted as contradicted once."""
    once, _ = apply_contradiction([accusation(A)], B, 11.0)
    twice, doubted = apply_contradiction(once, C, 12.0)
    assert 0.25 == twice[0].credibility
    assert () == doubted


def test_a_fork_accuses_a_source_once() -> None:
    """Its newest accusation counts."""
    first, second = accusation(A), accusation(A, at=20.0)
    assert (second,) == with_accusation((first,), second)


def test_the_number_of_accusations_is_limited() -> None:
    """The newest ones are kept."""
    known: tuple[Accusation, ...] = ()
    for number in range(MAX_KEPT + 1):
        known = with_accusation(known, accusation(A, fork_id=f"f{number}"))
    assert [f"f{number}" for number in range(1, MAX_KEPT + 1)] == [each.fork_id for each in known]


def test_accusing_more_sources_reduces_credibility_everywhere() -> None:
    """The accusations of other forks do not change."""
    left = with_reduced_credibility([accusation(A), accusation(B)], "fork-a", 0.5)
    assert [0.5, 1.0] == [each.credibility for each in left]


@pytest.mark.parametrize(
    ("client", "expected"),
    [("10.0.0.1", "10.0.0.1"), ("127.0.0.1", ""), ("::1", ""), ("fd00::1", "fd00::1"), (None, ""), ("x", "")],
)
def test_a_loopback_address_does_not_distinguish_callers(client: str | None, expected: str) -> None:
    """Every process of the host has it."""
    assert expected == address_of(client)
