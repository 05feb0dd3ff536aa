"""Who leads, and that never two do: of candidates that start, stop and are cut off."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import pytest

from planner.hooks.kubernetes.cluster import LeaseSeen
from planner.hooks.kubernetes.election import Election
from tests.unit.hooks.kubernetes.candidates import LEASE_S, NO_LEASE, Candidates, play


def test_one_of_two_leads() -> None:
    """Of two candidates one leads, for as long as it renews, and the other one knows who it is."""

    async def story(candidates: Candidates) -> None:
        first = candidates.start("a")
        await asyncio.sleep(1)
        second = candidates.start("b")
        await asyncio.sleep(600)
        assert (True, False) == (first.leads, second.leads)
        assert first.identity == second.holder

    played = play(story)
    assert [("a", "begins"), ("a", "ends")] == played.history
    assert 600 / (LEASE_S / 5) == pytest.approx(played.shelf.writes, rel=0.1)


def test_an_orderly_stop_gives_the_lease_up() -> None:
    """The next candidate leads at its next look, not a Lease's duration later."""

    async def story(candidates: Candidates) -> None:
        candidates.start("a")
        await asyncio.sleep(1)
        candidates.start("b")
        await asyncio.sleep(30)
        await candidates.stop("a")
        await asyncio.sleep(LEASE_S / 3)
        assert candidates.elections["b"].leads

    played = play(story)
    assert [("a", "begins"), ("a", "ends"), ("b", "begins"), ("b", "ends")] == played.history
    assert played.shelf.lease.holder is None


@pytest.mark.parametrize("after_s", [0.015, 0.025, 3.005, 3.015, 3.025])
def test_a_stop_while_a_write_is_not_answered_gives_the_lease_up(after_s: float) -> None:
    """Whether it was to take the Lease or to renew it, and whether the API server has done it already."""

    async def story(candidates: Candidates) -> None:
        candidates.start("a")
        await asyncio.sleep(after_s)
        await candidates.stop("a")
        assert candidates.shelf.lease.holder is None

    assert 1 <= play(story).shelf.writes


@pytest.mark.parametrize("cut", [False, True])
def test_a_stop_while_the_work_ends_gives_the_lease_up(cut: bool) -> None:
    """Also a second one, and where the lead was lost by then to an API server that does not answer."""

    async def story(candidates: Candidates) -> None:
        ending, may_end = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(1e9)
            finally:
                ending.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await may_end.wait()
                await may_end.wait()

        clock = asyncio.get_running_loop().time
        election = Election(candidates.shelf.view("a"), "controller", "rfork", "a", LEASE_S, clock)
        task = asyncio.create_task(election.lead(work))
        await asyncio.sleep(10)
        if cut:
            candidates.shelf.silent.add("a")
        else:
            task.cancel()
        await ending.wait()
        candidates.shelf.silent.clear()
        held = candidates.shelf.lease
        task.cancel()
        await asyncio.sleep(1)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        left = candidates.shelf.lease
        assert (election.identity, None, False) == (held.holder, left.holder, election.leads)

    play(story)


def test_a_stop_of_who_never_asked_writes_nothing() -> None:
    """A candidate that waits leaves the holder's Lease alone when it is stopped."""

    async def story(candidates: Candidates) -> None:
        candidates.shelf.lease = LeaseSeen("other", "1", LEASE_S, "1")
        candidates.start("b")
        await asyncio.sleep(4)

    played = play(story)
    assert (0, "other") == (played.shelf.writes, played.shelf.lease.holder)


def test_a_holder_that_died_is_replaced() -> None:
    """Who looks at a Lease that nobody renews takes it, after the holder's duration and not before."""

    async def story(candidates: Candidates) -> None:
        candidates.shelf.lease = LeaseSeen("dead", "1", LEASE_S, "1")
        candidates.start("b")
        await asyncio.sleep(LEASE_S * 2)

    played = play(story)
    assert LEASE_S <= played.times[0] <= LEASE_S + 4


@pytest.mark.parametrize("how", ["away", "silent"])
def test_a_leader_without_api_server_steps_down_first(how: str) -> None:
    """It stops acting two thirds into its Lease; the other one begins after the whole of it."""

    async def story(candidates: Candidates) -> None:
        candidates.start("a")
        await asyncio.sleep(1)
        candidates.start("b")
        await asyncio.sleep(60)
        cut: Mapping[str, set[str]] = {"away": candidates.shelf.away, "silent": candidates.shelf.silent}
        cut[how].add("a")
        await asyncio.sleep(60)
        assert [("a", "begins"), ("a", "ends"), ("b", "begins")] == candidates.history
        cut[how].clear()
        await asyncio.sleep(60)

    played = play(story)
    assert [("a", "begins"), ("a", "ends"), ("b", "begins"), ("b", "ends")] == played.history
    assert played.times[1] + LEASE_S / 3 - 4 <= played.times[2]
    assert 1 == played.most_at_once


