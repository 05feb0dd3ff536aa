"""Completeness: memory allocated while a model is built, and what explains it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
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
"""Referenced by this module, like the state that an engine shares between models."""
KERNELS: list[Callable[[], torch.Tensor]] = []
"""Functions registered with this module."""
flashinfer_workspace: torch.Tensor | None = None


@pytest.fixture
def modules_tracked() -> Iterator[None]:
    """Let the garbage collector find variables of modules, which `tests/conftest.py` exempts from it."""
    gc.unfreeze()
    yield
    gc.freeze()


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
        *(
            "nothing",
            "all of it",
            "within one percent",
            "more than one percent",
            "an unexplained block within one percent",
        ),
        *(
            "an unexplained block above one percent",
            "a block from before the build",
            "an unchanged block",
            "less memory than before",
        ),
        *("a block of another size at the same address", "too small to be weights"),
    ],
)
def test_unexplained_blocks_are_reported_above_the_tolerance(
    before: dict[int, int],
    after: dict[int, int],
    explained: list[tuple[int, int]],
    expected: tuple[tuple[int, int], ...],
) -> None:
    """Added blocks without the bytes that tensors cover are reported if they exceed one percent."""
    assert expected == unexplained(before, after, explained)


def test_active_blocks_are_read_from_a_snapshot() -> None:
    """Blocks count with their requested sizes; freed and pending blocks do not count."""
    blocks = [
        {"address": 0, "size": 512, "requested_size": 500, "state": "active_allocated"},
        {"address": 512, "size": 512, "requested_size": 0, "state": "inactive"},
        {"address": 1024, "size": 512, "requested_size": 512, "state": "active_pending_free"},
    ]
    assert {0: 500} == blocks_of([{"blocks": blocks}])


class Layer(nn.Module):
    """A layer that may keep a part of its weights elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(MIB))


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Tensors reported as allocated by a fake allocator."""
    tensors: list[torch.Tensor] = []
    monkeypatch.setattr(completeness, "allocations", lambda _: {tensor.data_ptr(): tensor.nbytes for tensor in tensors})
    return tensors


@pytest.fixture(autouse=True)
def no_hidden_tensors() -> None:
    """Isolate each test from the tensors of the others."""
    HIDDEN_TENSORS.clear()
    KERNELS.clear()


def test_a_model_whose_memory_is_explained_by_its_tensors_is_complete(allocated: list[torch.Tensor]) -> None:
    """Tensors in objects and tensors excluded from the image explain memory too."""
    completeness_check = Completeness()
    module = Layer()
    vars(module)["kv_cache"] = torch.ones(MIB)
    allocated += [module.weight, vars(module)["kv_cache"]]
    completeness_check.check(module)


@pytest.mark.usefixtures("modules_tracked")
def test_unexplained_memory_is_named(allocated: list[torch.Tensor]) -> None:
    """The error names its size and the variable that refers to it."""
    completeness_check = Completeness()
    module = Layer()
    HIDDEN_TENSORS.append(torch.ones(MIB))
    vars(completeness)["_test_weights"] = HIDDEN_TENSORS[0]
    allocated += [module.weight, HIDDEN_TENSORS[0]]
    try:
        with pytest.raises(UnsupportedTensor, match=r"4194304 bytes \(one block\).*completeness._test_weights"):
            completeness_check.check(module)
    finally:
        del vars(completeness)["_test_weights"]


@pytest.mark.usefixtures("modules_tracked")
def test_scratch_is_excluded_by_its_variable_name(
    allocated: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workspace shared by the kernels of all layers is not a weight."""
    completeness_check = Completeness()
    module = Layer()
    monkeypatch.setitem(globals(), "flashinfer_workspace", torch.ones(MIB))
    allocated += [module.weight, globals()["flashinfer_workspace"]]
    completeness_check.check(module)


class Tied(nn.Module):
    """An embedding and a head with one weight, and a rotary table that is not a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1024, 256)
        self.head = nn.Linear(256, 1024, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.ones(64, 256), persistent=False)


def hide_in_a_closure() -> None:
    """Refer to the tensor from a closure that other code has registered."""
    weight = torch.ones(MIB)
    KERNELS.append(lambda: weight)


def hide_in_a_cache() -> None:
    """Refer to the tensor from a list of another module."""
    HIDDEN_TENSORS.append(torch.ones(MIB))


@pytest.mark.parametrize("hide", [hide_in_a_closure, hide_in_a_cache])
def test_a_cpu_tensor_that_capture_cannot_see_is_rejected(hide: Callable[[], None]) -> None:
    """The error contains the size of the tensor."""
    completeness_check = Completeness()
    module = Tied()
    hide()
    with pytest.raises(UnsupportedTensor, match="allocated 4194304 bytes"):
        completeness_check.check(module)


@pytest.mark.usefixtures("modules_tracked")
def test_tied_weights_buffers_and_a_kv_cache_on_the_cpu_are_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The KV cache is recognised by the name of its variable."""
    completeness_check = Completeness()
    module = Tied()
    monkeypatch.setitem(globals(), "shared_kv_cache", torch.ones(MIB))
    completeness_check.check(module)


