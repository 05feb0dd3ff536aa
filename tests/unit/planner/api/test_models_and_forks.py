"""Models, forks, exit checks and metrics over the REST interface."""

from __future__ import annotations

import httpx
import pytest

from rfork.errors import PlannerRejected
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkProgress, ForkResult
from tests.unit.planner.builders import WEIGHTS, fault, fork_request, report, seed_report


def test_metrics_export_the_fleet(planner: PlannerClient, web: httpx.Client) -> None:
    """Instances, leases, outcomes, fallbacks by reason, and bytes by source type are exported."""
    planner.report(seed_report("s", max_readers=2))
    planner.request_plan(fork_request("a"))
    planner.request_plan(fork_request("b", faults=(fault("s", "Invented"),)))
    planner.finish(
        "fork-b",
        ForkResult(
            outcome="fallback", seconds=1, bytes_read=5, sources={"s": 2, "checkpoint:/models/m": 3},
            fallback="checkpoint:/models/m", reasons=("whatever", "SourceTimeout: no byte for 10 s"),
        ),
    )  # fmt: skip
    lines = web.get("/metrics").text.splitlines()
    expected = {
        'rfork_planner_instances{state="serving"} 1.0',
        'rfork_planner_instances{state="loading"} 2.0',
        "rfork_planner_active_leases 1.0",
        'rfork_planner_forks_total{outcome="fallback"} 1.0',
        'rfork_planner_fallbacks_total{fallback="checkpoint",reason="SourceTimeout"} 1.0',
        'rfork_planner_source_faults_total{error="other",fault="source"} 1.0',
        'rfork_planner_verified_bytes_total{source="peer"} 2.0',
        'rfork_planner_verified_bytes_total{source="checkpoint"} 3.0',
        "rfork_planner_plan_seconds_count 2.0",
    }
    assert set() == expected - set(lines)


def test_models_show_bytes_from_storage_and_from_peers(planner: PlannerClient) -> None:
    """Each row of the rank shows the same totals of finished forks."""
    planner.report(seed_report("s"))
    planner.report(report("idle"))
    planner.request_plan(fork_request("a"))
    planner.finish(
        "fork-a",
        ForkResult(outcome="forked", seconds=1, bytes_read=9, sources={"s": 5, "snapshot:file:///x": 3, "loader:": 1}),
    )
    assert [(4, 5)] * 2 == [(row.storage_bytes, row.forked_bytes) for row in planner.models()]


def test_models_show_the_time_saved(planner: PlannerClient) -> None:
    """Medians per origin and the time saved are shown, also after a scale to zero."""
    planner.report(seed_report("s"))
    size = seed_report("s").image_bytes
    for name, source, seconds in (("a", "snapshot:file:///x", 9.0), ("b", "s", 2.0), ("c", "s", 4.0)):
        planner.request_plan(fork_request(name))
        reported = ForkResult(outcome="forked", seconds=seconds, bytes_read=size, sources={source: size})
        planner.finish(f"fork-{name}", reported)
    known = {(row.storage_s, row.fork_s, row.seconds_saved) for row in planner.models()}
    planner.remove("a")
    for name in ("s", "b", "c"):
        planner.remove(name)
    planner.report(seed_report("t"))
    assert {(9.0, 3.0, 12.0)} == known
    assert [(9.0, 3.0, 12.0)] == [(row.storage_s, row.fork_s, row.seconds_saved) for row in planner.models()]


def test_a_fork_shows_the_rate_limits_of_its_sources(planner: PlannerClient) -> None:
    """They are shown while it runs and after it has finished."""
    planner.report(seed_report("s").model_copy(update={"egress_rate": 500}))
    planner.request_plan(fork_request("a"))
    reported = ForkProgress(verified=((0, 6),), bytes_read=6, bytes_per_s=1.0, phases={"transfer": 1.5})
    planner.progress("fork-a", reported)
    running = planner.forks()[0]
    planner.report(seed_report("s").model_copy(update={"egress_rate": 400}))
    planner.finish("fork-a", ForkResult(outcome="forked", seconds=1, bytes_read=1))
    assert {"s": 500} == running.source_rate_limits
    assert reported == running.progress
    assert {"s": 400} == planner.forks()[0].source_rate_limits


def test_a_target_counts_to_the_weights_of_its_plan(planner: PlannerClient) -> None:
    """A relay without known weights counts in the row of the weights it is receiving."""
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a"))
    planner.report(report("idle"))
    assert {(WEIGHTS, 1, 1, 1), (None, 0, 0, 0)} == {
        (row.weights_id, row.seeds, row.relays, row.forks_running) for row in planner.models()
    }


def test_the_last_seed_is_drained_by_force_only(planner: PlannerClient) -> None:
    """Problem `last-seed` (409) is returned unless there is a second seed or `force` is set."""
    planner.report(seed_report("s"))
    with pytest.raises(PlannerRejected) as refused:
        planner.drain("s")
    forced = planner.drain("s", force=True).report.state
    planner.report(seed_report("t"))
    planner.report(seed_report("u"))
    assert 409 == refused.value.status
    assert "last-seed" == refused.value.problem
    assert "draining" == forced
    assert "draining" == planner.drain("t").report.state


def test_an_instance_may_exit_once_its_readers_are_done(planner: PlannerClient) -> None:
    """A drained instance with a reader may not exit; without readers it may."""
    planner.report(seed_report("s"))
    planner.request_plan(fork_request("a"))
    planner.report(seed_report("t"))
    planner.drain("s")
    while_read = planner.can_exit("s")
    planner.finish("fork-a", ForkResult(outcome="forked", seconds=1, bytes_read=1))
    afterwards = planner.can_exit("s")
    unknown = planner.can_exit("unknown")
    assert not while_read.can_exit
    assert 1 == while_read.readers
    assert afterwards.can_exit
    assert 0 == afterwards.readers
    assert not unknown.can_exit
    assert all(each.reason for each in (while_read, afterwards, unknown))
