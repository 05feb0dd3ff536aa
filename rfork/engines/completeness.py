"""Proof that an image is complete, based on the memory that was allocated while the model was built.

Every block allocated during the build must belong to a tensor of the model or to scratch memory known by
name. Any other block may hold weights that capture cannot see; such a model is neither forked nor used as a
seed. Runs on the source and on the target. On a GPU, the blocks are those of torch's CUDA allocator. On the
CPU they are the memory of all tensors that Python refers to. Memory referenced only from C++ is not seen
there; capture rejects the objects known to hold such memory (packed weights, script modules).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import compress
from operator import methodcaller
from types import TracebackType
from typing import Any, Final, cast
from weakref import ref

import torch
from torch import nn
from typing_extensions import Self

from rfork.errors import ALL_TENSORS, UnsupportedTensor
from rfork.image.layout import byte_extent
from rfork.image.module_tensors import plain_tensors, state_of_module
from rfork.image.ranges import intersect, normalise, subtract

TOLERANCE: Final = 0.01
"""Fraction of the growth that may stay unexplained."""
MIN_UNEXPLAINED_BYTES: Final = 64 << 10
"""Smaller amounts are never weights: they are small constants of kernels."""
SCRATCH: Final = ("*workspace*", "*scratch*", "*kv_cache*", "*_buffer", "*_buffers", "*cos_sin_cache*")
"""Name patterns of variables outside the model that hold no weights."""
MAX_CANDIDATES: Final = 3
"""Maximum number of candidate variables named in an error."""

Blocks = Mapping[int, int]
"""Allocated memory blocks: size in bytes by address."""
Spans = Sequence[tuple[int, int]]
"""Address ranges as (begin, end)."""


def unexplained(before: Blocks, after: Blocks, explained: Iterable[tuple[int, int]]) -> Spans:
    """Return the unexplained parts of the added blocks, or nothing if they are within the tolerance."""
    grown = normalise((address, address + length) for address, length in after.items() if before.get(address) != length)
    missing = subtract(grown, normalise(sorted(explained)))
    growth, missing_bytes = _bytes(grown), _bytes(missing)
    return missing if missing_bytes > max(MIN_UNEXPLAINED_BYTES, growth * TOLERANCE) else ()


class Completeness:
    """Completeness proof of one model: create it before the build, call `check` after it.

    As a context manager around both, it exempts the existing objects from garbage collection and from the search for
    tensors. Scanning the million objects of an engine's imported modules takes as long as building an empty model, so
    the first proof of a process only searches the objects created since `scan_early`, if that was called.
    """

    def __init__(self) -> None:
        scanned = _early_scan.pop()
        self._has_frozen = scanned is not None
        self._earlier_tensors: Sequence[ref[torch.Tensor]] = scanned or ()
        self._before = allocations(self._first_tensors)

    def __enter__(self) -> Self:
        # Otherwise frozen by other code, which must also unfreeze it.
        if self._has_frozen or not gc.get_freeze_count():
            gc.freeze()
            self._has_frozen = True
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unfreeze()

    def check(self, module: nn.Module) -> None:
        """Raise UnsupportedTensor if building `module` allocated memory that none of its tensors explains."""
        missing = self._missing(module)
        if missing:
            self._unfreeze()  # frozen garbage is not collected, and frozen variables are not found
            _collect()
            missing = self._missing(module)
        if not missing:
            return
        spans = dict(_variables_in(missing))
        scratch = [span for name, span in spans.items() if any(fnmatchcase(name, each) for each in SCRATCH)]
        missing = self._missing(module, scratch)
        if missing:
            names = [name for name, span in spans.items() if span not in scratch]
            raise UnsupportedTensor(
                ALL_TENSORS, _describe(missing, names), hint="report the model and the engine's options as a bug"
            )

    def _unfreeze(self) -> None:
        if self._has_frozen:
            self._has_frozen = False
            gc.unfreeze()

    def _first_tensors(self) -> Sequence[torch.Tensor]:
        tensors = list(self._tensors())
        self._earlier_tensors = [ref(tensor) for tensor in tensors]
        return tensors

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors from before the build, whose memory may have changed, and the new ones."""
        for earlier in self._earlier_tensors:
            if (tensor := earlier()) is not None:
                yield tensor
        yield from _live_tensors()

    def _missing(self, module: nn.Module, extra_spans: Iterable[tuple[int, int]] = ()) -> Spans:
        after = allocations(self._tensors)
        if not after:
            return ()
        # Parameters and buffers usually explain everything, and are found in a tenth of the time of all tensors.
        if not unexplained(self._before, after, [*spans_of(registered_tensors(module)), *extra_spans]):
            return ()
        return unexplained(self._before, after, [*spans_of(all_tensors(module)), *extra_spans])


class _EarlyScan:
    """The tensors that existed when the process's objects were frozen, until the first proof uses them."""

    def __init__(self) -> None:
        self._tensors: Sequence[ref[torch.Tensor]] | None = None

    def run(self) -> None:
        """See `scan_early`."""
        if torch.backends.cuda.is_built() or gc.get_freeze_count():  # type: ignore[no-untyped-call]
            return
        # One call into C: no other thread creates a tensor between the two, which would be frozen and not in the list.
        objects, _ = map(methodcaller("__call__"), (gc.get_objects, gc.freeze))
        self._tensors = [ref(tensor) for tensor in _tensors_among(objects)]

    def pop(self) -> Sequence[ref[torch.Tensor]] | None:
        """Return the tensors, once; None if there was no scan.

        If other code has unfrozen the objects since, the proof finds their tensors once more. Counting them would take
        as long as the search.
        """
        tensors, self._tensors = self._tensors, None
        return tensors


