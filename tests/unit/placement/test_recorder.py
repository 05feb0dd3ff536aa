"""Recording of weight loaders: the map has for each own element the checkpoint element that a real load writes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rfork.errors import UnsupportedTensor
from rfork.placement.placement_map import PlacementMap
from rfork.placement.recorder import RecordedTensor, Recorder
from tests.unit.placement.map_bytes import INTEGERS, PADDING, filled_from_checkpoint, random_tensor, strided

Loader = Callable[[torch.Tensor, torch.Tensor], object]


def recorded(
    loader: Loader, shape: tuple[int, ...], own_shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> PlacementMap:
    """Return the map of a loader that loads one checkpoint tensor into one parameter."""
    own = torch.nn.Parameter(torch.empty(own_shape, dtype=dtype, device="meta"), requires_grad=False)
    with Recorder() as recorder:
        loader(own, recorder.tensor("weight", dtype, shape))
    return recorder.placement_map({"own": own})


def assert_map_loads(
    loader: Loader, shape: tuple[int, ...], own_shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> PlacementMap:
    """Check that the map fills the parameter with the bytes that the loader itself writes, and with no others."""
    placement_map = recorded(loader, shape, own_shape, dtype)
    weight = random_tensor(shape, dtype)
    expected = strided(
        torch.full((torch.Size(own_shape).numel() * dtype.itemsize,), PADDING, dtype=torch.uint8),
        dtype.itemsize,
        0,
        own_shape,
        [step * dtype.itemsize for step in torch.empty(own_shape, device="meta").stride()],
    ).view(dtype)
    loader(torch.nn.Parameter(expected, requires_grad=False), weight)
    memory = filled_from_checkpoint(placement_map, {"weight": weight})["own"]
    assert torch.equal(expected.view(INTEGERS[dtype.itemsize]).view(-1).view(torch.uint8), memory)
    assert {} == placement_map.computed
    return placement_map


def set_slice(own: torch.Tensor, weight: torch.Tensor) -> None:
    own.data[1:3] = weight[2:4]


def set_column(own: torch.Tensor, weight: torch.Tensor) -> None:
    own.data[:, 2] = weight[..., 0]


def copy_chunks(own: torch.Tensor, weight: torch.Tensor) -> None:
    for destination, source in zip(own.data.chunk(2, dim=0), reversed(weight.chunk(2, dim=0)), strict=True):
        destination.copy_(source)


def copy_unbound(own: torch.Tensor, weight: torch.Tensor) -> None:
    for row, source in zip(own.data, weight.unbind(1), strict=True):
        row.copy_(source)


def copy_twice(own: torch.Tensor, weight: torch.Tensor) -> None:
    own.data.copy_(weight[:4])
    own.data[1:3, 2:5].copy_(weight[4:, 1:4][:2])


def copy_inference(own: torch.Tensor, weight: torch.Tensor) -> None:
    with torch.inference_mode():
        own.data.copy_(weight.reshape(3, 8).t())


FOLLOWED: dict[str, tuple[Loader, tuple[int, ...], tuple[int, ...]]] = {
    "copy": (lambda own, weight: own.data.copy_(weight), (4, 6), (4, 6)),
    "narrow": (lambda own, weight: own.data.narrow(0, 1, 2).copy_(weight.narrow(0, 2, 2)), (4, 6), (4, 6)),
    "item assignment": (set_slice, (4, 6), (4, 6)),
    "column": (set_column, (4, 6), (4, 6)),
    "select": (lambda own, weight: own.data[2].copy_(weight[1]), (4, 6), (4, 6)),
    "step": (lambda own, weight: own.data.copy_(weight[::2]), (8, 6), (4, 6)),
    "own step": (lambda own, weight: own.data[1::2].copy_(weight), (2, 6), (4, 6)),
    "t": (lambda own, weight: own.data.copy_(weight.t()), (6, 4), (4, 6)),
    "own t": (lambda own, weight: own.data.t().copy_(weight), (6, 4), (4, 6)),
    "transpose": (lambda own, weight: own.data.copy_(weight.transpose(-1, -2)), (2, 6, 4), (2, 4, 6)),
    "permute": (lambda own, weight: own.data.copy_(weight.permute(2, 0, 1).contiguous()), (4, 6, 2), (2, 4, 6)),
    "view": (lambda own, weight: own.data.copy_(weight.view(4, 6)), (2, 12), (4, 6)),
    "own view": (lambda own, weight: own.data.view(-1).copy_(weight.flatten()), (2, 12), (4, 6)),
    "transposed reshape": (lambda own, weight: own.data.copy_(weight.t().reshape(3, 8)), (4, 6), (3, 8)),
    "rotary": (
        lambda own, weight: own.data.copy_(weight.view(2, 3, 2, 4).transpose(1, 2).reshape(12, 4)),
        (12, 4),
        (12, 4),
    ),
    "chunk": (copy_chunks, (4, 6), (4, 6)),
    "split": (lambda own, weight: own.data.copy_(weight.split([2, 4], dim=1)[1]), (4, 6), (4, 4)),
    "unbind": (copy_unbound, (6, 4), (4, 6)),
    "cat": (lambda own, weight: own.data.copy_(torch.cat([weight[2:], weight[:2]])), (4, 6), (4, 6)),
    "stack": (lambda own, weight: own.data.copy_(torch.stack([weight, weight], 1)), (4, 6), (4, 2, 6)),
    "unsqueeze": (lambda own, weight: own.data.copy_(weight.unsqueeze(1)), (4, 6), (4, 1, 6)),
    "squeeze": (lambda own, weight: own.data.copy_(weight.squeeze()), (4, 1, 6), (4, 6)),
    "scalar": (lambda own, weight: own.data.copy_(weight), (), (1,)),
    "value": (lambda own, weight: own.data.fill_(weight.item()), (1,), (1, 1)),
    "value of a scalar": (lambda own, weight: own.data.fill_(weight.item()), (), (1,)),
    "leading dimension": (lambda own, weight: own.data.copy_(weight), (6,), (1, 6)),
    "to the same dtype": (lambda own, weight: own.data.copy_(weight.to(torch.float32).detach()), (4, 6), (4, 6)),
    "to a device": (lambda own, weight: own.data.copy_(weight.to(own.device).clone()), (4, 6), (4, 6)),
    "data": (lambda own, weight: own.data.copy_(weight.data[:, 1:]), (4, 7), (4, 6)),
    "integer view": (
        lambda own, weight: own.data.view(torch.int32).copy_(weight.view(torch.int32)),
        (4, 6),
        (4, 6),
    ),
    "later copy": (copy_twice, (7, 6), (4, 6)),
    "inference mode": (copy_inference, (4, 6), (8, 3)),
    "empty": (lambda own, weight: own.data[:0].copy_(weight[:0]), (4, 6), (4, 6)),
}


@pytest.mark.parametrize("case", FOLLOWED)
def test_relocations_are_followed(case: str) -> None:
    """A loader that only moves elements has a map that loads the same bytes."""
    assert_map_loads(*FOLLOWED[case])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8], ids=str)
def test_any_dtype_is_followed(dtype: torch.dtype) -> None:
    """Offsets and strides are those of the dtype's item size."""
    assert_map_loads(lambda own, weight: own.data[1:].copy_(weight.t()), (6, 3), (4, 6), dtype)


