"""Capture: which tensors are found, their names and order, and which are rejected."""

from __future__ import annotations

from enum import Enum
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from rfork.errors import UnsupportedTensor
from rfork.image.capture import _matcher, alignment_of, capture, natural_sort_key
from rfork.image.module_tensors import plain_tensors
from rfork.image.registration import regions_to_register as memory_areas
from tests.unit.image.random_modules import Recipe, build, element_bytes, recipes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")


def names(module: nn.Module, **options: Any) -> list[str]:
    return [spec.name for spec in capture(module, **options).layout.tensors]


def copy_weights(target: nn.Module, source: nn.Module) -> None:
    """Copy all image bytes from one module to the other through host views."""
    source_image, target_image = capture(source), capture(target)
    size = source_image.layout.image_bytes
    with source_image.readable(0, size) as views, target_image.writable(0, size) as target_views:
        raw = b"".join(views)
        for target_view in target_views:
            target_view[:], raw = raw[: target_view.nbytes], raw[target_view.nbytes :]


@settings(max_examples=150, deadline=None)
@given(recipes)
def test_equal_modules_have_equal_layouts(recipe: Recipe) -> None:
    """Two modules built alike have the same layout_id, whatever their bits and addresses."""
    assert capture(build(recipe, 1)).layout == capture(build(recipe, 2)).layout


def test_layout_of_a_module_is_stable_across_releases() -> None:
    """Names, order and offsets of an image are part of the wire format: these values must never change."""
    base = torch.arange(24, dtype=torch.float32)
    root = nn.Module()
    root.layers = nn.ModuleList(nn.Linear(3, 2, dtype=torch.bfloat16) for _ in range(11))
    root.norm = nn.BatchNorm1d(3)
    root.register_buffer("columns", base[:12].view(3, 4).t())
    root.register_buffer("some", base[6:14])
    root.register_buffer("gaps", torch.zeros(9, dtype=torch.int8)[::2])
    root.register_buffer("none", torch.zeros(0, 3))
    root.tied = root.layers[10].weight
    caches = [{"key": torch.zeros(5, dtype=torch.complex64)}, (torch.tensor(True),)]
    object.__setattr__(root, "caches", caches)  # a plain attribute, which nn.Module has no type for
    layout = capture(root).layout
    assert "7e8f9b65ffe1757e279bbc449cffe302" == layout.layout_id
    assert 338 == layout.image_bytes


@settings(max_examples=150, deadline=None)
@given(recipes)
def test_copying_the_image_makes_every_tensor_equal(recipe: Recipe) -> None:
    """After the image's bytes are copied, every tensor of the target equals the source's, bit by bit."""
    source, target = build(recipe, 1), build(recipe, 2)
    copy_weights(target, source)
    expected = {name: element_bytes(tensor) for name, tensor in all_tensors(source).items()}
    assert expected == {name: element_bytes(tensor) for name, tensor in all_tensors(target).items()}


@settings(max_examples=150, deadline=None)
@given(recipes)
def test_every_byte_is_captured_once(recipe: Recipe) -> None:
    """The segments cover the image without overlapping in memory, and the regions cover the segments."""
    image = capture(build(recipe, 1))
    segments = image.segments(0, image.layout.image_bytes)
    assert [0, *[s.begin + s.length for s in segments]] == [
        *[s.begin for s in segments],
        image.layout.image_bytes,
    ]
    by_address = sorted((s.address, s.address + s.length) for s in segments)
    assert all(one[1] <= two[0] for one, two in pairwise(by_address))
    regions = memory_areas(image)
    assert all(any(a <= begin and end <= a + n for a, n in regions) for begin, end in by_address)


@settings(max_examples=50, deadline=None)
@given(recipes, st.data())
def test_segments_of_a_subrange_cover_the_same_memory(recipe: Recipe, data: st.DataObject) -> None:
    """Segments of `[begin, end)` refer to the same memory, byte by byte, as those of the complete image."""
    image = capture(build(recipe, 1))
    size = image.layout.image_bytes
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    addresses = [s.address + index for s in image.segments(0, size) for index in range(s.length)]
    part = [s.address + index for s in image.segments(begin, end) for index in range(s.length)]
    assert addresses[begin:end] == part


