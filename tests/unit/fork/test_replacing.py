"""A loader that builds another model in the place of the first: what is given back, and what is given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rfork.errors import RforkError, SourceChanged, StorageError
from rfork.fork.fallback import Derived, LoaderFailed, engine_fallback
from rfork.fork.keeper import Keeper
from rfork.fork.replacing import Replacing
from rfork.image.board import ChunkBoard
from rfork.image.capture import capture
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings
from rfork.transport.http import HttpTransport


class Model(nn.Module):
    """A weight, and a table that models share."""

    def __init__(self, value: float, table: torch.Tensor, size: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), value), requires_grad=False)
        self.register_buffer("table", table, persistent=False)


class Scene:
    """A model that was to be filled, and its seed."""

    def __init__(self) -> None:
        self.table = torch.arange(4.0)
        self.model = Model(0.0, self.table)
        self.image = capture(self.model)
        board, settings, identity = ChunkBoard(self.image.layout.chunks), Settings(), Identity("model")
        self.seed = Seed(self.image, identity, settings, [HttpTransport(settings)], board=board).start()
        derived = Derived(self.model, self.image)
        keeper = Keeper(None, identity, self.image, board)
        self.replacing = Replacing(self.image, self.seed, keeper, derived, (), lambda: None)

    def load(self, elsewhere: Callable[[], nn.Module]) -> None:
        """Replace the model."""
        try:
            self.replacing.load(engine_fallback(elsewhere, lambda: None))
        finally:
            self.seed.close()


def test_the_first_models_memory_is_gone_before_the_second_is_built() -> None:
    """But for what it computed for itself, as that may be shared: it is put back as it was."""
    scene = Scene()
    scene.table.fill_(-1.0)  # what a transfer that broke off left
    seen: list[object] = []

    def elsewhere() -> nn.Module:
        weight = scene.model.weight.untyped_storage().nbytes()
        seen.extend((weight, scene.table.tolist(), scene.seed.suspended))
        with pytest.raises(SourceChanged):
            scene.image.segments(0, 1)
        return Model(2.0, scene.table)

    scene.load(elsewhere)
    assert [0, [0.0, 1.0, 2.0, 3.0], False] == seen


def test_the_second_is_given() -> None:
    """Under the first one's image, which has its memory from then on."""
    scene = Scene()
    loaded = Model(2.0, scene.table)
    scene.load(lambda: loaded)
    assert (True, True, capture(loaded).manifest().weights_id, True) == (
        scene.replacing.done,
        scene.replacing.gives,
        scene.seed.manifest.weights_id if scene.seed.manifest else None,
        scene.image.same_memory(capture(loaded)),
    )


def test_another_layout_is_served_and_not_given() -> None:
    """The engine has its model; nobody else gets it."""
    scene = Scene()
    scene.load(lambda: Model(2.0, scene.table, size=9))
    assert (True, False, None) == (scene.replacing.done, scene.replacing.gives, scene.seed.manifest)


@pytest.mark.parametrize("error", [OSError("disk"), StorageError("bucket"), KeyError("bug")])
def test_what_a_loader_raises_ends_the_fork(error: Exception) -> None:
    """As it is, though it be of rfork's own kinds: nothing can follow, as the first model is gone."""
    scene = Scene()

    def elsewhere() -> nn.Module:
        raise error

    with pytest.raises(LoaderFailed) as caught:
        scene.load(elsewhere)
    assert (error, False, False) == (
        caught.value.error, isinstance(caught.value, RforkError), scene.replacing.done
    )  # fmt: skip