def test_garbage_of_the_loader_is_collected_before_the_check() -> None:
    """Reference cycles keep the loader's tensors alive until a collection."""
    completeness_check = Completeness()
    module = Tied()
    read: list[object] = [torch.ones(MIB)]
    read.append(read)
    del read
    completeness_check.check(module)


@pytest.mark.usefixtures("modules_tracked")
@pytest.mark.parametrize("hide", [hide_in_a_closure, hide_in_a_cache])
def test_a_hidden_tensor_is_found_among_frozen_objects(hide: Callable[[], None]) -> None:
    """The search that skips the objects from before the build finds tensors that were added during it."""
    with Completeness() as completeness_check:
        module = Tied()
        hide()
        with pytest.raises(UnsupportedTensor, match="allocated 4194304 bytes"):
            completeness_check.check(module)


@pytest.mark.usefixtures("modules_tracked")
def test_an_earlier_tensor_with_new_memory_is_found() -> None:
    """A tensor that existed before the build may receive weights during it."""
    HIDDEN_TENSORS.append(torch.ones(1))
    with Completeness() as completeness_check:
        module = Tied()
        HIDDEN_TENSORS[0].data = torch.ones(MIB)
        with pytest.raises(UnsupportedTensor, match="allocated 4194304 bytes"):
            completeness_check.check(module)


@pytest.mark.usefixtures("modules_tracked")
def test_a_frozen_variable_is_recognised_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace that is allocated during the build may belong to a module that was imported before."""
    with Completeness() as completeness_check:
        module = Tied()
        monkeypatch.setitem(globals(), "shared_kv_cache", torch.ones(MIB))
        completeness_check.check(module)


@pytest.mark.usefixtures("modules_tracked")
def test_objects_are_tracked_again_after_the_check() -> None:
    """The collector's state from before the build is restored, also after an error."""
    with pytest.raises(RuntimeError, match="build failed"), Completeness():
        raise RuntimeError("build failed")
    assert gc.get_freeze_count() == 0


def test_objects_frozen_by_other_code_stay_frozen() -> None:
    """An engine may freeze its objects itself."""
    gc.freeze()
    with Completeness() as completeness_check:
        completeness_check.check(Tied())
    assert gc.get_freeze_count() > 0


@pytest.fixture
def scanned_early(modules_tracked: None) -> Iterator[Callable[[], None]]:
    """The early search for tensors; afterwards, nothing of it is left."""
    yield completeness.scan_early
    completeness._early_scan.pop()


def test_a_tensor_from_before_the_early_scan_is_not_new(scanned_early: Callable[[], None]) -> None:
    """It explains itself: it existed before the build."""
    HIDDEN_TENSORS.append(torch.ones(MIB))
    scanned_early()
    with Completeness() as completeness_check:
        completeness_check.check(Tied())


def test_a_tensor_from_after_the_early_scan_is_not_new(scanned_early: Callable[[], None]) -> None:
    """The engine creates tensors between the scan and the build."""
    scanned_early()
    HIDDEN_TENSORS.append(torch.ones(MIB))
    with Completeness() as completeness_check:
        completeness_check.check(Tied())


@pytest.mark.parametrize("hide", [hide_in_a_closure, hide_in_a_cache])
def test_a_hidden_tensor_is_found_after_an_early_scan(
    hide: Callable[[], None], scanned_early: Callable[[], None]
) -> None:
    """The proof finds what the build adds."""
    scanned_early()
    with Completeness() as completeness_check:
        module = Tied()
        hide()
        with pytest.raises(UnsupportedTensor, match="allocated 4194304 bytes"):
            completeness_check.check(module)


