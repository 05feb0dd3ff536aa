"""Memory that building a model took, and what explains it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from rfork.engines import completeness
from rfork.engines.completeness import Completeness, blocks_of, unexplained
from rfork.engines.load_or_fork import ModelIdentity, load_or_fork
from rfork.engines.served_model import served_model
from rfork.errors import UnsupportedTensor
from rfork.schema import Rank
from rfork.settings import InstanceSettings

MIB = 1 << 20
HIDDEN_TENSORS: list[torch.Tensor] = []
"""Held by this module, as an engine holds what it shares between models."""
KERNELS: list[Callable[[], torch.Tensor]] = []
"""Functions that this module has registered."""
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
    monkeypatch.setattr(completeness, "allocations", lambda: {tensor.data_ptr(): tensor.nbytes for tensor in tensors})
    return tensors


@pytest.fixture(autouse=True)
def no_hidden_tensors() -> None:
    """No test sees another one's."""
    HIDDEN_TENSORS.clear()
    KERNELS.clear()


def test_a_model_whose_memory_is_all_its_tensors_is_complete(allocated: list[torch.Tensor]) -> None:
    """Those that are in objects, and those that an image leaves out, explain memory too."""
    completeness_check = Completeness()
    module = Layer()
    vars(module)["kv_cache"] = torch.ones(MIB)
    allocated += [module.weight, vars(module)["kv_cache"]]
    completeness_check.check(module)


def test_memory_that_no_tensor_of_the_model_has_is_named(allocated: list[torch.Tensor]) -> None:
    """With its bytes, and with the variable that holds it."""
    completeness_check = Completeness()
    module = Layer()
    HIDDEN_TENSORS.append(torch.ones(MIB))
    vars(completeness)["_test_weights"] = HIDDEN_TENSORS[0]
    allocated += [module.weight, HIDDEN_TENSORS[0]]
    try:
        with pytest.raises(UnsupportedTensor, match=r"4194304 bytes of memory.*completeness._test_weights"):
            completeness_check.check(module)
    finally:
        del vars(completeness)["_test_weights"]


def test_scratch_is_excluded_by_the_name_of_its_variable(
    allocated: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workspace that kernels of all layers share is no weight."""
    completeness_check = Completeness()
    module = Layer()
    monkeypatch.setitem(globals(), "flashinfer_workspace", torch.ones(MIB))
    allocated += [module.weight, globals()["flashinfer_workspace"]]
    completeness_check.check(module)


class Tied(nn.Module):
    """An embedding and a head with one weight, and a rotary table that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1024, 256)
        self.head = nn.Linear(256, 1024, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.ones(64, 256), persistent=False)


def hide_in_a_closure() -> None:
    """A function that other code has registered holds the tensor."""
    weight = torch.ones(MIB)
    KERNELS.append(lambda: weight)


def hide_in_a_cache() -> None:
    """A list of another module holds it."""
    HIDDEN_TENSORS.append(torch.ones(MIB))


@pytest.mark.parametrize("hide", [hide_in_a_closure, hide_in_a_cache])
def test_a_tensor_on_the_cpu_that_capture_does_not_see_is_refused(hide: Callable[[], None]) -> None:
    """The error gives its bytes."""
    completeness_check = Completeness()
    module = Tied()
    hide()
    with pytest.raises(UnsupportedTensor, match="4194304 bytes of memory"):
        completeness_check.check(module)


def test_what_tied_weights_buffers_and_a_kv_cache_take_on_the_cpu_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache is known by the name of the variable that holds it."""
    completeness_check = Completeness()
    module = Tied()
    monkeypatch.setitem(globals(), "shared_kv_cache", torch.ones(MIB))
    completeness_check.check(module)


def test_garbage_of_the_loader_is_collected_first() -> None:
    """A cycle keeps what the loader has read until then."""
    completeness_check = Completeness()
    module = Tied()
    read: list[object] = [torch.ones(MIB)]
    read.append(read)
    del read
    completeness_check.check(module)


def test_a_tensor_that_is_a_part_of_a_mapped_file_counts_as_that_part(tmp_path: Path) -> None:
    """The rest of the file is no memory of the model."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(16 * MIB))
    completeness_check = Completeness()
    module = Tied()
    mapped_storage = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=16 * MIB)
    module.head.weight = nn.Parameter(torch.empty(0).set_(mapped_storage, 0, (1024, 256)))  # type: ignore[call-overload]
    del mapped_storage
    completeness_check.check(module)


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
            HIDDEN_TENSORS.append(torch.ones(MIB))
            self._allocated.append(HIDDEN_TENSORS[-1])
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
    settings = InstanceSettings(snapshot="file:///none.safetensors", transports=("http",))
    module = load_or_fork(engine, lambda: ModelIdentity("model", Rank()), settings)
    instance = served_model(module)
    if instance is not None:
        instance.close(0.0)
    assert made == engine.made
    assert seeds == (instance is not None)