_early_scan: Final = _EarlyScan()


def scan_early() -> None:
    """Search the process's objects for tensors while nothing waits for it, on any thread, and freeze them.

    The next `Completeness` unfreezes them. Does nothing if torch has CUDA, whose allocator lists its memory, or if
    other code has frozen the objects.
    """
    _early_scan.run()


def registered_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a module: a part of `all_tensors`."""
    for submodule in module.modules():
        for registry in (submodule._parameters, submodule._buffers):
            for tensor in registry.values():
                if tensor is not None:
                    yield from plain_tensors(tensor)


def all_tensors(module: nn.Module) -> Iterable[torch.Tensor]:
    """Return each tensor found in a module, including tensors that the image excludes."""
    return state_of_module(module).tensors.values()


def spans_of(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the memory range of each tensor that has one."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            if tensor.layout is torch.strided and (begin := _address(tensor)):
                yield begin, begin + byte_extent(tensor.shape, tensor.stride(), tensor.itemsize)


def allocations(tensors: Callable[[], Iterable[torch.Tensor]]) -> Blocks:
    """Return the memory in use: blocks of torch's CUDA allocator, or those of `tensors` if CUDA is not in use.

    Returns nothing if torch's CUDA allocator has been replaced.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return host_blocks(tensors())
    try:
        snapshot: Sequence[Mapping[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return {}
    return blocks_of(snapshot)


def blocks_of(snapshot: Iterable[Mapping[str, Any]]) -> Blocks:
    """Return the active blocks of a torch memory snapshot with their requested sizes."""
    return {
        int(block["address"]): int(block.get("requested_size", block["size"]))
        for segment in snapshot
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def host_blocks(tensors: Iterable[torch.Tensor]) -> Blocks:
    """Return the host memory of tensors: the bytes that each one covers, by address.

    Storages are not used, because a tensor may be a small part of a file that is mapped as one storage.
    """
    blocks: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            if tensor.device.type == "cpu" and tensor.layout is torch.strided and (address := _address(tensor)):
                length = byte_extent(tensor.shape, tensor.stride(), tensor.itemsize)
                blocks[address] = max(length, blocks.get(address, 0))
    return blocks


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # no memory of its own
        return 0


def _live_tensors() -> Iterator[torch.Tensor]:
    """Return the tensors that the garbage collector lists: not the frozen ones."""
    return _tensors_among(gc.get_objects())


def _tensors_among(objects: Sequence[object]) -> Iterator[torch.Tensor]:
    # An engine has a million objects, so types are compared. `isinstance` would also run the code of proxy objects.
    return cast(Iterator[torch.Tensor], compress(objects, map(_tensor_types().__contains__, map(type, objects))))


def _tensor_types() -> set[type[torch.Tensor]]:
    """Return torch.Tensor and all its subclasses."""
    found: set[type[torch.Tensor]] = set()
    added = {torch.Tensor}
    while added:
        found |= added
        added = {each for parent in added for each in type.__subclasses__(parent)} - found
    return found


def _variables_in(missing: Spans) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name and memory range of each Python variable whose tensor overlaps `missing`."""
    for value in _live_tensors():
        try:
            with torch._C.DisableTorchFunctionSubclass():
                storage = value.untyped_storage()
            span = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        except (RuntimeError, NotImplementedError):  # no memory of its own
            continue
        if intersect([span], missing):
            for name in _names_of(value):
                yield name, span


def _names_of(value: object) -> Iterator[str]:
    for referrer in gc.get_referrers(value):
        if isinstance(referrer, dict):
            keys = [str(key) for key, attribute in referrer.items() if attribute is value]
            owner = str(referrer.get("__name__") or _owner_of(referrer))
            yield from (f"{owner}.{key}" for key in keys)


def _owner_of(attributes: dict[Any, Any]) -> str:
    for owner in gc.get_referrers(attributes):
        if getattr(owner, "__dict__", None) is attributes:
            return f"{type(owner).__module__}.{type(owner).__qualname__}"
    return "dict"


def _collect() -> None:
    """Free unreferenced objects and the workspaces that torch keeps for its libraries."""
    gc.collect()
    clear: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        with contextlib.suppress(RuntimeError):
            clear()


def _describe(missing: Spans, names: Sequence[str]) -> str:
    max_bytes = max(end - begin for begin, end in missing)
    candidates = ", ".join(sorted(names)[:MAX_CANDIDATES])
    owners = f"referenced by {candidates}" if names else "not referenced by any Python tensor"
    blocks = "one block" if len(missing) == 1 else f"{len(missing)} blocks, the largest of {max_bytes} bytes"
    return (
        f"building it allocated {_bytes(missing)} bytes ({blocks}) that belong to none of its tensors and may be "
        f"weights, {owners}"
    )


def _bytes(spans: Iterable[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in spans)
