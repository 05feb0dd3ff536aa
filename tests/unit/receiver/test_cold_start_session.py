"""Complete cold starts: what is read, and what other instances receive meanwhile."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from rfork.errors import AllSourcesFailed, SourceTimeout
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.image.layout import Manifest
from rfork.peer.servicer import PeerBackend
from rfork.receiver.fallback import checkpoint_fallback, loader_fallback, snapshot_fallback
from rfork.receiver.planner_requests import LAYOUT_DIFF_TIMEOUT_S
from rfork.receiver.report import ForkReport
from rfork.schema import Plan
from rfork.settings import InstanceSettings
from rfork.source.seed import InstanceIdentity, Seed
from rfork.storage.snapshots.writer import write_snapshot
from rfork.testing.peers import InMemoryPeer, InMemoryPeerServer
from rfork.testing.transport import FaultInjection
from tests.unit.receiver.cold_start_sessions import NO_SOURCE_PLAN, run_fork, scripted_planner, storage_plan
from tests.unit.receiver.fake_planner import FakePlanner
from tests.unit.receiver.fleet import NEVER_S, Fleet, Script, image, plan, route
from tests.unit.receiver.sessions import ALL, CHUNKS, TWOS, Model, load_twos, session


def test_the_elected_instance_reads_its_checkpoint(fleet: Fleet, checkpoint: Path) -> None:
    """It reads chunk by chunk, keeps what the model computes itself, and reports the bytes to the planner."""
    planner, module = scripted_planner(storage_plan("checkpoint", checkpoint.as_uri())), Model(1.0)
    report = run_fork(fleet, module, planner, [checkpoint_fallback(checkpoint)])
    name = f"checkpoint:{checkpoint.as_uri()}"
    assert torch.equal(Model(7.0).weight, module.weight)
    assert list(range(8)) == module.get_buffer("table").tolist()
    assert "forked" == report.outcome
    assert report.fallback is None
    assert report.image_bytes == report.storage_bytes
    assert capture(module).manifest().weights_id == report.weights_id
    assert CHUNKS == report.chunks_verified
    assert [("forked", {name: report.image_bytes})] == [
        (finish.outcome, finish.sources) for _, finish in planner.finishes
    ]
    assert f"from {name}" in report.line()


def test_the_elected_instance_runs_its_loader(fleet: Fleet) -> None:
    """The loaded weights are digested and served; they count as read from storage, not as a fallback."""
    planner, module = scripted_planner(storage_plan("loader")), Model(1.0)
    report = run_fork(fleet, module, planner, [loader_fallback(load_twos)])
    assert "forked" == report.outcome
    assert report.fallback is None
    assert report.image_bytes == report.storage_bytes
    assert {"loader:": report.image_bytes} == planner.finishes[0][1].sources
    assert (module.weight == 2.0).all()
    assert capture(module).manifest().weights_id == report.weights_id


def test_a_loader_that_fails_falls_back(fleet: Fleet, checkpoint: Path) -> None:
    """The failure is reported to the planner; if it knows no other source, the remaining fallbacks are tried."""

    def broken(module: nn.Module) -> None:
        raise ZeroDivisionError("a bug")

    planner, module = scripted_planner(storage_plan("loader"), plan(reason="no other source")), Model(1.0)
    report = run_fork(fleet, module, planner, [loader_fallback(broken), checkpoint_fallback(checkpoint)])
    assert "fallback" == report.outcome
    assert f"checkpoint {checkpoint}" == report.fallback
    assert torch.equal(Model(7.0).weight, module.weight)
    assert [("target", "storage", "UserError")] == planner.script.faults


def test_a_loader_that_rebinds_tensors_makes_no_seed(fleet: Fleet) -> None:
    """The module is loaded, and waiting readers learn that this instance serves nothing."""

    def rebind(module: nn.Module) -> None:
        module.load_state_dict(Model(2.0).state_dict(), assign=True)

    planner, module = scripted_planner(storage_plan("loader")), Model(1.0)
    report = run_fork(fleet, module, planner, [loader_fallback(rebind)])
    assert report.seed is not None
    assert "fallback" == report.outcome
    assert "loader" == report.fallback
    assert 1 == report.seed.generation
    assert report.seed.manifest is None
    assert torch.equal(Model(2.0).weight, module.weight)


def test_a_snapshot_can_be_a_fallback(fleet: Fleet, tmp_path: Path) -> None:
    """Without a source and without an election it is read completely and every chunk is verified."""
    snapshot_image, path = capture(Model(7.0)), tmp_path / "snapshot.safetensors"
    write_snapshot(snapshot_image, snapshot_image.manifest(), path)
    planner, module = scripted_planner(plan(reason="no source")), Model(1.0)
    report = run_fork(fleet, module, planner, [snapshot_fallback(path.as_uri())])
    assert f"snapshot {path.as_uri()}" == report.fallback
    assert snapshot_image.manifest().weights_id == report.weights_id


def test_a_corrupt_snapshot_is_rejected(fleet: Fleet, tmp_path: Path) -> None:
    """A chunk that does not match its digest fails the snapshot, and the next fallback is tried."""
    snapshot_image, path = capture(Model(7.0)), tmp_path / "snapshot.safetensors"
    write_snapshot(snapshot_image, snapshot_image.manifest(), path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    planner, module = scripted_planner(plan(reason="no source")), Model(1.0)
    fallbacks = [snapshot_fallback(path.as_uri()), loader_fallback(load_twos)]
    report = run_fork(fleet, module, planner, fallbacks)
    assert "loader" == report.fallback
    assert (module.weight == 2.0).all()


def test_the_bytes_of_a_fallback_are_reported(fleet: Fleet, checkpoint: Path) -> None:
    """The complete image counts under the name of its files, in the report and at the planner."""
    planner = scripted_planner(NO_SOURCE_PLAN)
    report = run_fork(fleet, Model(1.0), planner, [checkpoint_fallback(checkpoint)], no_source_timeout_s=0.0)
    sources = {f"checkpoint:{checkpoint.as_uri()}": report.image_bytes}
    assert "fallback" == report.outcome
    assert report.image_bytes == report.storage_bytes
    assert sources == planner.finishes[0][1].sources


def test_bytes_read_before_a_fallback_are_reported(fleet: Fleet, checkpoint: Path) -> None:
    """Chunks of a source that died stay in the report along with the fallback's bytes."""
    seed = fleet.source("seed", capture(Model(7.0)), FaultInjection(dies_after_bytes=2 * MIB))
    planner = scripted_planner(plan(route(seed, ALL)), NO_SOURCE_PLAN)
    report = run_fork(
        fleet, Model(1.0), planner, [checkpoint_fallback(checkpoint)], no_source_timeout_s=0.0, max_inflight_chunks=1
    )
    assert [("checkpoint", report.image_bytes), ("seed", 2 * MIB)] == [
        (share.source_id.partition(":")[0], share.verified_bytes) for share in report.sources
    ]


