"""Proof that an image is everything a model serves with: the memory that building the model took.

All memory that was added while the model was built is a tensor of the model, or scratch that is known by
name. Anything else may be weights in a place that capture cannot see: such a model is not forked, and is no
seed. Runs on source and target. On a GPU, memory is what torch's CUDA allocator handed out. On the CPU it is
the memory of all tensors that Python refers to; what only C++ refers to is not seen there, and capture
refuses the objects that are known to hold such memory (packed weights, script modules).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn

from rfork.errors import UnsupportedTensor
from rfork.image.module_tensors import state_of_module
from rfork.image.ranges import intersect, normalise, subtract
from rfork.image.strides import byte_extent

TOLERANCE: Final = 0.01
"""Part of the growth that need not be explained."""
MIN_UNEXPLAINED_BYTES: Final = 64 << 10
"""Less than this is never weights: small constants of kernels."""
SCRATCH: Final = ("*workspace*", "*scratch*", "*kv_cache*", "*_buffer", "*_buffers", "*cos_sin_cache*")
"""Patterns of names of variables outside the model that hold no weights."""
MAX_CANDIDATES: Final = 3
"""Candidates that an error names."""

Blocks = Mapping[int, int]
"""Memory that an allocator has handed out: bytes by address."""
Spans = Sequence[tuple[int, int]]
"""Ranges of addresses: begin, end."""


def unexplained(before: Blocks, after: Blocks, explained: Iterable[tuple[int, int]]) -> Spans:
    """Return the parts of added blocks that are not explained; none where they are within tolerance."""
    grown = normalise((address, address + length) for address, length in after.items() if before.get(address) != length)
    missing = subtract(grown, normalise(sorted(explained)))
    growth, lacking = _bytes(grown), _bytes(missing)
    return missing if lacking > max(MIN_UNEXPLAINED_BYTES, growth * TOLERANCE) else ()


class Completeness:
    """Proof for one model: made before it is built, checked once it stands."""

    def __init__(self) -> None:
        self._before = allocations()

    def check(self, module: nn.Module) -> None:
        """Raise UnsupportedTensor where building `module` took memory that no tensor of it explains."""
        missing = self._missing(module)
        if missing:
            _collect()
            missing = self._missing(module)
        if not missing:
            return
        holders = dict(_holders(missing))
        scratch = [span for name, span in holders.items() if any(fnmatchcase(name, each) for each in SCRATCH)]
        missing = self._missing(module, scratch)
        if missing:
            names = [name for name, span in holders.items() if span not in scratch]
            raise UnsupportedTensor("(all)", _describe(missing, names), hint="report the model and its options")

    def _missing(self, module: nn.Module, also: Iterable[tuple[int, int]] = ()) -> Spans:
        after = allocations()
        if not after:
            return ()
        return unexplained(self._before, after, [*spans_of(module), *also])


def spans_of(module: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield the memory of each tensor that is found in a module, of those that an image leaves out too."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for tensor in state_of_module(module).tensors.values():
            if tensor.layout is torch.strided and tensor.data_ptr():
                begin = tensor.data_ptr()
                yield begin, begin + byte_extent(tensor.shape, tensor.stride(), tensor.itemsize)


def allocations() -> Blocks:
    """Return the memory in use: of torch's CUDA allocator, or of tensors where CUDA is not used.

    Empty where another allocator took the place of torch's.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return host_tensors()
    try:
        snapshot: Sequence[Mapping[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return {}
    return blocks_of(snapshot)


def blocks_of(snapshot: Iterable[Mapping[str, Any]]) -> Blocks:
    """Return the blocks in use of a snapshot of torch's, by the bytes that were asked for."""
    return {
        int(block["address"]): int(block.get("requested_size", block["size"]))
        for segment in snapshot
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def host_tensors() -> Blocks:
    """Return the host memory of all tensors that Python refers to: the bytes that each covers, by address.

    Not their storages: a tensor may be a small part of a file that is mapped as one storage.
    """
    blocks: dict[int, int] = {}
    for tensor in _live_tensors():
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and (address := _address(tensor)):
            length = byte_extent(tensor.shape, tensor.stride(), tensor.itemsize)
            blocks[address] = max(length, blocks.get(address, 0))
    return blocks


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # without memory of its own
        return 0


def _live_tensors() -> Iterator[torch.Tensor]:
    with torch._C.DisableTorchFunctionSubclass():
        # By the type: `isinstance` runs code of objects that stand for others.
        yield from (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))


def _holders(missing: Spans) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the memory of tensors that Python knows in `missing`, by the variables that hold them."""
    for value in _live_tensors():
        try:
            storage = value.untyped_storage()
            span = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        except (RuntimeError, NotImplementedError):  # without memory of its own
            continue
        if intersect([span], missing):
            for name in _names_of(value):
                yield name, span


def _names_of(value: object) -> Iterator[str]:
    for holder in gc.get_referrers(value):
        if isinstance(holder, dict):
            keys = [str(key) for key, attribute in holder.items() if attribute is value]
            owner = str(holder.get("__name__") or _owner_of(holder))
            yield from (f"{owner}.{key}" for key in keys)


def _owner_of(attributes: dict[Any, Any]) -> str:
    for owner in gc.get_referrers(attributes):
        if getattr(owner, "__dict__", None) is attributes:
            return f"{type(owner).__module__}.{type(owner).__qualname__}"
    return "dict"


def _collect() -> None:
    """Free what nothing refers to, and the workspaces that torch keeps for its libraries."""
    gc.collect()
    clear: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        with contextlib.suppress(RuntimeError):
            clear()


def _describe(missing: Spans, names: Sequence[str]) -> str:
    max_bytes = max(end - begin for begin, end in missing)
    candidates = ", ".join(sorted(names)[:MAX_CANDIDATES])
    owners = f"held by {candidates}" if names else "which no tensor of Python's holds"
    return (
        f"building it took {_bytes(missing)} bytes of memory that are no tensor of the model "
        f"({len(missing)} blocks, the largest of {max_bytes} bytes), {owners}"
    )


def _bytes(spans: Iterable[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in spans)