def all_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a module built from a recipe, found without the code under test."""
    found: dict[str, torch.Tensor] = dict(module.state_dict(keep_vars=True))
    found |= dict(module.named_buffers(remove_duplicate=False))
    found |= {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
    found |= {f"items.{index}": value for index, value in enumerate(vars(module)["items"])}
    found |= {f"tree.{name}": value[0] for name, value in vars(module)["tree"]["leaves"][1].items()}
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "scale"):
            found[f"{name}.scale"] = parameter.scale
    return found


def test_all_state_of_a_module_is_found() -> None:
    """Parameters, persistent and other buffers, attributes, containers and attributes of parameters are found."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(8))
    module.weight.scale = torch.zeros(7)  # type: ignore[attr-defined]
    module.register_buffer("kept", torch.zeros(6))
    module.register_buffer("hidden", torch.zeros(5), persistent=False)
    module.plain = torch.zeros(4)
    module.listed = [torch.zeros(3), (torch.zeros(2), {"key": torch.zeros(1), 7: torch.tensor(1.0)})]  # type: ignore[assignment]
    module.add_module("child", nn.Linear(1, 1))
    expected = [
        "child.bias", "child.weight", "hidden", "kept", "listed.0", "listed.1.0", "listed.1.1.key",
        "listed.1.1[7]", "plain", "weight", "weight.scale",
    ]  # fmt: skip
    assert expected == names(module)


def test_gradients_and_hooks_are_ignored() -> None:
    """State of training and hooks is not used for serving."""
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    module.register_forward_hook(lambda *_: None)
    assert ["bias", "weight"] == names(module)


def test_excluded_names_are_not_captured() -> None:
    """Names that match an exclude pattern are not captured."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert ["1.bias"] == names(module, exclude=["0.*", "*.weight"])


@pytest.mark.parametrize(
    "pattern",
    [
        "*.weight",
        "*weight",
        "*",
        "**",
        "*.b.*",
        "*b*",
        "a.*",
        "a.?.*",
        "*.[bc].weight",
        "*[ac]*",
        "a.b.weight",
        "x",
        "",
    ],
)
def test_exclude_patterns_are_those_of_fnmatch(pattern: str) -> None:
    """Also those that are not matched with regular expressions."""
    found = ["a.b.weight", "a.c.weight", "b", "weight", "a.b.bias", "weights", "a.weight\n"]
    is_excluded = _matcher([pattern])
    assert is_excluded is not None
    assert [each for each in found if fnmatchcase(each, pattern)] == [each for each in found if is_excluded(each)]


def test_with_a_reference_layout_only_its_names_are_captured() -> None:
    """Other tensors need not be supported; a missing name is skipped."""
    wanted = capture(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))).layout
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert ["0.bias", "0.weight"] == names(module, like=wanted)


def test_attributes_of_a_reference_layout_are_kept() -> None:
    """A second capture of a seed's module has the attributes of the first one."""
    module = nn.Linear(2, 2)
    first = capture(module).layout
    module.in_features = 3
    assert first == capture(module, like=first).layout


def test_leftover_memory_in_a_counter_of_batches_is_no_table_of_addresses() -> None:
    """A module of `to_empty` has it until it is filled."""
    module = nn.BatchNorm1d(4)
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.fill_(module.weight.data_ptr())
    assert "num_batches_tracked" in names(module)


def test_a_module_without_tensors_has_an_empty_image() -> None:
    """Its layout has no tensors and no bytes."""
    layout = capture(nn.Module()).layout
    assert [] == list(layout.tensors)
    assert 0 == layout.image_bytes


def test_tied_weights_are_one_region_with_two_names() -> None:
    """A tied weight is captured once under two names."""
    module = nn.Module()
    module.embed, module.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    module.head.weight = module.embed.weight
    layout = capture(module).layout
    assert [("embed.weight", 0), ("head.weight", 0)] == [(s.name, s.offset) for s in layout.tensors]
    assert 5 * 4 * 4 == layout.image_bytes


def test_a_module_at_two_paths_has_both_names() -> None:
    """A submodule registered twice yields its tensors under both paths."""
    layer = nn.Linear(2, 2, bias=False)
    module = nn.ModuleDict({"one": layer, "two": layer})
    assert ["one.weight", "two.weight"] == names(module)


