"""Tensors of boxes: gathered from own tensors of any layout, and assembled to the tensors that a loader reads."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rfork.placement import box_tensors
from rfork.placement.box_tensors import CheckpointMemory, OwnMemory, SkippedCopies, allocate_boxes, gather
from rfork.placement.boxes import Box, box_map, divide, wanted_boxes
from rfork.placement.intersection import intersect
from rfork.placement.placement_map import PlacementMap, TensorTable, TensorType
from rfork.placement.recorder import Recorder
from tests.unit.placement import engine_loaders
from tests.unit.placement.engine_loaders import TensorParallelRank
from tests.unit.placement.map_bytes import INTEGERS, random_tensor
from tests.unit.placement.small_model import ALL_LAYERS, DTYPE, LAYOUTS, checkpoint, loaded_rank, map_of_rank

MIB = 1 << 20
DTYPES = (torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.complex64)


def table_of(tensors: Mapping[str, torch.Tensor]) -> TensorTable:
    """Return the table of a checkpoint."""
    return TensorTable(
        tensors, (TensorType(str(each.dtype)[6:], each.itemsize, tuple(each.shape)) for each in tensors.values())
    )


def box_of(tensor: torch.Tensor, *bounds: tuple[int, int], name: str = "weight") -> Box:
    """Return a box of a tensor; without bounds, of all its elements."""
    complete = tuple((0, size) for size in tensor.shape)
    return Box(name, str(tensor.dtype)[6:], tensor.itemsize, tuple(tensor.shape), (), ()).part(bounds or complete)


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(*each) for each in box.bounds)]


def assert_equal_bits(expected: torch.Tensor, found: torch.Tensor) -> None:
    """Check that two tensors of one dtype have the same bits."""
    assert expected.dtype == found.dtype
    integers = INTEGERS[expected.itemsize]
    assert torch.equal(expected.contiguous().view(integers), found.contiguous().view(integers))


def gathered(
    boxes: Sequence[Box], maps: Sequence[PlacementMap], tensors: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return boxes, gathered from own tensors."""
    into = allocate_boxes(boxes)
    copies = intersect(maps, box_map(boxes))
    assert () == copies.uncovered
    gather(copies, tensors, into)
    return into


def fetched(
    wanted: Sequence[Box], maps: Sequence[PlacementMap], tensors: Sequence[Mapping[str, torch.Tensor]]
) -> tuple[dict[str, torch.Tensor], list[Box]]:
    """Return the wanted boxes as a target fetches them: each source gathers its own part."""
    division = divide(wanted, maps)
    assert () == division.missing
    found: dict[str, torch.Tensor] = {}
    for parts, placement_map, own in zip(division.parts, maps, tensors, strict=True):
        found.update(gathered(parts, [placement_map], [own]))
    return found, [box for parts in division.parts for box in parts]


def test_boxes_are_aligned_in_one_allocation() -> None:
    """Each box begins at a multiple of 64 bytes of one memory."""
    boxes = [
        Box("a", "uint8", 1, (9,), (0,), (9,)),
        Box("b", "float32", 4, (), (), ()),
        Box("c", "bool", 1, (4,), (1,), (3,)),
    ]
    tensors = allocate_boxes(boxes)
    assert ["a[0:9]", "b[]", "c[1:4]"] == list(tensors)
    assert 1 == len({each.untyped_storage().data_ptr() for each in tensors.values()})
    assert [0, 64, 128] == [each.data_ptr() - tensors["a[0:9]"].data_ptr() for each in tensors.values()]
    assert 0 == tensors["a[0:9]"].data_ptr() % 64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_boxes_have_the_dtype_and_the_sizes(dtype: torch.dtype) -> None:
    """A box is a contiguous tensor of the checkpoint's dtype."""
    box = box_of(torch.empty(8, 6, dtype=dtype), (2, 6), (0, 3))
    tensor = allocate_boxes([box])[box.name]
    assert (4, 3) == tuple(tensor.shape)
    assert dtype == tensor.dtype
    assert tensor.is_contiguous()


def test_no_boxes_can_be_allocated() -> None:
    """A source may have no part."""
    assert {} == allocate_boxes([])


@pytest.mark.parametrize(("dtype", "itemsize"), [("float12", 2), ("nn", 2), ("bfloat16", 4)])
def test_unknown_dtypes_are_refused(dtype: str, itemsize: int) -> None:
    """The name of a dtype comes from another instance."""
    with pytest.raises(ValueError, match=dtype):
        allocate_boxes([Box("a", dtype, itemsize, (4,), (0,), (4,))])


