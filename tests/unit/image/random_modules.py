"""Random modules, built from recipes, so that two equal modules can be built from one recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import nn

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64,
    torch.complex32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16,
    torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.bits8, torch.bits16,
    *(getattr(torch, name) for name in ("uint1", "uint4", "int4")),  # not in torch's type stubs
)  # fmt: skip

AttachmentPoint = Literal[
    "parameter", "buffer", "non-persistent", "attribute", "list", "nested", "on-parameter", "child"
]
Form = Literal["fresh", "offset", "permuted", "gaps", "tied", "overlap"]


@dataclass(frozen=True)
class Ingredient:
    """One tensor: its location in the module, its type and shape, and its memory layout."""

    attachment_point: AttachmentPoint
    form: Form
    dtype: torch.dtype
    shape: tuple[int, ...]


Recipe = list[Ingredient]

recipes: st.SearchStrategy[Recipe] = st.lists(
    st.builds(
        Ingredient,
        st.sampled_from(AttachmentPoint.__args__),  # type: ignore[attr-defined]
        st.sampled_from(Form.__args__),  # type: ignore[attr-defined]
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=12,
)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return a tensor of random bits."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape, _row_major(shape))


def build(recipe: Recipe, seed: int) -> nn.Module:
    """Return the module of `recipe`, with random bits determined by `seed`."""
    generator = torch.Generator().manual_seed(seed)
    root = nn.Module()
    root.items = []  # type: ignore[assignment]
    root.tree = {"leaves": ([], {})}  # type: ignore[assignment]
    last: torch.Tensor | None = None
    for index, ingredient in enumerate(recipe):
        last = tensor = _tensor(ingredient, last, generator)
        _attach(root, f"t{index}", ingredient.attachment_point, tensor)
    return root


def _tensor(ingredient: Ingredient, last: torch.Tensor | None, generator: torch.Generator) -> torch.Tensor:
    dtype, shape = ingredient.dtype, ingredient.shape
    count = torch.Size(shape).numel()
    match ingredient.form:
        case "tied" if last is not None:
            return last
        case "overlap" if last is not None and last.numel():
            return torch.empty(0, dtype=last.dtype).set_(last.untyped_storage(), int(last.storage_offset()), (1,), (1,))
        case "offset":
            return random_tensor(dtype, (count + 3,), generator).as_strided(shape, _row_major(shape), 3)
        case "permuted":
            contiguous = random_tensor(dtype, shape, generator)
            return contiguous.permute(tuple(reversed(range(len(shape)))))
        case "gaps":
            stride = tuple(2 * step for step in _row_major(shape))
            return random_tensor(dtype, (2 * count + 1,), generator).as_strided(shape, stride)
    return random_tensor(dtype, shape, generator)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.Size(shape[index + 1 :]).numel() for index in range(len(shape)))


def _attach(root: nn.Module, name: str, attachment_point: AttachmentPoint, tensor: torch.Tensor) -> None:
    match attachment_point:
        case "parameter":
            root.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        case "buffer":
            root.register_buffer(name, tensor)
        case "non-persistent":
            root.register_buffer(name, tensor, persistent=False)
        case "attribute":
            setattr(root, name, tensor)
        case "list":
            root.items.append(tensor)  # type: ignore[union-attr, operator]
        case "nested":
            root.tree["leaves"][1][name] = [tensor]  # type: ignore[index, assignment]
        case "on-parameter":
            owner = nn.Parameter(torch.zeros(1))
            owner.scale = tensor  # type: ignore[attr-defined]
            root.register_parameter(name, owner)
        case "child":
            child = nn.Module()
            child.register_buffer("weight", tensor)
            root.add_module(name, child)


def element_bytes(tensor: torch.Tensor) -> list[bytes]:
    """Return the bytes of each element in index order, for bit equality of any dtype and strides."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.dtype.itemsize == 16:
        tensor = torch.view_as_real(tensor)
    plain = torch.empty(0, dtype=words[tensor.dtype.itemsize]).set_(
        tensor.untyped_storage(), int(tensor.storage_offset()), tensor.shape, tensor.stride()
    )
    size = plain.dtype.itemsize
    return [int(word).to_bytes(size, "little", signed=size > 1) for word in plain.flatten().tolist()]
