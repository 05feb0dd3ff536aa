"""Complete forks with real sources and a scripted planner in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest
import torch
from torch import nn

from rfork.errors import AllSourcesFailed, EngineMismatch, PlannerUnreachable, UnsupportedTensor
from rfork.image.capture import capture
from rfork.image.chunks import MIB, ChunkState
from rfork.receiver import session as session_module
from rfork.receiver.fallback import Fallback, engine_fallback
from rfork.schema import ChunkAssignment, ForkProgress, Plan, ProgressAck
from rfork.testing.transport import FaultInjection
from tests.unit.receiver.fake_planner import FakePlanner, problem_response
from tests.unit.receiver.fleet import NEVER_S, Fleet, Script, live_transfer_threads, plan, route
from tests.unit.receiver.sessions import ALL, CHUNKS, TWOS, Model, scripted_planner, session


def raising(error: BaseException) -> Plan:
    raise error


def test_a_fork(fleet: Fleet) -> None:
    """The module has the seed's tensors, the planner has the result, and the target serves readers."""
    source, module = Model(0.0), Model(1.0)
    seed = fleet.source("a", capture(source))
    planner = scripted_planner(lambda: plan(route(seed, ALL)))
    progress_reports: list[tuple[ForkProgress, int]] = []
    report = session(
        fleet, module, planner, on_progress=lambda progress, size: progress_reports.append((progress, size))
    ).run()
    assert torch.equal(source.weight, module.weight)
    assert ("forked", None, (), CHUNKS, CHUNKS, 0) == (
        report.outcome,
        report.fallback,
        report.reasons,
        report.chunks,
        report.chunks_verified,
        report.bytes_repeated,
    )
    assert seed.manifest is not None
    assert (seed.manifest.weights_id, seed.image.layout.image_bytes) == (report.weights_id, report.bytes_read)
    assert {"capture", "plan", "transfer"} == set(report.phases)
    ended = [(finish.outcome, finish.sources, finish.bytes_read) for _, finish in planner.finishes]
    assert [("forked", {"a": report.image_bytes}, report.bytes_read)] == ended
    assert ((ALL,), report.image_bytes) == (progress_reports[-1][0].verified, progress_reports[-1][1])
    assert ({"a": "memory"}, ["capture", "plan", "transfer"]) == (
        progress_reports[-1][0].transports,
        list(progress_reports[-1][0].phases),
    )
    finish = planner.finishes[0][1]
    assert (report.phases, {"a": "memory"}, 0) == (finish.phases, finish.transports, finish.replans)
    assert report.seed is not None
    seed_report = report.seed.report()
    assert ("serving", (ALL,), report.weights_id, 0) == (
        seed_report.state,
        seed_report.verified,
        seed_report.weights_id,
        seed_report.generation,
    )
    report.seed.close()
    assert (["target"], [report.fork_id]) == (planner.removed, [fork_id for fork_id, _ in planner.finishes])