def test_references_between_modules_add_no_names() -> None:
    """References to a parent, to itself and to neighbours in plain lists end and add nothing."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in module:
        layer.parents = [module]  # type: ignore[assignment]
        layer.neighbours = list(module)  # type: ignore[assignment]
        layer.weight.owner = layer  # type: ignore[union-attr]
    loop: list[object] = []
    loop.append(loop)
    module.loop = loop  # type: ignore[assignment]
    assert ["0.weight", "1.weight"] == names(module)


def test_unregistered_modules_are_found() -> None:
    """Modules in a plain list, which torch does not register, are visited once each."""
    module, layer = nn.Module(), nn.Linear(1, 1, bias=False)
    module.hidden = [layer, layer]  # type: ignore[assignment]
    assert ["hidden.0.weight"] == names(module)


def test_a_module_registered_below_itself_is_visited_once() -> None:
    """A cycle of registered modules ends."""
    module = nn.Linear(1, 1, bias=False)
    module.add_module("again", module)
    assert ["weight"] == names(module)


def test_missing_submodules_and_self_references_add_nothing() -> None:
    """A submodule set to None and a tensor that refers to itself add nothing."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(1))
    module.weight.itself = module.weight  # type: ignore[attr-defined]
    module.register_module("absent", None)
    assert ["weight"] == names(module)


def test_wrapper_subclasses_are_captured_by_their_inner_tensors() -> None:
    """A tensor subclass that wraps others is replaced by the wrapped tensors."""
    module = nn.Module()
    module.weight = nn.Parameter(TwoTensor(torch.zeros(2), torch.ones(3)[:2]))
    assert ["weight.a", "weight.b"] == names(module)


def test_plain_tensors_of_wrappers() -> None:
    """A wrapper's plain tensors are those it wraps at any depth; a plain tensor's is itself."""
    first, second, third = (torch.full((2,), float(number)) for number in range(3))
    nested = TwoTensor(TwoTensor(first, second), TwoTensor(third, third))
    found = [list(plain_tensors(tensor)) for tensor in (first, nested)]
    assert [[id(first)], [id(tensor) for tensor in (first, second, third, third)]] == [
        [id(tensor) for tensor in tensors] for tensors in found
    ]


class Point(NamedTuple):
    """A key of tables."""

    x: int
    y: int


class Gate(Enum):
    """A key of tables."""

    UP = 1
    DOWN = 2


def test_dict_entries_are_named_by_type_and_value_of_the_key() -> None:
    """The names do not depend on the order of the entries, and keys with equal text but different types differ."""
    keys = [1, "1", "[1]", Gate.UP, Point(1, 2), (Gate.DOWN, "a", 2), None, torch.float16, 2.5, b"raw", int]
    table = {key: torch.zeros(1) for key in keys}
    modules = [module_with(table), module_with(dict(reversed(table.items())))]
    expected = sorted(
        [
            *(
                "table.1",
                "table[1]",
                "table['[1]']",
                "table[Point(1, 2)]",
                "table[2.5]",
                "table[Gate.UP]",
                "table[(Gate.DOWN, 'a', 2)]",
                "table[None]",
            ),
            *("table[b'raw']", "table[builtins.int]", "table[torch.float16]"),
        ],
        key=natural_sort_key,
    )
    assert [expected, expected] == [names(module) for module in modules]


def test_dict_keys_without_a_stable_name_are_rejected() -> None:
    """An object's address cannot name a tensor."""
    with pytest.raises(UnsupportedTensor, match=r"'table' cannot be captured.*without a stable name"):
        capture(module_with({object(): torch.zeros(1)}))


@pytest.mark.parametrize("name", ["held", "_extra_state"])
def test_rejected_state_can_be_excluded_by_its_name(name: str) -> None:
    """The name in the error works for `exclude`, even if it is not a pattern."""
    module = WithExtraState() if name == "_extra_state" else nn.Linear(2, 2)
    if name == "held":
        vars(module)["held"] = {torch.zeros(1)}
    with pytest.raises(UnsupportedTensor) as raised:
        capture(module)
    assert name == raised.value.name
    assert f"exclude=[{name!r}]" in raised.value.hint
    assert ["bias", "weight"] == names(module, exclude=[name])