def test_the_bytes_of_a_failed_fork_are_reported(fleet: Fleet) -> None:
    """A fork that ends without its weights still reports what each source served."""
    seed = fleet.source("seed", capture(Model(7.0)), FaultInjection(dies_after_bytes=2 * MIB))
    planner = scripted_planner(plan(route(seed, ALL)), NO_SOURCE_PLAN)
    with pytest.raises(AllSourcesFailed):
        run_fork(fleet, Model(1.0), planner, [], no_source_timeout_s=0.0, max_inflight_chunks=1)
    assert [("failed", {"seed": 2 * MIB}, 2 * MIB)] == [
        (finish.outcome, finish.sources, finish.bytes_read) for _, finish in planner.finishes
    ]


def test_several_elected_instances_load_independently(fleet: Fleet) -> None:
    """Each loads its own weights, serves no reader and waits for no other instance."""
    planners = [scripted_planner(storage_plan("loader")) for _ in range(3)]
    modules = [Model(1.0) for _ in planners]
    with ThreadPoolExecutor(len(planners)) as pool:
        reports = list(
            pool.map(
                lambda module, planner: run_fork(fleet, module, planner, [loader_fallback(load_twos)]),
                modules,
                planners,
            )
        )
    assert [("forked", reports[0].image_bytes, True)] * 3 == [
        (report.outcome, report.storage_bytes, bool((module.weight == 2.0).all()))
        for report, module in zip(reports, modules, strict=True)
    ]