def test_everybody_loses_an_api_server_that_is_away() -> None:
    """Nobody leads then; once it is back, one does."""

    async def story(candidates: Candidates) -> None:
        candidates.start("a")
        candidates.start("b")
        await asyncio.sleep(30)
        candidates.shelf.away.update("ab")
        await asyncio.sleep(LEASE_S)
        assert [] == candidates.acting
        candidates.shelf.away.clear()
        await asyncio.sleep(LEASE_S * 2)
        assert 1 == len(candidates.acting)

    assert 1 == play(story).most_at_once


def test_a_short_outage_changes_nothing() -> None:
    """A leader that misses a renewal tries again at once, and leads on."""

    async def story(candidates: Candidates) -> None:
        candidates.start("a")
        await asyncio.sleep(10)
        for cut in (candidates.shelf.away, candidates.shelf.silent):
            cut.add("a")
            await asyncio.sleep(LEASE_S / 3)
            cut.clear()
            await asyncio.sleep(60)

    assert [("a", "begins"), ("a", "ends")] == play(story).history


def test_a_renewal_whose_answer_was_lost_is_no_conflict() -> None:
    """The Lease has another version than the holder knows, but its name: it goes on."""

    async def story(candidates: Candidates) -> None:
        first = candidates.start("a")
        await asyncio.sleep(10)
        candidates.shelf.lease = LeaseSeen(first.identity, "lost", LEASE_S, "lost")
        await asyncio.sleep(60)

    assert [("a", "begins"), ("a", "ends")] == play(story).history


@pytest.mark.parametrize("thief", ["thief", None])
def test_a_leader_whose_lease_was_taken_ends(thief: str | None) -> None:
    """A Lease that another one wrote, or emptied, is lost at the next renewal."""

    async def story(candidates: Candidates) -> None:
        candidates.start("a")
        await asyncio.sleep(10)
        candidates.shelf.lease = LeaseSeen(thief, "taken", LEASE_S, "taken")
        await asyncio.sleep(LEASE_S / 3)
        assert ("a", "ends") == candidates.history[1]

    play(story)


def test_a_holder_whose_clock_stood_still_ends_at_its_next_renewal() -> None:
    """It believes in its Lease until it is refused, a fifth of the duration later at most."""

    async def story(candidates: Candidates) -> None:
        candidates.start("a")
        await asyncio.sleep(10)
        candidates.stopped_clocks["a"] = 10.0
        candidates.shelf.lease = LeaseSeen("b", "taken", LEASE_S, "taken")
        await asyncio.sleep(LEASE_S / 5 + 1)
        assert [("a", "begins"), ("a", "ends")] == candidates.history

    play(story)


def test_a_process_that_slept_does_not_lead_when_it_wakes() -> None:
    """Its clock went on without it: `leads` is false before any of its timers has run."""

    async def story(candidates: Candidates) -> None:
        election = candidates.start("a")
        await asyncio.sleep(10)
        assert election.leads
        candidates.stopped_clocks["a"] = 10.0 + LEASE_S
        assert not election.leads

    play(story)


def test_a_deleted_lease_is_not_taken_from_a_holder_that_has_not_noticed() -> None:
    """Who saw a holder waits out its duration, although there is no Lease any more."""

    async def story(candidates: Candidates) -> None:
        candidates.shelf.lease = LeaseSeen("other", "1", LEASE_S, "1")
        candidates.start("b")
        await asyncio.sleep(4)
        candidates.shelf.lease = NO_LEASE
        await asyncio.sleep(LEASE_S * 2)

    played = play(story)
    assert LEASE_S <= played.times[0] <= LEASE_S + 4


def test_many_candidates_and_many_ends() -> None:
    """Five candidates of which each leader is cut off in turn: never two act, and soon one does again."""

    async def story(candidates: Candidates) -> None:
        for name in "abcde":
            candidates.start(name)
        for _ in range(20):
            await asyncio.sleep(LEASE_S * 2)
            (leader,) = candidates.acting
            candidates.shelf.away = {leader}

    assert 1 == play(story).most_at_once


def test_work_that_ends_gives_the_lease_up() -> None:
    """What `work` raises comes out of `lead`, and the Lease is nobody's."""

    async def fails() -> None:
        raise RuntimeError("a bug")

    async def story(candidates: Candidates) -> None:
        election = Election(candidates.shelf.view("a"), "controller", "rfork", "a", LEASE_S)
        with pytest.raises(RuntimeError, match="a bug"):
            await election.lead(fails)
        assert (None, False) == (candidates.shelf.lease.holder, election.leads)

    play(story)