Layout = Callable[[torch.Tensor], torch.Tensor]
OWN_LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda own: own,
    "strided": lambda own: own.new_empty(16, 18)[::2, 3:15],
    "transposed": lambda own: own.new_empty(12, 8).t(),
    "column of a larger tensor": lambda own: own.new_empty(3, 8, 2, 12)[1, :, 1],
}


@pytest.mark.parametrize("layout", OWN_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathered_boxes_are_slices_of_the_checkpoint(dtype: torch.dtype, layout: str) -> None:
    """Boxes of an own tensor with any strides and any dtype have the bits of the checkpoint's slice."""
    weight = torch.randint(0, 2, (8, 12 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    own = OWN_LAYOUTS[layout](torch.empty(8, 12, dtype=dtype))
    own.copy_(weight)
    with Recorder() as recorder:
        OWN_LAYOUTS[layout](recorded := torch.empty(8, 12, dtype=dtype, device="meta"))
        recorded = OWN_LAYOUTS[layout](recorded)
        recorded.copy_(recorder.tensor("weight", dtype, weight.shape))
    maps = [recorder.placement_map({"own": recorded})]
    boxes = [
        box_of(weight),
        box_of(weight, (2, 7), (3, 8)),
        box_of(weight, (7, 8), (0, 12)),
        box_of(weight, (0, 8), (11, 12)),
    ]
    found = gathered(boxes, maps, [{"own": own}])
    for box in boxes:
        assert_equal_bits(part_of(weight, box), found[box.name])


@pytest.fixture(params=[0, 1 << 40], ids=["virtual memory", "copies"])
def min_mapped_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with contiguous boxes in virtual memory of their tensors, and in memory of their own."""
    monkeypatch.setattr(box_tensors, "MIN_MAPPED_BYTES", request.param)


def assembled(
    checkpoint: TensorTable, values: Mapping[str, torch.Tensor], boxes: Sequence[Box]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint whose boxes have these values."""
    memory = CheckpointMemory(checkpoint)
    for name, tensor in memory.allocate_boxes(boxes).items():
        tensor.copy_(values[name])
    return memory.tensors()


@pytest.mark.parametrize("source_layout", LAYOUTS)
def test_boxes_of_any_layout_are_slices_of_the_checkpoint(source_layout: str) -> None:
    """Boxes of fused, split, transposed and row-parallel own tensors have the bits of the checkpoint."""
    maps = [map_of_rank(*each) for each in LAYOUTS[source_layout]]
    tensors = [loaded_rank(*each) for each in LAYOUTS[source_layout]]
    for size, rank in ((1, 0), (2, 1), (4, 2)):
        found, boxes = fetched(wanted_boxes(map_of_rank(rank, size)), maps, tensors)
        for box in boxes:
            assert_equal_bits(part_of(checkpoint()[box.tensor], box), found[box.name])


@pytest.mark.usefixtures("min_mapped_bytes")
@pytest.mark.parametrize("target_layout", LAYOUTS)
@pytest.mark.parametrize("source_layout", LAYOUTS)
def test_a_loader_of_assembled_tensors_loads_the_checkpoint(source_layout: str, target_layout: str) -> None:
    """A rank that reads the boxes of other layouts with its own loader has the tensors of an own load."""
    maps = [map_of_rank(*each) for each in LAYOUTS[source_layout]]
    tensors = [loaded_rank(*each) for each in LAYOUTS[source_layout]]
    for rank, size, layers in LAYOUTS[target_layout]:
        found, boxes = fetched(wanted_boxes(map_of_rank(rank, size, layers)), maps, tensors)
        tp = TensorParallelRank(rank, size)
        loaded = engine_loaders.build(tp, layers, DTYPE, "cpu")
        engine_loaders.load(loaded, assembled(map_of_rank(rank, size).checkpoint, found, boxes), tp)
        for name, expected in loaded_rank(rank, size, layers).items():
            assert_equal_bits(expected, loaded[name])


def test_padding_of_a_vocabulary_is_not_gathered() -> None:
    """The parts of two padded vocabularies end at the vocabulary of the checkpoint."""
    maps = [map_of_rank(rank, 4) for rank in range(4)]
    division = divide(wanted_boxes(map_of_rank(0, 1)), maps)
    names = [box.name for parts in division.parts for box in parts if box.tensor == "embed"]
    assert ["embed[0:8,0:8]", "embed[8:16,0:8]", "embed[16:21,0:8]"] == names


def test_tied_heads_are_gathered_from_their_owner() -> None:
    """A source with aliases sends a box from the tensor that the alias lies in."""
    weight = random_tensor((8, 6), DTYPE)
    own = torch.empty(8, 6, dtype=DTYPE, device="meta")
    with Recorder() as recorder:
        own.copy_(recorder.tensor("weight", DTYPE, (8, 6)))
    placement_map = recorder.placement_map({"first_rows": own[:2], "head": own, "embed": own})
    assert {"first_rows": "head", "embed": "head"} == placement_map.aliases
    box = box_of(weight, (1, 5), (2, 4))
    found = gathered([box], [placement_map], [{"head": weight}])
    assert_equal_bits(part_of(weight, box), found[box.name])


def test_parameters_are_gathered() -> None:
    """Own tensors that require gradients, of a subclass, and within a larger storage are read as they are."""

    class Weight(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, *_: object, **__: object) -> object:
            raise AssertionError

    weight = random_tensor((8, 6), DTYPE)
    with Recorder() as recorder:
        own = torch.empty(8, 6, dtype=DTYPE, device="meta")
        own.copy_(recorder.tensor("weight", DTYPE, (8, 6)))
    memory = torch.cat([random_tensor((5,), DTYPE), weight.view(-1)])
    parameter = torch.Tensor._make_subclass(Weight, memory[5:].view(8, 6), True)
    box = box_of(weight, (2, 4), (1, 6))
    found = gathered([box], [recorder.placement_map({"own": own})], [{"own": parameter}])
    assert_equal_bits(part_of(weight, box), found[box.name])


def test_a_copy_outside_the_memory_is_refused() -> None:
    """An own tensor that is smaller than the map describes is not read beyond its storage."""
    weight = torch.empty(8, 6, dtype=DTYPE)
    with pytest.raises(RuntimeError, match="out of bounds"):
        gathered([box_of(weight)], [box_map([box_of(weight)])], [{"weight[0:8,0:6]": weight[:7].clone()}])


def test_a_copy_of_another_item_size_is_refused() -> None:
    """An own tensor that has another item size than the map describes is not read."""
    weight = torch.empty(8, 6, dtype=DTYPE)
    with pytest.raises(ValueError, match="float32"):
        gathered([box_of(weight)], [box_map([box_of(weight)])], [{"weight[0:8,0:6]": weight.float()}])


@pytest.mark.parametrize("limit", [1, 24, 100, 1 << 20])
def test_copies_between_devices_are_divided(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """A large copy that is not contiguous consists of contiguous copies, or of copies below the limit."""
    monkeypatch.setattr(box_tensors, "MAX_COPY_BYTES", limit)
    sizes: list[int] = []

    class Elements:
        """A tensor that records copies to it, on a device of its own."""

        device = "other"

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __getitem__(self, index: int | slice) -> Elements:
            return Elements(self.tensor[index])

        def is_contiguous(self) -> bool:
            return self.tensor.is_contiguous()

        def copy_(self, source: torch.Tensor) -> None:
            if not (source.is_contiguous() and self.tensor.is_contiguous()):
                sizes.append(source.nbytes)
            self.tensor.copy_(source)

    source, target = random_tensor((5, 4, 8), torch.int16).permute(1, 0, 2), torch.zeros(4, 5, 8, dtype=torch.int16)
    box_tensors._copy(source, Elements(target))  # type: ignore[arg-type]
    assert torch.equal(source, target)
    assert all(size <= limit for size in sizes)


def test_tensors_are_in_the_order_of_the_table() -> None:
    """Every tensor of the checkpoint is yielded with its type, whether or not it has boxes."""
    weights = {"b": torch.empty(8, 6, dtype=DTYPE), "a": torch.empty(()), "c": torch.empty(0, 3, dtype=torch.int64)}
    found = list(assembled(table_of(weights), {}, []))
    assert list(weights) == [name for name, _ in found]
    assert [each.shape for each in weights.values()] == [each.shape for _, each in found]
    assert [each.dtype for each in weights.values()] == [each.dtype for _, each in found]


@pytest.mark.usefixtures("min_mapped_bytes")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_boxes_are_filled_in(dtype: torch.dtype) -> None:
    """A tensor has the elements of all its boxes, and zeros elsewhere."""
    weight = torch.randint(0, 2, (8, 6 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    boxes = [box_of(weight, (0, 3), (1, 4)), box_of(weight, (3, 8), (5, 6))]
    tensors = {box.name: part_of(weight, box).clone() for box in boxes}
    expected = torch.zeros_like(weight)
    for box in boxes:
        part_of(expected, box).copy_(part_of(weight, box))
    ((_, found),) = assembled(table_of({"weight": weight}), tensors, boxes)
    assert_equal_bits(expected, found)


@pytest.mark.parametrize("shape", [(), (8, 6), (1,)])
def test_a_complete_box_is_not_copied(shape: tuple[int, ...]) -> None:
    """A box that is the complete tensor is the tensor."""
    weight = random_tensor(shape)
    memory = CheckpointMemory(table_of({"weight": weight}))
    (allocated,) = memory.allocate_boxes([box_of(weight)]).values()
    ((_, found),) = memory.tensors()
    assert allocated is found


def test_large_contiguous_boxes_are_not_copied() -> None:
    """Boxes that are adjacent in their tensor lie in the memory of the tensor that is yielded."""
    weight = torch.empty(4, MIB)
    memory = CheckpointMemory(table_of({"weight": weight}))
    boxes = [box_of(weight, (0, 2), (0, MIB)), box_of(weight, (3, 4), (7, MIB))]
    allocated = memory.allocate_boxes(boxes)
    ((_, found),) = memory.tensors()
    for box in boxes:
        assert part_of(found, box).data_ptr() == allocated[box.name].data_ptr()
        assert allocated[box.name].is_contiguous()


def test_forgotten_boxes_are_not_assembled() -> None:
    """A box that could not be fetched is allocated again, in parts."""
    weight = random_tensor((4, 6))
    memory = CheckpointMemory(table_of({"weight": weight}))
    memory.allocate_boxes([box_of(weight)])
    memory.forget([box_of(weight)])
    boxes = [box_of(weight, (0, 4), (0, 3)), box_of(weight, (0, 4), (3, 6))]
    for box, tensor in zip(boxes, memory.allocate_boxes(boxes).values(), strict=True):
        tensor.copy_(part_of(weight, box))
    ((_, found),) = memory.tensors()
    assert_equal_bits(weight, found)


def test_boxes_of_other_checkpoints_are_refused() -> None:
    """A box whose tensor is not in the table, or has another shape there, is an error."""
    weight = torch.empty(8, 6)
    for box in (box_of(weight, name="other"), box_of(torch.empty(8, 7)), box_of(weight.double())):
        with pytest.raises(ValueError, match="no box of a tensor in the checkpoint"):
            assembled(table_of({"weight": weight}), {}, [box])


def test_untouched_pages_are_not_allocated() -> None:
    """A tensor larger than the memory of the machine can be yielded; a read of its other elements finds zeros."""
    table = TensorTable(["large"], [TensorType("bfloat16", 2, (1 << 11, 1 << 28))])
    cut = Box("large", "bfloat16", 2, (1 << 11, 1 << 28), (900, 4096), (2, 8))
    adjacent = cut._replace(start=(902, 4096), sizes=(1, MIB))
    parts = {box.name: random_tensor(box.sizes, DTYPE) for box in (cut, adjacent)}
    ((_, found),) = assembled(table, parts, [cut, adjacent])
    for box in (cut, adjacent):
        assert_equal_bits(parts[box.name], part_of(found, box))
    assert 0 == found[2000, 77]


def test_memory_is_released_with_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but its consumer references a tensor that was yielded."""
    mappings: list[weakref.ref[mmap.mmap]] = []

    class Mapping(mmap.mmap):
        def __init__(self, *_: object) -> None:
            mappings.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Mapping)
    weights = {name: torch.zeros(MIB) for name in "abc"}
    boxes = [box_of(value, (0, MIB // 2), name=name) for name, value in weights.items()]
    values = {box.name: part_of(weights[box.tensor], box) for box in boxes}
    iterator = assembled(table_of(weights), values, boxes)
    gc.disable()
    try:
        kept = next(iterator)
        next(iterator)
        next(iterator)
        assert [True, False, False] == [each() is not None for each in mappings[:3]]
        assert 0 == kept[1].sum()
    finally:
        gc.enable()


def test_tensors_without_boxes_are_zeros() -> None:
    """A loader that copies them gets zeros of their dtype and shape."""
    found = dict(assembled(table_of({"one": torch.ones(2, 3), "other": torch.ones(7, dtype=torch.int8)}), {}, []))
    assert_equal_bits(torch.zeros(2, 3), found["one"])
    assert_equal_bits(torch.zeros(7, dtype=torch.int8), found["other"])


def test_copies_of_tensors_without_boxes_are_skipped() -> None:
    """So a loader neither reads nor writes memory for boxes that arrive after it."""
    memory = CheckpointMemory(table_of({"weight": torch.empty(4, 6)}))
    own = torch.full((6, 3), 7.0)
    with SkippedCopies(memory.zeros):
        (_, weight), *_ = memory.tensors()
        assert own.copy_(weight.t()[:, 1:]) is own
    assert torch.equal(torch.full((6, 3), 7.0), own)


@pytest.mark.parametrize("case", ["other memory", "conversion", "broadcast", "after the block"])
def test_other_copies_are_done(case: str) -> None:
    """Only what the placement map describes arrives later."""
    zeros = torch.zeros(64, dtype=torch.uint8)
    source = torch.zeros(4) if case == "other memory" else zeros[:16].view(torch.float32)
    dtype = torch.int64 if case == "conversion" else torch.float32
    own = torch.full((2, 4) if case == "broadcast" else (4,), 7, dtype=dtype)
    with SkippedCopies(zeros):
        if case != "after the block":
            own.copy_(source)
    if case == "after the block":
        own.copy_(source)
    assert not own.any()


RECEIVED_PARTS = {
    "complete tensors": (lambda wanted: wanted, True),
    "rows": (lambda wanted: [part for box in wanted for part in halves(box, 0)], True),
    "columns": (lambda wanted: [part for box in wanted for part in halves(box, -1)], False),
}
"""Divisions of the wanted boxes, and whether some parts are contiguous in the own tensors."""


def halves(box: Box, dim: int) -> list[Box]:
    """Return two boxes of one, or that one if it cannot be divided."""
    if not box.sizes or box.sizes[dim] < 2:
        return [box]
    dim %= len(box.sizes)
    begin, end = box.bounds[dim]
    middle = (begin + end) // 2
    ranges = [(begin, middle), (middle, end)]
    return [box.part((*box.bounds[:dim], each, *box.bounds[dim + 1 :])) for each in ranges]


@pytest.mark.parametrize("case", RECEIVED_PARTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_boxes_are_received_in_own_tensors(layout: str, case: str) -> None:
    """Boxes that are contiguous there need no other memory; others are copied."""
    divided, is_contiguous = RECEIVED_PARTS[case]
    for rank in LAYOUTS[layout]:
        boxes, expected, own = divided(wanted_boxes(map_of_rank(*rank))), loaded_rank(*rank), loaded_rank(*rank)
        for tensor in own.values():
            tensor.data.zero_()
        allocations: list[int] = []

        def allocate(size: int, allocations: list[int] = allocations) -> torch.Tensor:
            allocations.append(size)
            return box_tensors.allocate_bytes(size)

        memory = OwnMemory(map_of_rank(*rank), own, allocate)
        allocated = memory.allocate_boxes(boxes)
        for box in boxes:
            allocated[box.name].copy_(part_of(checkpoint()[box.tensor], box))
        memory.filled(boxes)
        for name, tensor in expected.items():
            assert_equal_bits(tensor, own[name])
        bytes_in_own_tensors = sum(box.byte_count for box in boxes) - sum(allocations)
        assert is_contiguous == (bytes_in_own_tensors > 0)


def test_own_tensors_of_another_model_are_refused() -> None:
    """The engine must build the model that was recorded."""
    own = loaded_rank(0, 1)
    name = next(iter(own))
    with pytest.raises(ValueError, match=f"{name} is not the recorded tensor"):
        OwnMemory(map_of_rank(0, 1), {**own, name: own[name].float()})


Loader = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], object]


def load_through_a_buffer(own: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
    buffer = torch.empty_like(own)
    buffer.copy_(weights["a"])
    own.data.copy_(buffer)


def load_and_replace(own: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
    own.data.copy_(weights["a"])
    doubled = own.data * 2
    own.data.copy_(weights["b"])
    own.data[:1].copy_(doubled[:1])


def load_and_replace_in_inference_mode(own: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
    with torch.inference_mode():
        own.data.copy_(weights["a"])
        other = own.data.to(torch.float64)
        own.data.copy_(weights["b"])
        own.data[:1].copy_(other[:1])


def load_and_transpose(own: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
    own.data.copy_(weights["a"])
    own.data = own.data.t().contiguous().t()


def load_and_scale_a_part(own: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
    own.data.copy_(weights["a"][:4, :6])
    own.data[2:].mul_(2)


def load_as_bytes(own: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
    own.data.view(torch.uint8).copy_(weights["a"].view(torch.uint8))


def load_modified(own: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
    weights["a"][:1].mul_(2)
    own.data.copy_(weights["a"][:4])


def load_copied_into(own: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
    weights["a"][:2].copy_(weights["b"][2:])
    own.data.copy_(weights["a"])


LOADERS: dict[str, tuple[Loader, tuple[str, ...]]] = {
    "view": (lambda own, weights: own.data.t().copy_(weights["a"].t()), ()),
    "arithmetic": (lambda own, weights: own.data.copy_(weights["a"] + weights["b"]), ("a", "b")),
    "arithmetic of a part": (lambda own, weights: own.data[:2].copy_(weights["a"][:2] * 2), ("a",)),
    "arithmetic with the parameter": (lambda own, weights: own.data.zero_().add_(weights["a"]), ("a",)),
    "dtype": (lambda own, weights: own.data.copy_(weights["a"].to(torch.float64)), ("a",)),
    "dtype by copy": (lambda own, weights: own.data.copy_(weights["a"].view(torch.int32)), ("a",)),
    "broadcast": (lambda own, weights: own.data.copy_(weights["a"][:1]), ("a",)),
    "expand": (lambda own, weights: own.data.copy_(weights["a"][:, :1].expand(4, 6)), ("a",)),
    "cat with computed": (
        lambda own, weights: own.data.copy_(torch.cat([weights["a"][:2], -weights["b"][2:]])),
        ("a", "b"),
    ),
    "cat with plain": (lambda own, weights: own.data.copy_(torch.cat([weights["a"][:2], torch.ones(2, 6)])), ("a",)),
    "index": (lambda own, weights: own.data.copy_(weights["a"][torch.tensor([1, 0, 2, 3])]), ("a",)),
    "where": (lambda own, weights: own.data.copy_(torch.where(weights["a"] > 0, weights["b"], 0)), ("a", "b")),
    "in place": (load_modified, ("a",)),
    "copy into a loaded tensor": (load_copied_into, ("a", "b")),
    "buffer": (load_through_a_buffer, ("a",)),
    "another parameter": (load_and_transpose, ("a",)),
    "parameter in place": (load_and_scale_a_part, ("a",)),
    "read, then replaced": (load_and_replace, ("a",)),
    "read in inference mode, then replaced": (load_and_replace_in_inference_mode, ("a",)),
    "bytes": (load_as_bytes, ("a",)),
    "shape only": (lambda own, weights: own.data.copy_(torch.zeros_like(weights["a"])), ()),
    "replaced": (lambda own, weights: (own.data.copy_(weights["a"]), own.data.copy_(weights["b"])), ()),
    "partly replaced": (lambda own, weights: (own.data.copy_(weights["a"]), own.data[1:].copy_(weights["b"][1:])), ()),
    "read, but kept": (lambda own, weights: own.data.copy_(weights["a"]).sum(), ()),
    "padding": (lambda own, weights: (own.data[:2].copy_(weights["a"][:2]), own.data[2:].fill_(0)), ()),
}
"""Loaders, and the checkpoint tensors that they need completely."""


def recorded(loader: Loader) -> PlacementMap:
    """Return the map of a loader of two checkpoint tensors."""
    own = torch.nn.Parameter(torch.empty(4, 6, device="meta"), requires_grad=False)
    with Recorder() as recorder:
        loader(own, {name: recorder.tensor(name, torch.float32, (4, 6)) for name in "ab"})
    return PlacementMap.from_bytes(recorder.placement_map({"own": own}).to_bytes())


@pytest.mark.parametrize("case", LOADERS)
def test_tensors_that_flow_into_computed_values_are_noted(case: str) -> None:
    """The map names the checkpoint tensors that the loader needs completely, and no others."""
    loader, names = LOADERS[case]
    assert names == recorded(loader).read_completely


@pytest.mark.usefixtures("min_mapped_bytes")
@pytest.mark.parametrize("case", LOADERS)
def test_wanted_boxes_are_all_that_a_loader_reads(case: str) -> None:
    """A loader that reads only the wanted boxes loads the same values."""
    loader, _ = LOADERS[case]
    weights = {name: torch.randn(4, 6) for name in "ab"}
    boxes = wanted_boxes(recorded(loader))
    tensors = {box.name: part_of(weights[box.tensor], box).clone() for box in boxes}
    found = torch.nn.Parameter(torch.full((4, 6), 7.0), requires_grad=False)
    loader(found, dict(assembled(table_of(weights), tensors, boxes)))
    expected = torch.nn.Parameter(torch.full((4, 6), 7.0), requires_grad=False)
    loader(expected, {name: each.clone() for name, each in weights.items()})
    assert torch.equal(expected, found)


READS_OWN_TENSORS = {
    "buffer",
    "another parameter",
    "parameter in place",
    "read, then replaced",
    "read in inference mode, then replaced",
    "read, but kept",
}


@pytest.mark.parametrize("case", LOADERS)
def test_a_model_is_filled_after_its_loader(case: str) -> None:
    """A loader that only copies may read zeros, if the model is filled with the boxes afterwards."""
    loader, names = LOADERS[case]
    placement_map = recorded_to_the_end(loader)
    assert (case not in READS_OWN_TENSORS) == placement_map.only_copies
    if not placement_map.only_copies:
        return
    weights = {name: torch.randn(4, 6) for name in "ab"}
    found = torch.nn.Parameter(torch.full((4, 6), 7.0), requires_grad=False)
    loader(found, {name: each.clone() if name in names else torch.zeros(4, 6) for name, each in weights.items()})
    memory = OwnMemory(placement_map, {"own": found})
    boxes = [box for box in wanted_boxes(placement_map) if box.tensor not in names]
    for name, tensor in memory.allocate_boxes(boxes).items():
        tensor.copy_({box.name: part_of(weights[box.tensor], box) for box in boxes}[name])
    memory.filled(boxes)
    expected = torch.nn.Parameter(torch.full((4, 6), 7.0), requires_grad=False)
    loader(expected, {name: each.clone() for name, each in weights.items()})
    assert torch.equal(expected, found)


def recorded_to_the_end(loader: Loader, *, late: Loader | None = None, on_thread: bool = False) -> PlacementMap:
    """Return the map of a loader that has read the complete checkpoint, and copies `late` after its end."""
    own = torch.nn.Parameter(torch.empty(4, 6, device="meta"), requires_grad=False)
    with Recorder() as recorder:
        weights = {name: recorder.tensor(name, torch.float32, (4, 6)) for name in "ab"}
        if on_thread:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(loader, own, weights).result()
        else:
            loader(own, weights)
        recorder.end_checkpoint()
        if late is not None:
            late(own, weights)
    return recorder.placement_map({"own": own})


def test_a_loader_that_copies_later_is_not_filled_after_it() -> None:
    """It would replace the boxes: after the last tensor, on a thread, or if it does not read all tensors."""
    view, _ = LOADERS["view"]
    assert recorded_to_the_end(view).only_copies
    assert not recorded_to_the_end(view, late=view).only_copies
    assert not recorded_to_the_end(view, on_thread=True).only_copies
    assert not recorded(view).only_copies


def test_copies_outside_the_parameters_are_noted() -> None:
    """A tensor that was copied to a part of a storage which is no parameter is needed completely."""
    storage = torch.empty(48, device="meta")
    with Recorder() as recorder:
        storage[:24].view(4, 6).copy_(recorder.tensor("a", torch.float32, (4, 6)))
        storage[24:].view(4, 6).copy_(recorder.tensor("b", torch.float32, (4, 6)))
    assert ("b",) == recorder.placement_map({"own": storage[:24].view(4, 6)}).read_completely


def test_kept_computed_tensors_are_noted() -> None:
    """A tensor that the loader keeps as a parameter after an operation needs its sources."""
    with Recorder() as recorder:
        own = recorder.tensor("a", torch.float32, (4, 6)) * 2
        other = recorder.tensor("b", torch.float32, (4, 6)).t()
    assert ("a",) == recorder.placement_map({"own": own, "other": other}).read_completely


def test_the_small_model_is_read_in_parts() -> None:
    """No tensor of the small model is needed completely because of its loader."""
    assert () == map_of_rank(1, 2, ALL_LAYERS).read_completely