def test_a_reader_of_a_loader_that_makes_no_seed_replans_immediately(fleet: Fleet) -> None:
    """The planner receives the result first, then the readers learn that this source serves nothing."""
    waiting = threading.Event()

    def rebind(module: nn.Module) -> None:
        waiting.wait(NEVER_S)
        module.load_state_dict(Model(2.0).state_dict(), assign=True)

    hosts: list[Seed] = []
    started = threading.Event()

    def serve(host: PeerBackend, chosen: InstanceSettings) -> InMemoryPeerServer:
        assert isinstance(host, Seed)
        hosts.append(host)
        started.set()
        return fleet.peers.service(host, chosen)

    leader = scripted_planner(storage_plan("loader"))
    leader_session = session(
        fleet,
        Model(1.0),
        leader,
        loader_fallback(rebind),
        identity=InstanceIdentity("model", instance_id="leader"),
        serve_peer=serve,
    )
    ended_before: list[bool] = []
    reports: list[ForkReport] = []
    running = threading.Thread(target=lambda: reports.append(leader_session.run()))
    running.start()
    started.wait(NEVER_S)

    def follower_plan() -> Plan:
        hosts[0].wait_registered(NEVER_S)  # from here on it has the key that signs its leases
        first = plan(route(hosts[0], ALL))
        waiting.set()  # only now, because the lease names the weights before the loader ends
        return first

    def loader_plan() -> Plan:
        ended_before.append(bool(leader.finishes))
        return storage_plan("loader")

    follower = FakePlanner(Script([follower_plan, loader_plan]))
    report = run_fork(fleet, Model(1.0), follower, [loader_fallback(load_twos)])
    running.join()
    assert reports[0].seed is not None
    reports[0].seed.close()
    assert "forked" == report.outcome
    assert [True] == ended_before
    assert ["SourceWeightsChanged"] == [error for _, _, error in follower.script.faults]


@pytest.mark.parametrize(("is_elected", "outcome"), [(True, "forked"), (False, "fallback")])
def test_a_target_waits_briefly_for_a_layout_diff(
    fleet: Fleet, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, is_elected: bool, outcome: str
) -> None:
    """A silent peer with another layout delays its own load, elected or not, by the layout diff timeout at most."""
    timeouts: list[float] = []

    class UnresponsivePeer(InMemoryPeer):
        def full_manifest(self, deadline: float) -> Manifest:
            timeouts.append(deadline - time.monotonic())
            raise SourceTimeout("no response")

    seed = fleet.source("seed", capture(nn.Linear(600, 600)))
    monkeypatch.setattr(fleet.peers, "dial", lambda address, token: UnresponsivePeer(fleet.peers, address, token))
    chosen = storage_plan("checkpoint", checkpoint.as_uri()) if is_elected else plan(reason="no seed fits")
    planner = scripted_planner(NO_SOURCE_PLAN, chosen.model_copy(update={"mismatched_source": route(seed)}))
    report = run_fork(fleet, Model(1.0), planner, [checkpoint_fallback(checkpoint)])
    assert outcome == report.outcome
    assert [True] == [seconds <= LAYOUT_DIFF_TIMEOUT_S for seconds in timeouts]


def test_the_report_contains_the_planners_reason(fleet: Fleet) -> None:
    """Nothing failed, so the planner's reason is the only one."""
    quarantined = plan(reason="its only seed is quarantined")
    planner = scripted_planner(quarantined, storage_plan("loader"))
    report = run_fork(fleet, Model(1.0), planner, [TWOS])
    assert ["NoSource"] == [reason.partition(":")[0] for reason in report.reasons]
    assert "its only seed is quarantined" in report.reasons[0]
    assert f"reason: {report.reasons[0]}" in report.line()
    assert report.reasons == planner.finishes[0][1].reasons


def test_a_plan_that_changes_to_storage_reports_its_reason(fleet: Fleet) -> None:
    """The reason is reported even if an earlier plan had routes."""
    seed = fleet.source("closed", image(1))
    closed_source_plan = plan(route(seed, ALL))
    seed.close()
    planner = scripted_planner(closed_source_plan, plan(reason="no seed is left"), storage_plan("loader"))
    report = run_fork(fleet, Model(1.0), planner, [TWOS])
    assert any("no seed is left" in reason for reason in report.reasons)
