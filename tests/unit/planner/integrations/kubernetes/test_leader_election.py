"""At most one candidate leads, while candidates start, stop and lose their connection."""

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
    """It leads while it renews, and the other candidate knows it."""

    async def scenario(candidates: Candidates) -> None:
        first = candidates.start("a")
        await asyncio.sleep(1)
        second = candidates.start("b")
        await asyncio.sleep(600)
        assert first.is_leader
        assert not second.is_leader
        assert first.identity == second.holder

    result = run_scenario(scenario)
    assert [("a", "begins"), ("a", "ends")] == result.history
    assert 600 / (LEASE_S / 5) == pytest.approx(result.lease_server.writes, rel=0.1)


def test_a_clean_stop_releases_the_lease() -> None:
    """The next candidate leads at its next poll, not after the Lease's duration."""

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
def test_a_stop_during_an_unanswered_write_releases_the_lease(after_s: float) -> None:
    """For acquiring and renewing, and regardless of whether the API server has executed it."""

    async def scenario(candidates: Candidates) -> None:
        candidates.start("a")
        await asyncio.sleep(after_s)
        await candidates.stop("a")
        assert candidates.lease_server.lease.holder is None

    assert 1 <= run_scenario(scenario).lease_server.writes


@pytest.mark.parametrize("unresponsive", [False, True])
def test_a_stop_during_the_cleanup_releases_the_lease(unresponsive: bool) -> None:
    """Even a second stop, and even if leadership was lost to an unresponsive API server."""

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
        assert election.identity == previous_lease.holder
        assert final_lease.holder is None
        assert not election.is_leader

    run_scenario(scenario)


def test_a_waiting_candidate_stops_without_a_write() -> None:
    """It leaves the holder's Lease alone."""

    async def scenario(candidates: Candidates) -> None:
        candidates.lease_server.lease = ObservedLease("other", "1", LEASE_S, "1")
        candidates.start("b")
        await asyncio.sleep(4)

    result = run_scenario(scenario)
    assert 0 == result.lease_server.writes
    assert "other" == result.lease_server.lease.holder


def test_a_holder_that_died_is_replaced() -> None:
    """Candidates acquire a Lease that is not renewed, after the holder's duration and not before."""

    async def scenario(candidates: Candidates) -> None:
        candidates.lease_server.lease = ObservedLease("dead", "1", LEASE_S, "1")
        candidates.start("b")
        await asyncio.sleep(LEASE_S * 2)

    result = run_scenario(scenario)
    assert LEASE_S <= result.times[0] <= LEASE_S + 4


@pytest.mark.parametrize("how", ["away", "silent"])
def test_a_leader_without_api_server_stops_first(how: str) -> None:
    """It stops after two thirds of its Lease's duration; another one starts after the full duration."""

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


def test_without_the_api_server_no_candidate_leads() -> None:
    """When the API server is back, one does."""

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
    """A leader that misses a renewal retries soon and stays the leader."""

    async def scenario(candidates: Candidates) -> None:
        candidates.start("a")
        await asyncio.sleep(10)
        for unresponsive in (candidates.lease_server.unreachable, candidates.lease_server.unresponsive):
            unresponsive.add("a")
            await asyncio.sleep(LEASE_S / 3)
            unresponsive.clear()
            await asyncio.sleep(60)

    assert [("a", "begins"), ("a", "ends")] == run_scenario(scenario).history


def test_a_renewal_with_a_lost_response_is_no_conflict() -> None:
    """The Lease has another version than expected but the same holder: it continues."""

    async def scenario(candidates: Candidates) -> None:
        first = candidates.start("a")
        await asyncio.sleep(10)
        candidates.lease_server.lease = ObservedLease(first.identity, "lost", LEASE_S, "lost")
        await asyncio.sleep(60)

    assert [("a", "begins"), ("a", "ends")] == run_scenario(scenario).history


@pytest.mark.parametrize("thief", ["thief", None])
def test_a_leader_whose_lease_was_overwritten_stops(thief: str | None) -> None:
    """A Lease that was overwritten or emptied is lost at the next renewal."""

    async def scenario(candidates: Candidates) -> None:
        candidates.start("a")
        await asyncio.sleep(10)
        candidates.lease_server.lease = ObservedLease(thief, "taken", LEASE_S, "taken")
        await asyncio.sleep(LEASE_S / 3)
        assert ("a", "ends") == candidates.history[1]

    run_scenario(scenario)


def test_a_paused_leader_stops_at_its_next_renewal() -> None:
    """With a paused clock it leads until the renewal is rejected, at most a fifth of the duration later."""

    async def scenario(candidates: Candidates) -> None:
        candidates.start("a")
        await asyncio.sleep(10)
        candidates.frozen_clocks["a"] = 10.0
        candidates.lease_server.lease = ObservedLease("b", "taken", LEASE_S, "taken")
        await asyncio.sleep(LEASE_S / 5 + 1)
        assert [("a", "begins"), ("a", "ends")] == candidates.history

    run_scenario(scenario)


def test_a_suspended_process_does_not_lead_when_it_resumes() -> None:
    """Its clock continued: `is_leader` is false before any of its timers has run."""

    async def scenario(candidates: Candidates) -> None:
        election = candidates.start("a")
        await asyncio.sleep(10)
        assert election.is_leader
        candidates.frozen_clocks["a"] = 10.0 + LEASE_S
        assert not election.is_leader

    run_scenario(scenario)


def test_a_deleted_lease_is_acquired_after_the_holders_duration() -> None:
    """The previous holder may not have noticed the deletion."""

    async def scenario(candidates: Candidates) -> None:
        candidates.lease_server.lease = ObservedLease("other", "1", LEASE_S, "1")
        candidates.start("b")
        await asyncio.sleep(4)
        candidates.lease_server.lease = NO_LEASE
        await asyncio.sleep(LEASE_S * 2)

    result = run_scenario(scenario)
    assert LEASE_S <= result.times[0] <= LEASE_S + 4


def test_of_five_candidates_never_two_lead() -> None:
    """Each leader is disconnected in turn: never two lead, and soon one leads again."""

    async def scenario(candidates: Candidates) -> None:
        for name in "abcde":
            candidates.start(name)
        for _ in range(20):
            await asyncio.sleep(LEASE_S * 2)
            (leader,) = candidates.active
            candidates.lease_server.unreachable = {leader}

    assert 1 == run_scenario(scenario).max_active


def test_the_end_of_the_work_releases_the_lease() -> None:
    """The exception of `work` is raised by `run`, and the Lease is free."""

    async def fails() -> None:
        raise RuntimeError("a bug")

    async def scenario(candidates: Candidates) -> None:
        election = LeaderElection(candidates.lease_server.view_for("a"), "controller", "rfork", "a", LEASE_S)
        with pytest.raises(RuntimeError, match="a bug"):
            await election.run(fails)
        assert candidates.lease_server.lease.holder is None
        assert not election.is_leader

    run_scenario(scenario)
