"""Models loaded from a snapshot without a planner, and `fail_if_not_forked`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rfork.engines.hidden_state import HiddenState
from rfork.engines.load_or_fork import ModelIdentity, cap_deadline, load_or_fork
from rfork.engines.served_model import served_model
from rfork.errors import AllSourcesFailed, CheckpointError, SettingsError
from rfork.schema import Rank
from rfork.settings import InstanceSettings
from rfork.storage.module_io.save import save

IDENTITY = ModelIdentity("model", Rank(), facts=("engine toy 1",))
SCALE = 2.5


def made(value: float, scale: float) -> nn.Module:
    """Return a model whose weights all have this value."""
    module = nn.Linear(16, 16)
    vars(module)["scale"] = scale
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


class Toy:
    """An engine that counts the calls of its own loader."""

    def __init__(self) -> None:
        self.loads = 0

    def empty(self) -> nn.Module:
        """Return a model of zeros."""
        return made(0.0, 0.0)

    def load(self) -> nn.Module:
        """Return the checkpoint's weights, which differ from the snapshot's."""
        self.loads += 1
        return made(1.0, 1.0)

    def check(self) -> None:
        """Pass: there is a checkpoint."""
        if self.loads:
            raise CheckpointError("loader already called")


@pytest.fixture
def toy() -> Toy:
    """Return an engine."""
    return Toy()


@pytest.fixture
def snapshot(tmp_path: Path) -> str:
    """Return a snapshot of the same model with other weights."""
    module = made(3.0, SCALE)
    HiddenState(module, IDENTITY.facts, IDENTITY.packages)
    return save(module, tmp_path / "model.safetensors").uri


@pytest.mark.parametrize("required", [False, True])
def test_a_snapshot_needs_no_planner(toy: Toy, snapshot: str, required: bool) -> None:
    """The snapshot is read with its floats, and the engine's own loader is not called."""
    module = load_or_fork(
        toy,
        lambda: IDENTITY,
        InstanceSettings(snapshot=snapshot, fail_if_not_forked=required, transports=("http",)),
    )
    instance = served_model(module)
    if instance is None:
        raise LookupError("there is no instance")
    instance.close(0.0)
    weight = module.get_parameter("weight").unique().tolist()
    assert 0 == toy.loads
    assert [3.0] == weight
    assert SCALE == vars(module)["scale"]


def test_a_missing_snapshot_is_replaced_by_the_engines_loader(toy: Toy, tmp_path: Path) -> None:
    """The engine loads instead, unless a fork is required."""
    missing = f"file://{tmp_path}/none.safetensors"
    with pytest.raises(AllSourcesFailed):
        load_or_fork(
            toy,
            lambda: IDENTITY,
            InstanceSettings(snapshot=missing, fail_if_not_forked=True, transports=("http",)),
        )
    module = load_or_fork(toy, lambda: IDENTITY, InstanceSettings(snapshot=missing, transports=("http",)))
    if (instance := served_model(module)) is not None:
        instance.close(0.0)
    assert 1 == toy.loads
    assert [1.0] == module.get_parameter("weight").unique().tolist()


def test_without_planner_and_snapshot_the_engine_loads(toy: Toy) -> None:
    """The engine loads as without rfork; if a fork is required, this is an error."""
    with pytest.raises(SettingsError, match="neither a planner nor a snapshot"):
        load_or_fork(toy, lambda: IDENTITY, InstanceSettings(fail_if_not_forked=True))
    module = load_or_fork(toy, lambda: IDENTITY, InstanceSettings())
    assert 1 == toy.loads
    assert served_model(module) is None


def test_files_never_have_the_version_of_an_update(toy: Toy, tmp_path: Path) -> None:
    """A server that states it forks, or ends: another rank may have forked that update."""
    version, missing = "update:replica-1:3", f"file://{tmp_path}/none.safetensors"
    with pytest.raises(SettingsError, match="version update:replica-1:3 is that of a running server"):
        load_or_fork(toy, lambda: IDENTITY, InstanceSettings(version=version))
    with pytest.raises(AllSourcesFailed):
        load_or_fork(toy, lambda: IDENTITY, InstanceSettings(version=version, snapshot=missing, transports=("http",)))
    assert 0 == toy.loads


def broken(module: nn.Module) -> None:
    raise RuntimeError("pre-processed weights require another backend")


def test_kernels_are_rebuilt_before_seeding(toy: Toy, snapshot: str) -> None:
    """They read the weights and floats of the snapshot."""
    read: list[tuple[float, float]] = []

    def rebuild(module: nn.Module) -> None:
        read.append((module.get_parameter("weight")[0, 0].item(), vars(module)["scale"]))

    module = load_or_fork(toy, lambda: IDENTITY, InstanceSettings(snapshot=snapshot, transports=("http",)), rebuild)
    if (instance := served_model(module)) is not None:
        instance.close(0.0)
    assert [(3.0, SCALE)] == read


def test_an_instance_that_must_not_seed_gets_its_weights(
    toy: Toy, snapshot: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It serves them to no other instance, and the log names the reason."""
    caplog.set_level("WARNING", logger="rfork")
    settings = InstanceSettings(snapshot=snapshot, transports=("http",))
    module = load_or_fork(toy, lambda: IDENTITY, settings, no_seed_reason="Worker.sleep has no parameter level")
    assert served_model(module) is None
    assert [3.0] == module.get_parameter("weight").unique().tolist()
    assert "Worker.sleep has no parameter level" in caplog.text


def test_the_engine_loads_if_kernels_cannot_be_rebuilt(toy: Toy, snapshot: str) -> None:
    """The engine's own loader is the next fallback, and the start succeeds."""
    module = load_or_fork(toy, lambda: IDENTITY, InstanceSettings(snapshot=snapshot, transports=("http",)), broken)
    instance = served_model(module)
    if instance is None:
        raise LookupError("there is no instance")
    instance.close(0.0)
    assert [1.0] == module.get_parameter("weight").unique().tolist()
    assert "the engine's loader" == instance.report.fallback


def test_required_kernels_that_cannot_be_rebuilt_are_an_error(toy: Toy, snapshot: str) -> None:
    """If the engine must not load, the error contains the reason."""
    chosen = InstanceSettings(snapshot=snapshot, fail_if_not_forked=True, transports=("http",))
    with pytest.raises(AllSourcesFailed, match="failed to rebuild the engine's kernels: RuntimeError: pre-processed"):
        load_or_fork(toy, lambda: IDENTITY, chosen, broken)


def test_the_deadline_leaves_time_to_load(caplog: pytest.LogCaptureFixture) -> None:
    """It is at most half of the engine's timeout, and a reduction is logged; a shorter one is kept."""
    caplog.set_level("INFO", "rfork")
    assert 300.0 == cap_deadline(InstanceSettings(deadline_s=600), 600).deadline_s
    assert 1 == len(caplog.messages)
    assert 200.0 == cap_deadline(InstanceSettings(deadline_s=200), 600).deadline_s
    assert 1 == len(caplog.messages)
