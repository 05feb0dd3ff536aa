"""A module's memory is free as soon as its owner drops it: rfork leaves no reference cycle that contains it.

The garbage collector does not run in these tests: in a server with millions of objects it rarely does, and a second
model may not fit into the memory.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rfork
from planner.server import run_in_thread
from rfork.errors import AllSourcesFailed
from rfork.settings import InstanceSettings, PlannerSettings, TransportName

UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def planner() -> Iterator[str]:
    """The URL of a planner without waiting times."""
    with run_in_thread(PlannerSettings(port=0, batch_window_s=0, scaleup_wait_s=0)) as url:
        yield url


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """Disables the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def build(value: float = 0.0) -> nn.Module:
    """Return a small module whose parameters have this value."""
    module = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


Memory = weakref.ref[Any]
"""Reference to the memory of a tensor: it returns None once that is free, whatever refers to the tensor."""


def own_memory(module: nn.Module) -> Memory:
    """Let the first parameter of a module use memory whose end can be observed."""
    parameter = next(module.parameters())
    memory = parameter.detach().numpy().copy()
    parameter.data = torch.from_numpy(memory)
    return weakref.ref(memory)


def settings(planner: str | None, host: str = "target", transport: TransportName = "http") -> InstanceSettings:
    """Return the settings of an instance on a host of this name."""
    return InstanceSettings(planner=planner, node_name=host, transports=(transport,), no_source_timeout_s=0.2)


def fork(planner: str | None, model: str, **options: object) -> Memory:
    """Fork into a new module, close its seed and drop it; returns a reference to its memory."""
    module = build()
    memory = own_memory(module)
    report = rfork.fork(module, model=model, settings=settings(planner), **options)  # type: ignore[arg-type]
    assert report.seed is not None
    report.seed.close()
    return memory


def fork_that_fails(planner: str, **options: object) -> Memory:
    """Fork without any source, and drop the module."""
    module = build()
    memory = own_memory(module)
    with pytest.raises(AllSourcesFailed):
        rfork.fork(module, model="unknown", settings=settings(planner), **options)  # type: ignore[arg-type]
    return memory


def checkpoint(folder: Path) -> Path:
    """Write a checkpoint of the module."""
    save_file(build(2.0).state_dict(), folder / "model.safetensors")
    return folder


def raising(_: nn.Module) -> None:
    """Loader that fails."""
    raise KeyError("weight")


@pytest.mark.parametrize("transport", ["http", "shared_memory"])
def test_memory_of_a_source_and_of_its_target_is_released(planner: str, transport: TransportName) -> None:
    """Both modules are free after their seeds are closed."""
    source, target = build(1.0), build()
    memory = [own_memory(module) for module in (source, target)]
    with rfork.seed(source, model="m", settings=settings(planner, "source", transport)) as seed:
        assert seed.wait_registered(30)
        report = rfork.fork(target, model="m", settings=settings(planner, "source", transport))
    assert "forked" == report.outcome
    assert report.seed is not None
    report.seed.close()
    del source, target, seed, report
    assert [None, None] == [each() for each in memory]


def test_memory_of_a_replaced_tensor_is_released(planner: str) -> None:
    """A seed that serves new tensors does not keep the old ones."""
    module = build(1.0)
    memory = own_memory(module)
    with rfork.seed(module, model="m", settings=settings(planner)) as seed:
        assert seed.wait_registered(30)
        with seed.updating():
            module.load_state_dict(build(2.0).state_dict(), assign=True)
        assert memory() is None


def test_memory_of_a_fork_that_read_its_checkpoint_is_released(planner: str, tmp_path: Path) -> None:
    """The planner elected it to read the checkpoint, did not respond, or was not set."""
    folder = checkpoint(tmp_path)
    found = {url: fork(url, "m", checkpoint=folder)() for url in (planner, UNREACHABLE, None)}
    assert {planner: None, UNREACHABLE: None, None: None} == found


def test_memory_of_a_fork_that_failed_is_released(planner: str) -> None:
    """No instance has the model, and its loader fails if it has one."""
    failed = [fork_that_fails(planner), fork_that_fails(planner, loader=raising)]
    assert [None, None] == [each() for each in failed]
