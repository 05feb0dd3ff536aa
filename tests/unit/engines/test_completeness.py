"""Memory that building a model took, and what explains it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rfork.engines import completeness
from rfork.engines.bring_up import Subject, bring_up
from rfork.engines.completeness import Completeness, blocks_of, unexplained
from rfork.engines.instance import instance_of
from rfork.errors import UnsupportedTensor
from rfork.settings import Settings
from rfork.wire import Rank

MIB = 1 << 20
OUT_OF_SIGHT: list[torch.Tensor] = []
"""Held by this module, as an engine holds what it shares between models."""
flashinfer_workspace: torch.Tensor | None = None


@pytest.mark.parametrize(
    ("before", "after", "explained", "expected"),
    [
        ({}, {}, [], ()),
        ({}, {0: 100 * MIB}, [(0, 100 * MIB)], ()),
        ({}, {0: 100 * MIB}, [(0, 99 * MIB)], ()),
        ({}, {0: 100 * MIB}, [(0, 98 * MIB)], ((98 * MIB, 100 * MIB),)),
        ({}, {0: 100 * MIB, 200 * MIB: MIB}, [(0, 100 * MIB)], ()),
        ({}, {0: 100 * MIB, 200 * MIB: 2 * MIB}, [(0, 100 * MIB)], ((200 * MIB, 202 * MIB),)),
        ({0: 50 * MIB}, {0: 50 * MIB, 200 * MIB: MIB}, [(0, 50 * MIB)], ((200 * MIB, 201 * MIB),)),
        ({0: 50 * MIB}, {0: 50 * MIB}, [], ()),
        ({0: 50 * MIB}, {}, [(0, 50 * MIB)], ()),
        ({0: MIB}, {0: 2 * MIB}, [], ((0, 2 * MIB),)),
        ({}, {0: 32 << 10}, [], ()),
    ],
    ids=[
        *("nothing", "all of it", "within a hundredth", "more than that", "a block within a hundredth"),
        *(
            "a block of more",
            "what was there before explains nothing",
            "what was there before",
            "less than before",
        ),
        *("another block at the same address", "too small to be weights"),
    ],
)
def test_what_is_unexplained(
    before: dict[int, int],
    after: dict[int, int],
    explained: list[tuple[int, int]],
    expected: tuple[tuple[int, int], ...],
) -> None:
    """Blocks that were added, less what tensors cover, where that is more than a hundredth."""
    assert expected == unexplained(before, after, explained)


def test_blocks_in_use_are_read_from_a_snapshot() -> None:
    """By the bytes that were asked for; freed and pending ones do not count."""
    blocks = [
        {"address": 0, "size": 512, "requested_size": 500, "state": "active_allocated"},
        {"address": 512, "size": 512, "requested_size": 0, "state": "inactive"},
        {"address": 1024, "size": 512, "requested_size": 512, "state": "active_pending_free"},
    ]
    assert {0: 500} == blocks_of([{"blocks": blocks}])


class Layer(nn.Module):
    """A layer of which a part may be somewhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(MIB))


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Tensors of which an allocator that is watched says that it has handed them out."""
    tensors: list[torch.Tensor] = []
    monkeypatch.setattr(
        completeness, "allocations", lambda: {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    )
    return tensors


@pytest.fixture(autouse=True)
def nothing_out_of_sight() -> None:
    """No test sees another one's."""
    OUT_OF_SIGHT.clear()


def test_a_model_whose_memory_is_all_its_tensors_is_complete(allocated: list[torch.Tensor]) -> None:
    """Those that are in objects, and those that an image leaves out, explain memory too."""
    proof = Completeness()
    module = Layer()
    vars(module)["kv_cache"] = torch.ones(MIB)
    allocated += [module.weight, vars(module)["kv_cache"]]
    proof.check(module)


def test_memory_that_no_tensor_of_the_model_has_is_named(allocated: list[torch.Tensor]) -> None:
    """With its bytes, and with the variable that holds it."""
    proof = Completeness()
    module = Layer()
    OUT_OF_SIGHT.append(torch.ones(MIB))
    vars(completeness)["_test_weights"] = OUT_OF_SIGHT[0]
    allocated += [module.weight, OUT_OF_SIGHT[0]]
    try:
        with pytest.raises(
            UnsupportedTensor, match=r"4194304 bytes of device memory.*completeness._test_weights"
        ):
            proof.check(module)
    finally:
        del vars(completeness)["_test_weights"]


def test_scratch_is_excluded_by_the_name_of_its_variable(
    allocated: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workspace that kernels of all layers share is no weight."""
    proof = Completeness()
    module = Layer()
    monkeypatch.setitem(globals(), "flashinfer_workspace", torch.ones(MIB))
    allocated += [module.weight, globals()["flashinfer_workspace"]]
    proof.check(module)


class Engine:
    """One that keeps a part of its weights elsewhere."""

    def __init__(self, allocated: list[torch.Tensor], hides: Callable[[str], bool]) -> None:
        self.made: list[str] = []
        self._allocated = allocated
        self._hides = hides

    def empty(self) -> nn.Module:
        """Without weights."""
        return self._make("empty")

    def load(self) -> nn.Module:
        """With them."""
        return self._make("load")

    def check(self) -> None:
        """There is something to load."""

    def _make(self, which: str) -> nn.Module:
        self.made.append(which)
        module = Layer()
        self._allocated.append(module.weight)
        if self._hides(which):
            OUT_OF_SIGHT.append(torch.ones(MIB))
            self._allocated.append(OUT_OF_SIGHT[-1])
        return module


@pytest.mark.parametrize(
    ("hides", "made", "seeds"),
    [
        ((), ["empty", "load"], True),
        (("empty",), ["empty", "load"], False),
        (("load",), ["empty", "load"], False),
    ],
    ids=["complete", "not when it is built", "not when it is loaded"],
)
def test_an_incomplete_model_serves_and_is_no_seed(
    allocated: list[torch.Tensor], hides: tuple[str, ...], made: list[str], seeds: bool
) -> None:
    """The engine loads its own weights once, and gives them to nobody."""
    engine = Engine(allocated, hides.__contains__)
    settings = Settings(snapshot="file:///none.safetensors", transports=("http",))
    module = bring_up(engine, lambda: Subject("model", Rank()), settings)
    instance = instance_of(module)
    if instance is not None:
        instance.close(0.0)
    assert made == engine.made
    assert seeds == (instance is not None)
