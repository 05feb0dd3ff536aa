"""A model brought up from a snapshot alone, without a planner; and what is required without either."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rfork.engines.hidden_state import HiddenState
from rfork.engines.load_or_fork import ModelIdentity, load_or_fork
from rfork.engines.served_model import served_model
from rfork.errors import AllSourcesFailed, CheckpointError, SettingsError
from rfork.schema import Rank
from rfork.settings import InstanceSettings
from rfork.storage.module_io.save import save

IDENTITY = ModelIdentity("model", Rank(), facts=("engine toy 1",))
SCALE = 2.5


def made(value: float, scale: float) -> nn.Module:
    """A model all of whose weights are this value."""
    module = nn.Linear(16, 16)
    vars(module)["scale"] = scale
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


class Toy:
    """An engine that counts what its own loader is asked for."""

    def __init__(self) -> None:
        self.loads = 0

    def empty(self) -> nn.Module:
        """Zeros."""
        return made(0.0, 0.0)

    def load(self) -> nn.Module:
        """The checkpoint's weights, which are not the snapshot's."""
        self.loads += 1
        return made(1.0, 1.0)

    def check(self) -> None:
        """There is one."""
        if self.loads:
            raise CheckpointError("it was read before")


@pytest.fixture
def toy() -> Toy:
    """An engine."""
    return Toy()


@pytest.fixture
def snapshot(tmp_path: Path) -> str:
    """One of a model as the toy's, with other weights."""
    module = made(3.0, SCALE)
    HiddenState(module, IDENTITY.facts, IDENTITY.packages)
    return save(module, tmp_path / "model.safetensors").uri


@pytest.mark.parametrize("required", [False, True])
def test_a_snapshot_needs_no_planner(toy: Toy, snapshot: str, required: bool) -> None:
    """It is read, with the numbers in it, and the engine's own loader is not run."""
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
    assert (0, [3.0], SCALE) == (toy.loads, weight, vars(module)["scale"])


def test_a_snapshot_that_is_not_there(toy: Toy, tmp_path: Path) -> None:
    """The engine loads instead; where a fork is required, it does not."""
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
    assert (1, [1.0]) == (toy.loads, module.get_parameter("weight").unique().tolist())


def test_nothing_to_have_it_from(toy: Toy) -> None:
    """With neither the engine loads as without rfork; where that is not allowed, it is said."""
    with pytest.raises(SettingsError, match="neither a planner nor a snapshot"):
        load_or_fork(toy, lambda: IDENTITY, InstanceSettings(fail_if_not_forked=True))
    module = load_or_fork(toy, lambda: IDENTITY, InstanceSettings())
    assert (1, None) == (toy.loads, served_model(module))


def broken(module: nn.Module) -> None:
    raise RuntimeError("pre-processed weights require another backend")


def test_kernels_are_rebuilt_before_it_is_a_seed(toy: Toy, snapshot: str) -> None:
    """They read the weights, and the numbers of the modules, that the snapshot holds."""
    read: list[tuple[float, float]] = []

    def rebuild(module: nn.Module) -> None:
        read.append((module.get_parameter("weight")[0, 0].item(), vars(module)["scale"]))

    module = load_or_fork(toy, lambda: IDENTITY, InstanceSettings(snapshot=snapshot, transports=("http",)), rebuild)
    if (instance := served_model(module)) is not None:
        instance.close(0.0)
    assert [(3.0, SCALE)] == read


def test_kernels_that_cannot_be_rebuilt_are_loaded(toy: Toy, snapshot: str) -> None:
    """The engine's own loader comes next, and the start does not fail."""
    module = load_or_fork(toy, lambda: IDENTITY, InstanceSettings(snapshot=snapshot, transports=("http",)), broken)
    instance = served_model(module)
    if instance is None:
        raise LookupError("there is no instance")
    instance.close(0.0)
    assert [1.0] == module.get_parameter("weight").unique().tolist()
    assert "the engine's loader" == instance.report.fallback


def test_required_kernels_that_cannot_be_rebuilt_are_an_error(toy: Toy, snapshot: str) -> None:
    """Where the engine must not load by itself, the error says why."""
    chosen = InstanceSettings(snapshot=snapshot, fail_if_not_forked=True, transports=("http",))
    with pytest.raises(AllSourcesFailed, match="kernels could not be rebuilt: RuntimeError: pre-processed"):
        load_or_fork(toy, lambda: IDENTITY, chosen, broken)