@pytest.mark.parametrize("load_path", ["forked", "in place", "another model"])
def test_verified_chunks_are_reported_before_the_result(
    fleet: Fleet, load_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished fork is known to the planner as a source, whichever path loaded its weights."""
    # On a busy machine the report may take longer than the default timeout.
    monkeypatch.setattr(session_module, "REPORT_TIMEOUT_S", NEVER_S)
    seed, module = fleet.source("a", capture(Model(0.0))), Model(1.0)

    class Planner(FakePlanner):
        reported_chunks: tuple[tuple[int, int], ...] | None = None

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("/finish"):
                self.reported_chunks = self.reports[-1].verified
            return super().handle_request(request)

    cases = {
        "forked": (lambda: plan(route(seed, ALL)), TWOS),
        "in place": (lambda: raising(PlannerUnreachable("down")), TWOS),
        "another model": (
            lambda: raising(PlannerUnreachable("down")),
            engine_fallback(lambda: Model(2.0), lambda: None),
        ),
    }
    plan_factory, fallback = cases[load_path]
    planner = Planner(Script((plan_factory,)))
    report = session(fleet, module, planner, fallback).run()
    assert (ALL,) == planner.reported_chunks
    assert report.seed is not None
    report.seed.close()


def test_a_forking_target_is_loading(fleet: Fleet) -> None:
    """Its first request describes a reachable instance that is loading and has no chunks."""
    seed = fleet.source("a", capture(Model(0.0)))
    planner = scripted_planner(lambda: plan(route(seed, ALL)))
    report = session(fleet, Model(1.0), planner).run()
    reported_instance = planner.requests[0].instance
    assert ("loading", (), None, ("memory",)) == (
        reported_instance.state,
        reported_instance.verified,
        reported_instance.weights_id,
        reported_instance.transports,
    )
    assert report.seed is not None
    assert reported_instance.address == report.seed.report().address
    report.seed.close()


def test_excluded_tensors_are_left_alone(fleet: Fleet) -> None:
    """A tensor that both sides exclude is neither read nor served."""
    source, module = Model(0.0), Model(1.0)
    source.get_buffer("table").fill_(9.0)
    seed = fleet.source("a", capture(source, exclude=["table"]))
    report = session(fleet, module, scripted_planner(lambda: plan(route(seed, (0, 4)))), exclude=["table"]).run()
    assert torch.equal(source.weight, module.weight)
    assert (4 * MIB, list(range(8))) == (report.image_bytes, module.get_buffer("table").tolist())
    assert report.seed is not None
    report.seed.close()


@pytest.mark.parametrize(
    ("plan_factory", "reason"),
    [
        (None, "NoSource: no planner is set"),
        (lambda: plan(reason="no instance serves it"), "NoSource: no instance serves it"),
        (lambda: raising(httpx.ConnectError("refused")), "PlannerUnreachable: "),
    ],
    ids=["no planner", "no source", "planner unreachable"],
)
def test_without_a_source_the_fallback_loads(
    fleet: Fleet, plan_factory: Callable[[], Plan] | None, reason: str
) -> None:
    """The report contains the fallback and the reason, and the instance serves what it loaded."""
    module = Model(1.0)
    planner = scripted_planner(plan_factory) if plan_factory is not None else None
    report = session(fleet, module, planner, TWOS).run()
    assert (True, "fallback", "twos", True) == (
        bool((module.weight == 2.0).all()),
        report.outcome,
        report.fallback,
        report.reasons[0].startswith(reason),
    )
    assert report.seed is not None
    assert (capture(module).manifest().weights_id, 1, "serving") == (
        report.weights_id,
        report.seed.generation,
        report.seed.report().state,
    )
    if planner is not None:
        assert [("fallback", "twos", 1)] == [
            (finish.outcome, finish.fallback, len(finish.reasons)) for _, finish in planner.finishes
        ]
    report.seed.close()


def test_a_partly_written_model_is_loaded_again(fleet: Fleet) -> None:
    """When the only source dies mid-fork, its partial data does not survive the fallback."""
    source, module = Model(0.0), Model(1.0)
    source.get_buffer("table").fill_(9.0)
    seed = fleet.source("a", capture(source), FaultInjection(dies_after_bytes=4 * MIB + 1))
    planner = scripted_planner(lambda: plan(route(seed, ALL)), lambda: plan(reason="no source left"))
    report = session(fleet, module, planner, TWOS).run()
    assert (True, list(range(8))) == (bool((module.weight == 2.0).all()), module.get_buffer("table").tolist())
    assert ["SourceUnavailable", "NoSource"] == [reason.partition(":")[0] for reason in report.reasons]
    assert report.seed is not None
    report.seed.close()


def test_a_mismatch_names_the_tensor(fleet: Fleet) -> None:
    """The reason names the first tensor that differs from a source with another layout."""
    other = nn.Module()
    other.register_parameter("weight", nn.Parameter(torch.zeros(3, 5)))
    other.register_buffer("table", torch.arange(8.0), persistent=False)
    seed = fleet.source("a", capture(other))
    planner = scripted_planner(lambda: plan().model_copy(update={"mismatched_source": route(seed)}))
    report = session(fleet, Model(1.0), planner, TWOS).run()
    assert [] == [
        part for part in ("weight: here float32[1048576]", "there float32[3, 5]") if part not in report.reasons[0]
    ]
    assert report.seed is not None
    report.seed.close()


def test_a_failed_fork_closes_everything(fleet: Fleet) -> None:
    """The planner receives every reason, and no part of the target can be reached."""
    planner = scripted_planner(lambda: plan(reason="no instance serves it"))

    def broken(module: nn.Module) -> None:
        raise ZeroDivisionError("bug")

    with pytest.raises(AllSourcesFailed):
        session(fleet, Model(1.0), planner, Fallback("broken", broken)).run()
    assert [("failed", 2)] == [(finish.outcome, len(finish.reasons)) for _, finish in planner.finishes]
    assert (["target"], {}) == (planner.removed, fleet.network.exports)
    assert [] == live_transfer_threads()


def test_an_interrupt_releases_the_leases(fleet: Fleet) -> None:
    """Ctrl-C mid-fork notifies the planner, closes the serving side and ends every thread."""
    seed = fleet.source("a", capture(Model(0.0)))
    planner = scripted_planner(lambda: plan(route(seed, (0, 2))), lambda: raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        session(fleet, Model(1.0), planner, TWOS).run()
    assert (["interrupted"], ["target"]) == (
        [finish.outcome for _, finish in planner.finishes],
        planner.removed,
    )
    assert (1, (), []) == (len(fleet.network.exports), seed.report().readers, live_transfer_threads())


def test_the_planner_client_is_closed_with_the_seed(fleet: Fleet) -> None:
    """The connections to the planner live no longer than the serving side."""
    seed = fleet.source("a", capture(Model(0.0)))
    client = scripted_planner(lambda: plan(route(seed, ALL))).client()
    forking = session(fleet, Model(1.0), None)
    forking._network = replace(forking._network, planner=client)
    report = forking.run()
    assert report.seed is not None
    report.seed.close()
    with pytest.raises(PlannerUnreachable):
        client.ready()


def test_a_progress_callback_that_fails_does_not_end_the_fork(fleet: Fleet) -> None:
    """The fork and the renewal of its leases continue."""
    source, module = Model(0.0), Model(1.0)
    seed = fleet.source("a", capture(source))

    def broken(progress: ForkProgress, image_bytes: int) -> None:
        raise BrokenPipeError("the terminal is closed")

    report = session(fleet, module, scripted_planner(lambda: plan(route(seed, ALL))), on_progress=broken).run()
    assert ("forked", True) == (report.outcome, torch.equal(source.weight, module.weight))
    assert report.seed is not None
    report.seed.close()


def test_progress_is_reported_while_the_planner_is_silent(fleet: Fleet) -> None:
    """The progress callback does not wait for the planner's response."""
    source, module = Model(0.0), Model(1.0)
    image = capture(source)
    chunk_state = ChunkState(image.layout.chunks, [0, 1])
    seed = fleet.source("a", image, chunk_state=chunk_state, manifest=image.manifest())
    planner_blocked, progress_reported = threading.Event(), threading.Event()
    waited: list[bool] = []

    def delayed_response() -> httpx.Response:
        planner_blocked.set()
        waited.append(progress_reported.wait(30))
        for index in range(CHUNKS):
            chunk_state.mark_verified(index)
        return httpx.Response(200, content=ACK)

    def show(progress: ForkProgress, image_bytes: int) -> None:
        if planner_blocked.is_set():
            progress_reported.set()

    planner = scripted_planner(lambda: plan(route(seed, ALL)))
    planner.on_progress = delayed_response
    report = session(fleet, module, planner, on_progress=show).run()
    assert report.seed is not None
    report.seed.close()
    assert ("forked", True) == (report.outcome, waited[0])


def test_a_fallback_that_rebinds_tensors_makes_no_seed(fleet: Fleet) -> None:
    """The module no longer uses the captured memory: the model works, and no peer reads stale bytes."""

    def rebind(module: nn.Module) -> None:
        module.load_state_dict(Model(2.0).state_dict(), assign=True)

    planner = scripted_planner(lambda: plan(reason="no source"))
    report = session(fleet, Model(1.0), planner, Fallback("rebinding", rebind)).run()
    assert report.seed is not None
    assert ("fallback", "rebinding", "loading", 0) == (
        report.outcome,
        report.fallback,
        report.seed.report().state,
        len(report.seed.chunk_state),
    )
    report.seed.close()


ACK = ProgressAck().model_dump_json()


def has_read_first_plan(planner: FakePlanner) -> bool:
    """Return whether the fork has read what the first source has and has not requested another plan."""
    return planner.progress[-1].verified == ((0, 2),) and len(planner.requests) == 1


def test_a_fork_unknown_to_a_restarted_planner_is_planned_again(fleet: Fleet) -> None:
    """The new request reports the verified chunks."""
    source, module = Model(0.0), Model(1.0)
    image = capture(source)
    chunk_state = ChunkState(image.layout.chunks, [0, 1])
    seed = fleet.source("a", image, chunk_state=chunk_state, manifest=image.manifest())

    def complete_plan() -> Plan:
        for index in range(CHUNKS):
            chunk_state.mark_verified(index)
        return plan(route(seed, ALL))

    planner = scripted_planner(lambda: plan(route(seed, ALL)), complete_plan)
    planner.on_progress = lambda: (
        problem_response(404, "unknown-fork") if has_read_first_plan(planner) else httpx.Response(200, content=ACK)
    )
    report = session(fleet, module, planner).run()
    assert report.seed is not None
    report.seed.close()
    assert torch.equal(source.weight, module.weight)
    assert ((0, 2),) == planner.requests[1].instance.verified


def test_a_suggested_replan_is_requested(fleet: Fleet) -> None:
    """The request lists the current assignments; verified chunks are kept, and nothing is read twice."""
    source, module = Model(0.0), Model(1.0)
    source_image = capture(source)
    manifest = source_image.manifest()
    slow = fleet.source(
        "slow", source_image, chunk_state=ChunkState(source_image.layout.chunks, [0, 1]), manifest=manifest
    )
    fast = fleet.source("fast", source_image, manifest=manifest)
    planner = scripted_planner(lambda: plan(route(slow, ALL)), lambda: plan(route(fast, (2, 5))))
    better = ProgressAck(replan_suggested="a faster source is available").model_dump_json()
    planner.on_progress = lambda: httpx.Response(200, content=better if has_read_first_plan(planner) else ACK)
    report = session(fleet, module, planner).run()
    assert (True, ["fast", "slow"], 0, (ChunkAssignment(source_id="slow", chunks=((2, 5),)),)) == (
        torch.equal(source.weight, module.weight),
        sorted(share.source_id for share in report.sources),
        report.bytes_repeated,
        planner.requests[1].current_assignments,
    )
    assert report.seed is not None
    report.seed.close()


def test_a_module_without_bytes_cannot_be_forked(fleet: Fleet) -> None:
    """There is nothing to fork, so no request is sent."""
    planner = scripted_planner()
    with pytest.raises(UnsupportedTensor):
        session(fleet, nn.Module(), planner).run()
    assert ([], []) == (planner.requests, planner.reports)


def test_on_filled_runs_before_the_target_is_a_seed(fleet: Fleet) -> None:
    """The weights are post-processed while this instance still reports that it is loading."""
    source, module = Model(0.0), Model(1.0)
    seed = fleet.source("a", capture(source))
    planner = scripted_planner(lambda: plan(route(seed, ALL)))
    seen: list[tuple[bool, set[str]]] = []

    def finish() -> None:
        filled = torch.equal(source.weight, module.weight)
        seen.append((filled, {report.state for report in planner.reports}))

    report = session(fleet, module, planner, on_filled=finish).run()
    assert report.seed is not None
    report.seed.close()
    assert [(True, {"loading"})] == seen


def test_a_failing_on_filled_callback_ends_in_the_fallback(fleet: Fleet) -> None:
    """The fallback starts with a clean model, and the report contains the reason."""
    seed = fleet.source("a", capture(Model(0.0)))
    module, planner = Model(1.0), scripted_planner(lambda: plan(route(seed, ALL)))

    def finish() -> None:
        raise EngineMismatch("kernels")

    report = session(fleet, module, planner, TWOS, on_filled=finish).run()
    assert report.seed is not None
    report.seed.close()
    assert ("fallback", "twos") == (report.outcome, report.fallback)
    assert ("EngineMismatch: kernels",) == report.reasons
    assert [2.0] == module.weight.unique().tolist()