COMPUTED: dict[str, tuple[Loader, str]] = {
    "arithmetic": (lambda own, weight: own.data.copy_(weight * 2), "mul"),
    "arithmetic, then a view": (lambda own, weight: own.data.copy_((weight + 1).t().t()), "add"),
    "two operations": (lambda own, weight: own.data.copy_(weight.exp().abs()), "exp"),
    "to another dtype": (
        lambda own, weight: own.data.copy_(weight.to(torch.bfloat16)),
        "_to_copy: float32 to bfloat16",
    ),
    "copy to another dtype": (
        lambda own, weight: own.data.copy_(weight.view(torch.int32)),
        "copy_ from int32 to float32",
    ),
    "expand": (lambda own, weight: own.data.copy_(weight[:1].expand(4, 6)), "expand: repeats elements"),
    "broadcast": (lambda own, weight: own.data.copy_(weight[:1]), "copy_ with broadcast"),
    "index": (lambda own, weight: own.data.copy_(weight[torch.tensor([1, 0, 2, 3])]), "index"),
    "pad": (lambda own, weight: own.data.copy_(torch.nn.functional.pad(weight[:3], (0, 0, 0, 1))), "constant_pad_nd"),
    "in place, before": (lambda own, weight: own.data.copy_(weight.mul_(2)), "mul_"),
    "in place, of a view": (
        lambda own, weight: own.data.copy_((weight[0].zero_(), weight)[1]),
        "zero_ of a loaded tensor",
    ),
    "in place, after": (lambda own, weight: own.data.copy_(weight).mul_(2), "mul_"),
    "of the parameter": (lambda own, weight: own.data.copy_(own.data.copy_(weight).neg()), "copy_"),
    "cat of a computed tensor": (lambda own, weight: own.data.copy_(torch.cat([weight[:2], -weight[2:]])), "neg"),
    "cat of a plain tensor": (
        lambda own, weight: own.data.copy_(torch.cat([weight[:2], torch.ones(2, 6)])),
        "cat: joins other tensors",
    ),
    "through a buffer": (lambda own, weight: own.data.copy_(torch.empty_like(weight).copy_(weight)), "copy_"),
    "value in several elements": (
        lambda own, weight: own.data.fill_(weight[0, 0].item()),
        "fill_ with a loaded value",
    ),
    "several outputs": (lambda own, weight: own.data[0].copy_(weight.max(0)[0]), "max"),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_computed_elements_are_named_by_their_operation(case: str) -> None:
    """A parameter whose elements are not the checkpoint's has no relocation, and the map names the operation."""
    loader, operation = COMPUTED[case]
    placement_map = recorded(loader, (4, 6), (4, 6))
    assert {"own": operation} == placement_map.computed
    assert all(row.operation for row in placement_map)


def test_only_the_computed_region_is_marked() -> None:
    """A parameter may be partly relocated and partly computed."""

    def loader(own: torch.Tensor, weight: torch.Tensor) -> None:
        own.data[:2].copy_(weight[:2])
        own.data[2:].copy_(weight[2:] * 2)

    placement_map = recorded(loader, (4, 6), (4, 6))
    assert [("weight", 0, ""), ("", 48, "mul")] == [
        (row.checkpoint, row.offset, row.operation) for row in placement_map
    ]


def test_unwritten_elements_are_counted() -> None:
    """Padding and never written elements have no source."""

    def loader(own: torch.Tensor, weight: torch.Tensor) -> None:
        own.data[:2].copy_(weight[:2])
        own.data[2:3].fill_(0)

    assert {"own": 12} == recorded(loader, (4, 6), (4, 6)).unwritten_elements


def test_a_later_copy_replaces_a_computed_region() -> None:
    """A region that was computed first and then loaded from the checkpoint is a relocation."""
    placement_map = recorded(lambda own, weight: (own.data.normal_(), own.data.copy_(weight)), (4, 6), (4, 6))
    assert {} == placement_map.computed


def test_tied_tensors_are_aliases() -> None:
    """Two names of one tensor, and a view of a tensor, have one set of rows."""
    embed = torch.nn.Parameter(torch.empty(4, 6, device="meta"), requires_grad=False)
    with Recorder() as recorder:
        embed.data.copy_(recorder.tensor("weight", torch.float32, (4, 6)))
    placement_map = recorder.placement_map({"first_rows": embed.data[:2], "embed": embed, "head": embed})
    assert {"first_rows": "embed", "head": "embed"} == placement_map.aliases
    assert ["embed"] == placement_map.own.names


def test_tensors_of_one_buffer_are_separate() -> None:
    """Parameters that share a storage without overlapping have their own offsets."""
    buffer = torch.empty(48, device="meta")
    one, two = buffer[:24].view(4, 6), buffer[24:].view(4, 6)
    with Recorder() as recorder:
        weight = recorder.tensor("weight", torch.float32, (8, 6))
        one.copy_(weight[:4])
        two.copy_(weight[4:])
    rows = list(recorder.placement_map({"one": one, "two": two}))
    assert [("one", 0, (0, 0)), ("two", 0, (4, 0))] == [(row.own, row.offset, row.start) for row in rows]


def test_a_write_across_tensors_is_not_attributed() -> None:
    """A copy into a buffer of several parameters is refused for each of them."""
    buffer = torch.empty(48, device="meta")
    with Recorder() as recorder:
        buffer.view(8, 6).copy_(recorder.tensor("weight", torch.float32, (8, 6)))
    placement_map = recorder.placement_map({"one": buffer[:24].view(4, 6), "two": buffer[24:].view(4, 6)})
    assert {"one", "two"} == set(placement_map.computed)


def test_a_recorded_tensor_may_become_a_parameter() -> None:
    """A loader may keep the loaded tensor itself."""
    with Recorder() as recorder:
        own = torch.nn.Parameter(recorder.tensor("weight", torch.float32, (4, 6)).t(), requires_grad=False)
    assert isinstance(own, RecordedTensor)
    (row,) = recorder.placement_map({"own": own})
    assert ("weight", (4, 6), (24, 4)) == (row.checkpoint, row.sizes, row.strides)


def test_postprocessed_tensors_are_computed() -> None:
    """A tensor that an operation created from a loaded one has no source."""
    own = torch.nn.Parameter(torch.empty(4, 6, device="meta"), requires_grad=False)
    with Recorder() as recorder:
        own.data.copy_(recorder.tensor("weight", torch.float32, (4, 6)))
        own.data = own.data.t().contiguous()
    assert {"own": "clone"} == recorder.placement_map({"own": own}).computed


@pytest.mark.parametrize(
    "read",
    [
        lambda weight: weight.sum().item(),
        lambda weight: bool((weight > 0).all()),
        lambda weight: torch.equal(weight, weight),
        lambda weight: weight.nonzero(),
        lambda weight: weight[0, 0].item() > 0,
        lambda weight: bool(weight[0, 0].item()),
        lambda weight: float(weight[0, 0].item()),
        lambda weight: math.isnan(weight[0, 0].item()),
        lambda weight: f"{weight[0, 0].item()}",
        lambda weight: 2.0 * weight[0, 0].item(),
        lambda weight: weight[0, 0].item() in {1.0: 2},
    ],
)
def test_reading_values_is_refused(read: Callable[[torch.Tensor], object]) -> None:
    """A loader that depends on values cannot be recorded."""
    with Recorder() as recorder, pytest.raises(UnsupportedTensor, match="reads its values"):
        read(recorder.tensor("weight", torch.float32, (4, 6)))


@pytest.mark.parametrize(
    "write",
    [
        lambda own, value: own.mul_(value),
        lambda own, value: own + value,
        lambda own, value: torch.full((2,), value),
        lambda own, value: own.masked_fill_(own > 0, value),
        lambda own, value: own.__setitem__(0, value),
        lambda own, value: torch.tensor(value),
    ],
)
def test_a_read_value_is_only_filled_in(write: Callable[[torch.Tensor, object], object]) -> None:
    """Any other use of a value than filling a tensor with it is refused."""
    with Recorder() as recorder:
        value = recorder.tensor("weight", torch.float32, (1,)).item()
        with pytest.raises((UnsupportedTensor, TypeError, RuntimeError)):
            write(torch.empty(4, device="meta"), value)


def test_a_value_has_the_class_of_its_dtype() -> None:
    """A loader that distinguishes numbers treats it as one."""
    with Recorder() as recorder:
        value = recorder.tensor("weight", torch.float32, (1,)).item()
    assert isinstance(value, float)


def test_a_name_is_created_once() -> None:
    """Two tensors of one name would be ambiguous."""
    with Recorder() as recorder:
        recorder.tensor("weight", torch.float32, (4, 6))
        with pytest.raises(ValueError, match="weight"):
            recorder.tensor("weight", torch.float32, (4, 6))


def test_other_threads_record_copies() -> None:
    """A copy in a thread without the context is recorded as well."""
    own = torch.empty(4, 6, device="meta")
    with Recorder() as recorder:
        weight = recorder.tensor("weight", torch.float32, (6, 4))
        thread = threading.Thread(target=lambda: own.copy_(weight.t()))
        thread.start()
        thread.join()
    assert 1 == len(recorder.placement_map({"own": own}))


Write = tuple[tuple[int, int], tuple[int, int], tuple[int, int], bool]
progressions = st.tuples(st.integers(0, 5), st.integers(1, 3))
writes = st.lists(
    st.tuples(progressions, progressions, st.tuples(st.integers(0, 8), st.integers(0, 8)), st.booleans()),
    max_size=6,
)


@settings(max_examples=200)
@given(writes)
def test_overlapping_writes_never_have_a_wrong_source(found: list[Write]) -> None:
    """Later writes replace earlier ones; where that cannot be expressed, the tensor counts as computed."""

    def loader(own: torch.Tensor, weight: torch.Tensor) -> None:
        for (row, row_step), (column, column_step), (first_row, first_column), transposed in found:
            destination = own.data[row::row_step, column::column_step]
            rows, columns = destination.shape
            if transposed:
                source = weight.t()[first_column:, first_row:][:rows, :columns]
            else:
                source = weight[first_row:, first_column:][:rows, :columns]
            destination.copy_(source)

    placement_map = recorded(loader, (16, 16), (6, 6))
    if not placement_map.computed:
        assert_map_loads(loader, (16, 16), (6, 6))
