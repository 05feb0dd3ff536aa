"""Forks from a source that stalls, into an instance that has the weights on its own disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rfork.errors import AllSourcesFailed
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.receiver import fallback
from rfork.receiver.fallback import Fallback, checkpoint_fallback, snapshot_fallback
from rfork.receiver.own_load import OwnLoad
from rfork.receiver.report import ForkReport
from rfork.source.seed import InstanceIdentity
from rfork.storage.snapshots.writer import write_snapshot
from rfork.testing.transport import FaultInjection
from tests.unit.receiver.fleet import ALL as ALL_CHUNKS
from tests.unit.receiver.fleet import (
    IMAGE_BYTES,
    Files,
    Fleet,
    Script,
    Target,
    content_hash,
    image,
    plan,
    reads,
    route,
    settings,
    verified_by_source,
)
from tests.unit.receiver.sessions import ALL, TARGET, Model, load_twos, scripted_planner, session

VERSION = "v1"
STALLED = FaultInjection(stalls_after_bytes=MIB)


def own_load(files: Files) -> OwnLoad:
    return OwnLoad(files.name, 10 * IMAGE_BYTES, 0.1, reads(files))


def forked(
    fleet: Fleet,
    module: nn.Module,
    *fallbacks: Fallback,
    identity: InstanceIdentity = TARGET,
    served: float = 7.0,
    **changed: float,
) -> ForkReport:
    """Fork a module from a seed that stalls after its first chunk."""
    seed = fleet.source("seed", capture(Model(served)), STALLED)
    planner = scripted_planner(lambda: plan(route(seed, ALL)), lambda: plan(reason="no other instance serves it"))
    report = session(fleet, module, planner, *fallbacks, chosen=settings(**changed), identity=identity).run()
    if report.seed is not None:
        report.seed.close()
    return report


# -- the transfer ---------------------------------------------------------------------------------------


def test_files_complete_a_fork_from_a_source_that_stalls(fleet: Fleet) -> None:
    """Its chunks are kept, and the rest is read from the files."""
    seed, files = fleet.source("seed", image(1), STALLED), Files(image(1))
    target = Target(fleet, Script([lambda: plan(route(seed, ALL_CHUNKS))]), files=[files], own_load=own_load(files))
    target.run()
    assert content_hash(image(1)) == content_hash(target.image)
    assert {"seed": 1, files.name: 5} == verified_by_source(target)


def test_files_with_other_bytes_are_not_mixed_with_the_source(fleet: Fleet) -> None:
    """Each chunk is verified against the manifest of the source, which is not blamed."""
    faults = FaultInjection(stalls_after_bytes=MIB)
    seed, files = fleet.source("seed", image(1), faults), Files(image(2))

    def resume(chunk: int) -> None:
        faults.stalls_after_bytes = None

    files.before_read = resume
    script = Script([lambda: plan(route(seed, ALL_CHUNKS))])
    target = Target(fleet, script, settings(source_idle_timeout_s=3.0), files=[files], own_load=own_load(files))
    target.run()
    assert content_hash(image(1)) == content_hash(target.image)
    assert "SourceCorrupt" not in [error for _, _, error in script.faults]
    assert "StorageError" in target.reasons


def test_chunks_of_the_files_are_served_onwards(fleet: Fleet) -> None:
    """Each of them is verified."""
    seed, files = fleet.source("seed", image(1), STALLED), Files(image(1))
    target = Target(fleet, Script([lambda: plan(route(seed, ALL_CHUNKS))]), files=[files], own_load=own_load(files))
    target.run()
    assert (ALL_CHUNKS,) == target.chunk_state.verified


# -- complete forks -------------------------------------------------------------------------------------


def test_a_checkpoint_is_read_besides_the_source(fleet: Fleet, checkpoint: Path) -> None:
    """The report has the bytes of both, and the reason."""
    module = Model(1.0)
    report = forked(fleet, module, checkpoint_fallback(checkpoint))
    assert "forked" == report.outcome
    assert torch.equal(Model(7.0).weight, module.weight)
    assert MIB == report.peer_bytes
    assert report.image_bytes == report.peer_bytes + report.storage_bytes
    assert any(reason.startswith("SlowSources: own storage is read too") for reason in report.reasons)
    assert "GB from peers" in report.line()


def test_a_snapshot_is_read_besides_the_source(fleet: Fleet, tmp_path: Path) -> None:
    """It names its weights itself."""
    stored, module, path = capture(Model(7.0)), Model(1.0), tmp_path / "model.safetensors"
    write_snapshot(stored, stored.manifest(), path)
    report = forked(fleet, module, snapshot_fallback(path))
    assert "forked" == report.outcome
    assert torch.equal(Model(7.0).weight, module.weight)
    assert report.storage_bytes > 0


def test_the_version_stays_that_of_the_source(fleet: Fleet, checkpoint: Path) -> None:
    """Its manifest verified every chunk: the version is not derived from what was read from the files."""
    report = forked(fleet, Model(1.0), checkpoint_fallback(checkpoint))
    assert report.version is None


def test_a_fork_is_abandoned_for_a_loader_of_the_same_version(fleet: Fleet, checkpoint: Path) -> None:
    """The loader fills the complete module."""
    module = Model(1.0)
    loader = Fallback("twos", load_twos, path=lambda: checkpoint)
    report = forked(fleet, module, loader, identity=InstanceIdentity("model", instance_id="target", version=VERSION))
    assert "twos" == report.fallback
    assert bool((module.weight == 2.0).all())
    assert any(reason.startswith("SlowSources: the fork was abandoned") for reason in report.reasons)


def test_a_fork_is_not_abandoned_for_a_loader_of_an_unknown_version(fleet: Fleet, checkpoint: Path) -> None:
    """It could load other weights than the fleet serves."""
    loader = Fallback("twos", load_twos, path=lambda: checkpoint)
    report = forked(fleet, Model(1.0), loader, source_idle_timeout_s=2.0, no_source_timeout_s=0.0)
    assert not any("SlowSources" in reason for reason in report.reasons)


def test_the_race_can_be_turned_off(fleet: Fleet, checkpoint: Path) -> None:
    """Own storage is then read only once the fork has failed."""
    report = forked(
        fleet,
        Model(1.0),
        checkpoint_fallback(checkpoint),
        source_idle_timeout_s=2.0,
        no_source_timeout_s=0.0,
        race_storage=False,
    )
    assert not any("SlowSources" in reason for reason in report.reasons)


def test_storage_that_hangs_while_it_is_measured_is_abandoned(
    fleet: Fleet, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork then depends on its sources alone."""
    monkeypatch.setattr(fallback, "SAMPLE_TIMEOUT_S", 0.0)
    with pytest.raises(AllSourcesFailed):
        forked(
            fleet,
            Model(1.0),
            Fallback("nothing", load_nothing, path=lambda: checkpoint),
            source_idle_timeout_s=2.0,
            no_source_timeout_s=0.0,
        )


def load_nothing(module: nn.Module) -> None:
    raise ValueError("nothing to load")
