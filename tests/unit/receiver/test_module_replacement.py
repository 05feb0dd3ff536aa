"""Loaders that replace the model: which memory is released, and which image is served."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from rfork.errors import AllSourcesFailed, RforkError, SourceUnavailable, SourceWeightsChanged, StorageError
from rfork.image.capture import capture
from rfork.image.chunks import ChunkState
from rfork.receiver.clean_module import DerivedTensors, TargetModule
from rfork.receiver.fallback import (
    Fallback,
    FallbackRunner,
    LoaderError,
    ModuleReleased,
    engine_fallback,
    layouts_fallback,
    loader_fallback,
)
from rfork.receiver.spool import ChunkPersister
from rfork.schema import StorageAssignment
from rfork.settings import InstanceSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.tracing import NOOP_TRACER
from rfork.transport.http import HttpTransport


class Model(nn.Module):
    """A weight, and a table that models share."""

    def __init__(self, value: float, table: torch.Tensor, size: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), value), requires_grad=False)
        self.register_buffer("table", table, persistent=False)


class ReplacementHarness:
    """A model to be filled, and its seed."""

    def __init__(self, fallbacks: Sequence[Fallback] = ()) -> None:
        self.table = torch.arange(4.0)
        self.model = Model(0.0, self.table)
        self.image = capture(self.model)
        chunk_state, settings, identity = (
            ChunkState(self.image.layout.chunks),
            InstanceSettings(),
            InstanceIdentity("model"),
        )
        self.seed = Seed(
            self.image, identity, settings, Connections([HttpTransport(settings)]), chunk_state=chunk_state
        ).start()
        derived = DerivedTensors(self.model, self.image)
        persister = ChunkPersister(None, identity, self.image, chunk_state)
        target = TargetModule(self.model, self.image, (), derived)
        self.fallbacks = FallbackRunner(target, self.seed, persister, fallbacks, None, NOOP_TRACER)

    def load(self, build_replacement: Callable[[], nn.Module]) -> None:
        """Replace the model."""
        try:
            self.fallbacks.load(engine_fallback(build_replacement, lambda: None))
        finally:
            self.seed.close()


def test_the_first_models_memory_is_released_before_the_second_is_built() -> None:
    """Tensors that the model computed itself may be shared, so they are restored and kept."""
    harness = ReplacementHarness()
    harness.table.fill_(-1.0)  # left by an interrupted transfer
    seen: list[object] = []

    def build_replacement() -> nn.Module:
        weight = harness.model.weight.untyped_storage().nbytes()
        seen.extend((weight, harness.table.tolist(), harness.seed.suspended))
        with pytest.raises(SourceWeightsChanged):
            harness.image.segments(0, 1)
        return Model(2.0, harness.table)

    harness.load(build_replacement)
    assert [0, [0.0, 1.0, 2.0, 3.0], False] == seen


def test_the_replacement_model_is_served() -> None:
    """The first image uses the memory of the new model from then on."""
    harness = ReplacementHarness()
    loaded = Model(2.0, harness.table)
    harness.load(lambda: loaded)
    assert harness.fallbacks.replaced
    assert harness.fallbacks.serves_replacement
    assert capture(loaded).manifest().weights_id == (
        harness.seed.manifest.weights_id if harness.seed.manifest else None
    )
    assert harness.image.shares_memory_with(capture(loaded))


def test_a_replacement_with_another_layout_is_not_served_to_peers() -> None:
    """The engine uses its model, but no other instance can read it."""
    harness = ReplacementHarness()
    harness.load(lambda: Model(2.0, harness.table, size=9))
    assert harness.fallbacks.replaced
    assert not harness.fallbacks.serves_replacement
    assert harness.seed.manifest is None


@pytest.mark.parametrize("error", [OSError("disk"), StorageError("bucket"), KeyError("bug")])
def test_an_exception_of_a_replacing_loader_ends_the_fork(error: Exception) -> None:
    """The exception is raised unchanged, even an rfork error: no fallback can follow without the first model."""
    harness = ReplacementHarness()

    def build_replacement() -> nn.Module:
        raise error

    with pytest.raises(LoaderError) as caught:
        harness.load(build_replacement)
    assert error == caught.value.error
    assert not isinstance(caught.value, RforkError)
    assert not harness.fallbacks.replaced


def lost_layouts() -> Fallback:
    """Return a loader that loses its sources while it builds its model."""

    def lose_sources() -> nn.Module:
        raise SourceUnavailable("killed")

    return layouts_fallback(lambda: None, lose_sources, lambda: "v1", lambda: None, lambda: None)


def test_a_loader_that_loses_its_sources_is_replaced() -> None:
    """The next fallback builds its own model; it is served as if it were the first one that was tried."""
    harness = ReplacementHarness()
    loaded = Model(2.0, harness.table)

    with pytest.raises(SourceUnavailable):
        harness.fallbacks.load(lost_layouts())
    harness.load(lambda: loaded)
    assert harness.fallbacks.serves_replacement
    assert harness.image.shares_memory_with(capture(loaded))


def test_only_loaders_with_a_model_of_their_own_follow_one_that_released_the_memory() -> None:
    """One that fills the first model would write to memory that no longer exists."""
    filled: list[nn.Module] = []
    in_place, engine = loader_fallback(filled.append), engine_fallback(lambda: Model(2.0, harness.table), lambda: None)
    harness = ReplacementHarness((lost_layouts(), in_place, engine))
    assert harness.fallbacks.run() is engine
    harness.seed.close()
    assert [] == filled


def test_nothing_follows_a_loader_that_released_the_memory_if_all_others_need_it() -> None:
    """The error names the sources that were lost, once."""
    harness = ReplacementHarness((lost_layouts(), loader_fallback(lambda _: None)))
    with pytest.raises(AllSourcesFailed) as caught:
        harness.fallbacks.run()
    harness.seed.close()
    assert ["killed"] == [str(reason) for reason in caught.value.reasons]


def test_a_transfer_ends_once_its_memory_was_released() -> None:
    """A source that it read from afterwards would be blamed."""
    layouts = lost_layouts()
    harness = ReplacementHarness((layouts,))
    harness.fallbacks.open()
    with pytest.raises(ModuleReleased) as caught:
        harness.fallbacks.run_loader(StorageAssignment(kind="loader", uri=layouts.uri, chunks=()))
    harness.seed.close()
    assert isinstance(caught.value.error, SourceUnavailable)


def test_a_bug_of_a_loader_that_reads_instances_ends_the_fork() -> None:
    """Only the failures of sources are expected."""
    harness = ReplacementHarness()

    def fail() -> nn.Module:
        raise KeyError("bug")

    with pytest.raises(LoaderError):
        harness.fallbacks.load(layouts_fallback(lambda: None, fail, lambda: "v1", lambda: None, lambda: None))
    harness.seed.close()
