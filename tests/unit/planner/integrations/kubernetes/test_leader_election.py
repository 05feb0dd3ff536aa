"""Who leads, and that never two do: of candidates that start, stop and are cut off."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import pytest

from planner.integrations.kubernetes.cluster import ObservedLease
from planner.integrations.kubernetes.leader_election import LeaderElection
from tests.unit.planner.integrations.kubernetes.leader_candidates import (
    LEASE_S,
    NO_LEASE,
    Candidates,
    run_scenario,
)


def test_one_of_two_leads() -> None:
    """Of two candidates one leads, for as long as it renews, and the other one knows who it is."""

    async def scenario(candidates: Candidates) -> None:
        first = candidates.start("a")
        await asyncio.sleep(1)
        second = candidates.start("b")
        await asyncio.sleep(600)
        assert (True, False) == (first.is_leader, second.is_leader)
        assert first.identity == second.holder

    result = run_scenario(scenario)
    assert [("a", "begins"), ("a", "ends")] == result.history
    assert 600 / (LEASE_S / 5) == pytest.approx(result.lease_server.writes, rel=0.1)


def test_an_orderly_stop_gives_the_lease_up() -> None:
    """The next candidate leads at its next look, not a Lease's duration later."""

    async def scenario(candidates: Candidates) -> None:
        candidates.start("a")
        await asyncio.sleep(1)
        candidates.start("b")
        await asyncio.sleep(30)
        await candidates.stop("a")
        await asyncio.sleep(LEASE_S / 3)
        assert candidates.elections["b"].is_leader

    result = run_scenario(scenario)
    assert [("a", "begins"), ("a", "ends"), ("b", "begins"), ("b", "ends")] == result.history
    assert result.lease_server.lease.holder is None


@pytest.mark.parametrize("after_s", [0.015, 0.025, 3.005, 3.015, 3.025])
def test_a_stop_while_a_write_is_not_answered_gives_the_lease_up(after_s: float) -> None:
    """Whether it was to take the Lease or to renew it, and whether the API server has done it already."""

    async def scenario(candidates: Candidates) -> None:
        candidates.start("a")
        await asyncio.sleep(after_s)
        await candidates.stop("a")
        assert candidates.lease_server.lease.holder is None

    assert 1 <= run_scenario(scenario).lease_server.writes


@pytest.mark.parametrize("unresponsive", [False, True])
def test_a_stop_while_the_work_ends_gives_the_lease_up(unresponsive: bool) -> None:
    """Also a second one, and where the lead was lost by then to an API server that does not answer."""

    async def scenario(candidates: Candidates) -> None:
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
        election = LeaderElection(candidates.lease_server.view_for("a"), "controller", "rfork", "a", LEASE_S, clock)
        task = asyncio.create_task(election.run(work))
        await asyncio.sleep(10)
        if unresponsive:
            candidates.lease_server.unresponsive.add("a")
        else:
            task.cancel()
        await ending.wait()
        candidates.lease_server.unresponsive.clear()
        previous_lease = candidates.lease_server.lease
        task.cancel()
        await asyncio.sleep(1)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        final_lease = candidates.lease_server.lease
        assert (election.identity, None, False) == (
            previous_lease.holder,
            final_lease.holder,
            election.is_leader,
        )

    run_scenario(scenario)


def test_a_stop_of_who_never_asked_writes_nothing() -> None:
    """A candidate that waits leaves the holder's Lease alone when it is stopped."""

    async def scenario(candidates: Candidates) -> None:
        candidates.lease_server.lease = ObservedLease("other", "1", LEASE_S, "1")
        candidates.start("b")
        await asyncio.sleep(4)

    result = run_scenario(scenario)
    assert (0, "other") == (result.lease_server.writes, result.lease_server.lease.holder)


def test_a_holder_that_died_is_replaced() -> None:
    """Who looks at a Lease that nobody renews takes it, after the holder's duration and not before."""

    async def scenario(candidates: Candidates) -> None:
        candidates.lease_server.lease = ObservedLease("dead", "1", LEASE_S, "1")
        candidates.start("b")
        await asyncio.sleep(LEASE_S * 2)

    result = run_scenario(scenario)
    assert LEASE_S <= result.times[0] <= LEASE_S + 4


@pytest.mark.parametrize("how", ["away", "silent"])
def test_a_leader_without_api_server_steps_down_first(how: str) -> None:
    """It stops acting two thirds into its Lease; the other one begins after the whole of it."""

    async def scenario(candidates: Candidates) -> None:
        candidates.start("a")
        await asyncio.sleep(1)
        candidates.start("b")
        await asyncio.sleep(60)
        unresponsive: Mapping[str, set[str]] = {
            "away": candidates.lease_server.unreachable,
            "silent": candidates.lease_server.unresponsive,
        }
        unresponsive[how].add("a")
        await asyncio.sleep(60)
        assert [("a", "begins"), ("a", "ends"), ("b", "begins")] == candidates.history
        unresponsive[how].clear()
        await asyncio.sleep(60)

    result = run_scenario(scenario)
    assert [("a", "begins"), ("a", "ends"), ("b", "begins"), ("b", "ends")] == result.history
    assert result.times[1] + LEASE_S / 3 - 4 <= result.times[2]
    assert 1 == result.max_active