class WithExtraState(nn.Linear):
    """A layer with extra state."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def get_extra_state(self) -> str:
        """Return some state."""
        return "anything"


def test_names_with_brackets_can_be_excluded() -> None:
    """A complete name is matched literally before it is used as a pattern."""
    module = module_with({7: torch.zeros(1), 8: torch.zeros(1)})
    assert ["table[8]"] == names(module, exclude=["table[7]"])


def test_an_object_at_an_excluded_path_keeps_its_other_name() -> None:
    """Excluding a cache does not lose weights that the cache also refers to."""
    helper = SimpleNamespace(scale=torch.zeros(1))
    module = nn.Module()
    vars(module).update(cache=[helper], helper=helper)
    assert ["helper.scale"] == names(module, exclude=["cache.*"])


def test_excluded_tensors_between_the_rows_of_others_are_rejected() -> None:
    """The target's own bytes would be overwritten, and changes would invalidate the seed's digests."""
    block = torch.zeros(4, 4)
    module = nn.Module()
    module.left, module.right = block[:, :2], block[:, 2:]
    with pytest.raises(UnsupportedTensor, match=r"'right' cannot be captured.*between the elements of 'left'"):
        capture(module, exclude=["right"])


@pytest.mark.parametrize("kept", ["alias", "complete block"])
def test_excluded_tensors_covered_by_another_are_accepted(kept: str) -> None:
    """Examples are a second name of a strided tensor, and a part of a captured block."""
    block = torch.zeros(4, 4)
    module = nn.Module()
    module.left = block[:, :2]
    module.right = block[:, :2] if kept == "alias" else block[:, 2:]
    if kept != "alias":
        module.block = block
    assert "right" not in names(module, exclude=["right"])


def test_attributes_contain_value_and_owners() -> None:
    """Plain values are part of the layout, with one line for each value of each attribute."""
    module = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.1), nn.Dropout(0.2))
    expected = ["inplace=False at 0 and 2 more", "p=0.1 at 0 and 1 more", "p=0.2 at 2"]
    assert expected == [line.partition(" (")[0] for line in capture(module).layout.attributes]


def test_attributes_can_be_excluded() -> None:
    """They are excluded by name, like tensors."""
    module = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.2))
    assert ("p=0.2 at 1",) == capture(module, exclude=["*.inplace", "0.p"]).layout.attributes


def test_attributes_of_many_values_are_one_line() -> None:
    """Values that are unique per layer do not make a list as long as the model."""
    module = nn.Sequential(*(nn.Dropout(index / 1000) for index in range(300)))
    lines = [line for line in capture(module).layout.attributes if line.startswith("p=")]
    assert ["p=300 values at 0 0.0 and 299 more"] == [line.partition(" (")[0].replace("p=0.0", "0.0") for line in lines]


def test_a_compiled_module_has_the_layout_of_the_original() -> None:
    """Compiled code is not state of the module."""
    compiled, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    constant = torch.zeros(1)
    vars(compiled)["_compiled_call_impl"] = lambda x: x + constant  # like `compile` does
    assert capture(compiled).layout == capture(plain).layout


def test_cached_properties_are_not_compared() -> None:
    """They are derived values that exist only after the first access."""
    used, fresh = WithProperty(), WithProperty()
    assert 2 == used.twice
    assert capture(used).layout == capture(fresh).layout


class WithProperty(nn.Module):
    """A module with a cached property."""

    @cached_property
    def twice(self) -> int:
        """A value computed once."""
        return 2


@pytest.mark.parametrize("name", ["device_index", "rank", "cacheDir", "name_or_path", "num_calls", "_seed"])
def test_process_attributes_are_not_compared(name: str) -> None:
    """They differ between valid instances of one model."""
    module = nn.Module()
    setattr(module, name, 1)
    assert () == capture(module).layout.attributes


def test_paths_and_urls_are_not_compared() -> None:
    """They belong to one machine."""
    module = nn.Module()
    vars(module).update(tokenizer="/models/a", source="https://hub/a")
    assert () == capture(module).layout.attributes


def module_with(table: object) -> nn.Module:
    """Return a module with one attribute."""
    module = nn.Module()
    vars(module)["table"] = table
    return module


def test_two_tensors_with_one_name_are_rejected() -> None:
    """An ambiguous name is an error; no tensor is silently lost."""
    module = nn.Module()
    module.list = [torch.zeros(1)]  # type: ignore[assignment]
    setattr(module, "list.0", torch.ones(1))
    with pytest.raises(UnsupportedTensor, match=r"'list\.0'.*same name"):
        capture(module)


def test_order_is_by_alignment_then_by_natural_name() -> None:
    """Wider types come first, and layers.2 before layers.10, without padding."""
    module = nn.Module()
    module.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(11))
    module.register_buffer("bytes", torch.zeros(3, dtype=torch.uint8))
    module.register_buffer("wide", torch.zeros(1, dtype=torch.float64))
    module.register_buffer("narrow", torch.zeros(1, dtype=torch.float16))
    expected = ["wide", *(f"layers.{index}.weight" for index in range(11)), "narrow", "bytes"]
    assert expected == names(module)
    assert 8 + 11 * 4 + 2 + 3 == capture(module).layout.image_bytes


def test_adjacent_views_are_separate_regions() -> None:
    """A model allocated in one buffer has the layout of one allocated tensor by tensor."""
    cut, allocated = nn.Module(), nn.Module()
    cut.items = [*torch.split(torch.zeros(8), 4)][::-1]  # type: ignore[assignment]
    allocated.items = [torch.zeros(4), torch.zeros(4)]  # type: ignore[assignment]
    assert capture(cut).layout.layout_id == capture(allocated).layout.layout_id


def test_storages_over_the_same_memory_are_captured_once() -> None:
    """Tensors that share memory without sharing a storage object are aliases too."""
    raw = bytearray(16)
    module = nn.Module()
    module.items = [torch.frombuffer(raw, dtype=torch.int32), torch.frombuffer(raw, dtype=torch.int64)]  # type: ignore[assignment]
    assert 16 == capture(module).layout.image_bytes


def test_partly_overlapping_storages_are_rejected() -> None:
    """Memory that no single storage covers cannot be captured as one region."""
    raw = memoryview(bytearray(24))
    module = nn.Module()
    module.items = [
        torch.frombuffer(raw[:16], dtype=torch.int64),
        torch.frombuffer(raw[8:], dtype=torch.int64),
    ]  # type: ignore[assignment]
    with pytest.raises(UnsupportedTensor, match="another storage"):
        capture(module)


def test_strides_of_single_element_dimensions_do_not_matter() -> None:
    """Layouts that differ only in the strides of such dimensions are equal."""
    one, two = nn.Module(), nn.Module()
    one.weight, two.weight = torch.zeros(1, 5), torch.zeros(5).as_strided((1, 5), (1, 1))
    assert capture(one).layout == capture(two).layout


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.zeros(2, device="meta"), "device meta"),
        (lambda: torch.zeros(2, 2).to_sparse(), "sparse_coo"),
        (lambda: torch.zeros(2, 2).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "quantized"),
        (lambda: nn.UninitializedParameter(), "lazy"),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "conjugate"),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj().imag, "negative"),
        (lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]), "nested"),
        (lambda: shrunk(torch.zeros(4)), "storage has 4 bytes"),
        (lambda: FakeTensorMode().from_tensor(torch.zeros(2)), "placeholder"),
    ],
    ids=["meta", "coo", "csr", "quantized", "lazy", "conj", "neg", "nested", "shrunk", "fake"],
)
def test_tensors_without_bytes_are_rejected_by_name(make: Any, reason: str) -> None:
    """The error names the tensor and the reason."""
    module = nn.Module()
    module.layer = nn.Module()
    module.layer.weight = make()
    with pytest.raises(UnsupportedTensor, match=rf"'layer\.weight'.*{reason}"):
        capture(module)


def shrunk(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(4)
    return tensor


@pytest.mark.parametrize(
    ("itemsize", "length", "expected"),
    [(4, 12, 4), (16, 24, 8), (8, 3, 1), (1, 64, 1), (2, 2, 2), (16, 160, 16)],
)
def test_alignment_divides_the_length(itemsize: int, length: int, expected: int) -> None:
    """A region's alignment is at most its widest item and divides its length."""
    assert expected == alignment_of(np.array(itemsize), np.array(length))


def test_the_natural_order_sorts_numbers_by_value() -> None:
    """Names with equal numbers still have a defined order."""
    assert ["a", "a.2", "a.02.b", "a.10", "b"] == sorted(["b", "a.10", "a.02.b", "a.2", "a"], key=natural_sort_key)