@pytest.mark.parametrize("is_scanned", [True, False], ids=["from before the scan", "from after it"])
def test_an_earlier_tensor_with_new_memory_is_found_after_an_early_scan(
    is_scanned: bool, scanned_early: Callable[[], None]
) -> None:
    """A tensor that existed before the build may receive weights during it."""
    if not is_scanned:
        scanned_early()
    HIDDEN_TENSORS.append(torch.ones(1))
    if is_scanned:
        scanned_early()
    with Completeness() as completeness_check:
        module = Tied()
        HIDDEN_TENSORS[0].data = torch.ones(MIB)
        with pytest.raises(UnsupportedTensor, match="allocated 4194304 bytes"):
            completeness_check.check(module)


def test_objects_are_tracked_again_after_a_check_with_an_early_scan(scanned_early: Callable[[], None]) -> None:
    """The scan freezes them, and the proof unfreezes them."""
    scanned_early()
    with Completeness() as completeness_check:
        completeness_check.check(Tied())
    assert gc.get_freeze_count() == 0


def test_a_second_proof_searches_again(scanned_early: Callable[[], None]) -> None:
    """A scan is used once: a draft model is built later."""
    scanned_early()
    with Completeness() as completeness_check:
        completeness_check.check(Tied())
    assert completeness._early_scan.pop() is None


def test_other_code_may_unfreeze_after_an_early_scan(scanned_early: Callable[[], None]) -> None:
    """The proof finds the same."""
    scanned_early()
    gc.unfreeze()
    HIDDEN_TENSORS.append(torch.ones(1))
    with Completeness() as completeness_check:
        module = Tied()
        HIDDEN_TENSORS[0].data = torch.ones(MIB)
        with pytest.raises(UnsupportedTensor, match="allocated 4194304 bytes"):
            completeness_check.check(module)


def test_objects_frozen_by_other_code_are_not_scanned_early() -> None:
    """Their tensors could not be found."""
    gc.freeze()
    completeness.scan_early()
    assert completeness._early_scan.pop() is None


def test_the_tensors_of_all_attributes_are_searched_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and buffers explain the memory of most models."""
    monkeypatch.setattr(completeness, "all_tensors", lambda _: pytest.fail("searched"))
    with Completeness() as completeness_check:
        completeness_check.check(Tied())


def test_registered_tensors_are_a_part_of_all_tensors() -> None:
    """So they explain no memory that the complete search would not explain."""
    module = Tied()
    vars(module)["kv_cache"] = torch.ones(MIB)
    every = {tensor.data_ptr() for tensor in completeness.all_tensors(module)}
    assert every - {tensor.data_ptr() for tensor in completeness.registered_tensors(module)} == {
        vars(module)["kv_cache"].data_ptr()
    }


def test_a_slice_of_a_mapped_file_counts_as_the_slice(tmp_path: Path) -> None:
    """The rest of the mapped file is not memory of the model."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(16 * MIB))
    completeness_check = Completeness()
    module = Tied()
    mapped_storage = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=16 * MIB)
    module.head.weight = nn.Parameter(torch.empty(0).set_(mapped_storage, 0, (1024, 256)))  # type: ignore[call-overload]
    del mapped_storage
    completeness_check.check(module)


class Engine:
    """An engine that keeps a part of its weights elsewhere."""

    def __init__(self, allocated: list[torch.Tensor], hides: Callable[[str], bool]) -> None:
        self.builds: list[str] = []
        self._allocated = allocated
        self._hides = hides

    def empty(self) -> nn.Module:
        """Return the model without weights."""
        return self._build("empty")

    def load(self) -> nn.Module:
        """Return the model with weights."""
        return self._build("load")

    def check(self) -> None:
        """Pass: there is something to load."""

    def _build(self, build: str) -> nn.Module:
        self.builds.append(build)
        module = Layer()
        self._allocated.append(module.weight)
        if self._hides(build):
            HIDDEN_TENSORS.append(torch.ones(MIB))
            self._allocated.append(HIDDEN_TENSORS[-1])
        return module


@pytest.mark.parametrize(
    ("hides", "seeds"),
    [((), True), (("empty",), False), (("load",), False)],
    ids=["complete", "incomplete after the empty build", "incomplete after loading"],
)
def test_an_incomplete_model_is_served_but_not_seeded(
    allocated: list[torch.Tensor], hides: tuple[str, ...], seeds: bool
) -> None:
    """The engine loads its own weights once and no instance can fork them."""
    engine = Engine(allocated, hides.__contains__)
    settings = InstanceSettings(snapshot="file:///none.safetensors", transports=("http",))
    module = load_or_fork(engine, lambda: ModelIdentity("model", Rank()), settings)
    instance = served_model(module)
    if instance is not None:
        instance.close(0.0)
    assert ["empty", "load"] == engine.builds
    assert seeds == (instance is not None)