def test_everybody_loses_an_api_server_that_is_away() -> None:
    """Nobody leads then; once it is back, one does."""

    async def scenario(candidates: Candidates) -> None:
        candidates.start("a")
        candidates.start("b")
        await asyncio.sleep(30)
        candidates.lease_server.unreachable.update("ab")
        await asyncio.sleep(LEASE_S)
        assert [] == candidates.active
        candidates.lease_server.unreachable.clear()
        await asyncio.sleep(LEASE_S * 2)
        assert 1 == len(candidates.active)

    assert 1 == run_scenario(scenario).max_active


def test_a_short_outage_changes_nothing() -> None:
    """A leader that misses a renewal tries again at once, and leads on."""

    async def scenario(candidates: Candidates) -> None:
        candidates.start("a")
        await asyncio.sleep(10)
        for unresponsive in (candidates.lease_server.unreachable, candidates.lease_server.unresponsive):
            unresponsive.add("a")
            await asyncio.sleep(LEASE_S / 3)
            unresponsive.clear()
            await asyncio.sleep(60)

    assert [("a", "begins"), ("a", "ends")] == run_scenario(scenario).history


def test_a_renewal_whose_answer_was_lost_is_no_conflict() -> None:
    """The Lease has another version than the holder knows, but its name: it goes on."""

    async def scenario(candidates: Candidates) -> None:
        first = candidates.start("a")
        await asyncio.sleep(10)
        candidates.lease_server.lease = ObservedLease(first.identity, "lost", LEASE_S, "lost")
        await asyncio.sleep(60)

    assert [("a", "begins"), ("a", "ends")] == run_scenario(scenario).history


@pytest.mark.parametrize("thief", ["thief", None])
def test_a_leader_whose_lease_was_taken_ends(thief: str | None) -> None:
    """A Lease that another one wrote, or emptied, is lost at the next renewal."""

    async def scenario(candidates: Candidates) -> None:
        candidates.start("a")
        await asyncio.sleep(10)
        candidates.lease_server.lease = ObservedLease(thief, "taken", LEASE_S, "taken")
        await asyncio.sleep(LEASE_S / 3)
        assert ("a", "ends") == candidates.history[1]

    run_scenario(scenario)


def test_a_holder_whose_clock_stood_still_ends_at_its_next_renewal() -> None:
    """It believes in its Lease until it is refused, a fifth of the duration later at most."""

    async def scenario(candidates: Candidates) -> None:
        candidates.start("a")
        await asyncio.sleep(10)
        candidates.frozen_clocks["a"] = 10.0
        candidates.lease_server.lease = ObservedLease("b", "taken", LEASE_S, "taken")
        await asyncio.sleep(LEASE_S / 5 + 1)
        assert [("a", "begins"), ("a", "ends")] == candidates.history

    run_scenario(scenario)


def test_a_process_that_slept_does_not_lead_when_it_wakes() -> None:
    """Its clock went on without it: `leads` is false before any of its timers has run."""

    async def scenario(candidates: Candidates) -> None:
        election = candidates.start("a")
        await asyncio.sleep(10)
        assert election.is_leader
        candidates.frozen_clocks["a"] = 10.0 + LEASE_S
        assert not election.is_leader

    run_scenario(scenario)


def test_a_deleted_lease_is_not_taken_from_a_holder_that_has_not_noticed() -> None:
    """Who saw a holder waits out its duration, although there is no Lease any more."""

    async def scenario(candidates: Candidates) -> None:
        candidates.lease_server.lease = ObservedLease("other", "1", LEASE_S, "1")
        candidates.start("b")
        await asyncio.sleep(4)
        candidates.lease_server.lease = NO_LEASE
        await asyncio.sleep(LEASE_S * 2)

    result = run_scenario(scenario)
    assert LEASE_S <= result.times[0] <= LEASE_S + 4


def test_many_candidates_and_many_ends() -> None:
    """Five candidates of which each leader is cut off in turn: never two act, and soon one does again."""

    async def scenario(candidates: Candidates) -> None:
        for name in "abcde":
            candidates.start(name)
        for _ in range(20):
            await asyncio.sleep(LEASE_S * 2)
            (leader,) = candidates.active
            candidates.lease_server.unreachable = {leader}

    assert 1 == run_scenario(scenario).max_active


def test_work_that_ends_gives_the_lease_up() -> None:
    """What `work` raises comes out of `lead`, and the Lease is nobody's."""

    async def fails() -> None:
        raise RuntimeError("a bug")

    async def scenario(candidates: Candidates) -> None:
        election = LeaderElection(candidates.lease_server.view_for("a"), "controller", "rfork", "a", LEASE_S)
        with pytest.raises(RuntimeError, match="a bug"):
            await election.run(fails)
        assert (None, False) == (candidates.lease_server.lease.holder, election.is_leader)

    run_scenario(scenario)
