"""Recorder of an engine's weight loading: from tensors without bytes to a placement map.

An engine builds an empty twin of its model (on the meta device, for instance) and loads `RecordedTensor` objects
instead of a checkpoint's tensors::

    with Recorder() as recorder:
        model.load_weights((name, recorder.tensor(name, dtype, shape)) for name, dtype, shape in checkpoint)
    placement_map = recorder.placement_map(dict(model.named_parameters()))

A recorded tensor follows views, copies that change no value, and concatenation. The result of any other operation is
*computed*: it has a shape and a dtype, but its elements are not elements of the checkpoint. A copy into a plain tensor
is recorded for the storage that it writes; later writes replace earlier ones. While the recorder is active, it also
sees in-place operations on plain tensors, such as a loader that scales a parameter after loading it. It keeps every
storage that is written alive until it is deleted itself.

Copies between plain tensors are not followed: the copy counts as computed, and so does what post-processing creates
from loaded tensors. A loader that reads values (``tensor.item()``) cannot be recorded: that raises UnsupportedTensor.
The value of a tensor with one element may be written into a plain tensor with `fill_`, as SGLang does, only.

The map also names the checkpoint tensors with elements that flow into anything but its rows (`read_completely`):
loading with the elements of the rows alone would compute other values from them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from typing_extensions import Self

from rfork.errors import ALL_TENSORS, UnsupportedTensor
from rfork.gc_pause import gc_paused
from rfork.placement.checkpoint_view import CheckpointTensor, CheckpointView, Factors, Piece, concatenated
from rfork.placement.own_tensor import OwnTensor, Write, append_rows
from rfork.placement.placement_map import FILL_OPERATIONS, PlacementMap, PlacementMapBuilder, TensorType
from rfork.placement.strided import Loop, NotStridedError, Region, contiguous_strides

aten = torch.ops.aten
CPU = torch.device("cpu")
META = torch.device("meta")


class RecordedTensor(torch.Tensor):
    """Tensor without bytes whose elements are elements of checkpoint tensors, or the result of an operation."""

    recorder: Recorder
    checkpoint_view: CheckpointView | None
    operation: str
    """Operation that computed the elements if there is no view."""
    _sizes: tuple[int, ...]
    _steps: tuple[int, ...]
    """Strides, in elements."""
    _type: torch.dtype

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        recorder: Recorder,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        view: CheckpointView | None,
        operation: str = "",
    ) -> RecordedTensor:
        """Create a tensor on the CPU, as checkpoint readers do."""
        tensor: RecordedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=CPU
        )
        tensor.recorder = recorder
        tensor.checkpoint_view = view
        tensor.operation = operation
        tensor._sizes, tensor._steps, tensor._type = tuple(shape), tuple(strides), dtype
        return tensor

    def __init__(self, *_: object) -> None:
        """Do nothing: `__new__` sets the attributes."""

    @classmethod
    def like(
        cls, recorder: Recorder, meta: torch.Tensor, view: CheckpointView | None, operation: str = ""
    ) -> RecordedTensor:
        """Create a tensor with the shape, strides and dtype of another one."""
        return cls(recorder, meta.shape, meta.stride(), meta.dtype, view, operation)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Without an active recorder, for instance in another thread.
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, RecordedTensor):
                return value.recorder.dispatch(func, args, kwargs or {})
        return NotImplemented

    # What loaders use for each tensor, without a pass through torch. Everything else is dispatched.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Size of each dimension."""
        return torch.Size(self._sizes)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Type of the elements."""
        return self._type

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dimensions."""
        return len(self._sizes)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self._sizes)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of one dimension."""
        return torch.Size(self._sizes) if dim is None else self._sizes[dim]

    def narrow(self, dim: Any, start: Any, length: Any) -> torch.Tensor:
        """Return the indices of one dimension from `start`."""
        sizes, view = self._sizes, self.checkpoint_view
        if view is None or type(dim) is not int or type(start) is not int or type(length) is not int:
            return super().narrow(dim, start, length)
        if not -len(sizes) <= dim < len(sizes) or start < 0 or length < 0 or start + length > sizes[dim]:
            return super().narrow(dim, start, length)
        if length == sizes[dim]:
            return self
        dim %= len(sizes)
        part = view.narrowed(dim, start, start + length)
        return RecordedTensor(self.recorder, part.shape, self._steps, self._type, part)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the element of the first dimension at an index, or what another index selects."""
        sizes, view = self._sizes, self.checkpoint_view
        if type(index) is not int or view is None or not sizes or not -sizes[0] <= index < sizes[0]:
            return super().__getitem__(index)
        part = _select(view, 0, index)
        return RecordedTensor(self.recorder, part.shape, self._steps[1:], self._type, part)

    def item(self) -> Any:
        """Return what stands for the value of a tensor with one element."""
        if self.checkpoint_view is None or self.numel() != 1:
            return super().item()
        return RecordedValue(self)

    def t(self) -> torch.Tensor:
        """Return the transposed matrix."""
        view = self.checkpoint_view
        if view is None or len(self._sizes) != 2:
            return super().t()
        part = _t(view)
        return RecordedTensor(self.recorder, part.shape, self._steps[::-1], self._type, part)

    def __repr__(self) -> str:  # type: ignore[override]
        content = self.operation or ", ".join(sorted(self.checkpoint_names()))
        return f"RecordedTensor({list(self.shape)}, {self.dtype}, {content})"

    def checkpoint_names(self) -> set[str]:
        """Return the names of the checkpoint tensors that the tensor consists of."""
        return {piece.tensor.name for piece in self.checkpoint_view.pieces} if self.checkpoint_view else set()


class RecordedValue:
    """Value of a tensor with one element, which a loader may only write into a plain tensor with `fill_`.

    Everything else that Python or torch could do with a number raises UnsupportedTensor.
    """

    def __init__(self, tensor: RecordedTensor) -> None:
        self._tensor = tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record a write of the value."""
        value = next((each for each in args if type(each) is cls), None)
        destination: Any = args[0] if args else None
        is_fill = func is torch.Tensor.fill_ and len(args) == 2 and value is args[1] and not kwargs
        if value is None or not is_fill or isinstance(destination, RecordedTensor):
            raise UnsupportedTensor(ALL_TENSORS, f"the loader reads a value by {getattr(func, '__name__', 'item')}")
        with torch._C.DisableTorchFunctionSubclass():
            return value._tensor.recorder.fill(destination, value._tensor)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Class of the value, for a loader that distinguishes numbers from tensors."""
        dtype = self._tensor.dtype
        return float if dtype.is_floating_point else bool if dtype is torch.bool else int

    def _read(self, *_: object) -> Any:
        raise UnsupportedTensor(_first_name([self._tensor]), "the loader reads its values by item")

    __hash__ = __repr__ = __str__ = __format__ = _read
    __bool__ = __int__ = __float__ = __index__ = __complex__ = __round__ = __trunc__ = __floor__ = __ceil__ = _read
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _read
    __neg__ = __pos__ = __abs__ = __invert__ = _read
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _read
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _read
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _read
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _read
    __getattr__ = _read


class _WriteLog:
    """Writes to storages, in the order in which they happen.

    Kept in columns: an object per write, until the end of a recording, would slow down Python's garbage collector.
    """

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        """Storages that are written, by key. Kept, so that no other storage gets the key of one."""
        self._keys: list[int] = []
        self._tensors: list[CheckpointTensor | None] = []
        self._operations: list[str] = []
        self._checkpoint_offsets: list[int] = []
        self._own_offsets: list[int] = []
        self._loops: list[tuple[Loop, ...]] = []
        self._itemsizes: list[int] = []
        self._read_ends: dict[int, int] = {}
        """Number of writes, to any storage, before the last operation that read a storage."""

    def append(self, storage: torch.UntypedStorage, write: Write) -> None:
        """Append a write to a storage."""
        key = storage._cdata
        if key not in self.storages:
            self.storages[key] = storage
        tensor, operation, (checkpoint_offset, own_offset, loops), itemsize = write
        self._keys.append(key)
        self._tensors.append(tensor)
        self._operations.append(operation)
        self._checkpoint_offsets.append(checkpoint_offset)
        self._own_offsets.append(own_offset)
        self._loops.append(loops)
        self._itemsizes.append(itemsize)

    def note_read(self, key: int) -> None:
        """Note that an operation reads a storage."""
        self._read_ends[key] = len(self._keys)

    def by_storage(self) -> Callable[[int], list[int]]:
        """Return a function that returns the indices of the writes to a storage, in their order."""
        keys = np.array(self._keys, dtype=np.int64)
        order = np.argsort(keys, kind="stable")
        found, firsts = np.unique(keys[order], return_index=True)
        first_of = dict(zip(found.tolist(), pairwise([*firsts.tolist(), len(keys)]), strict=True))
        indices: list[int] = order.tolist()

        def indices_of(key: int) -> list[int]:
            begin, end = first_of.get(key, (0, 0))
            return indices[begin:end]

        return indices_of

    def write(self, index: int) -> Write:
        """Return the write at an index."""
        region = Region(self._checkpoint_offsets[index], self._own_offsets[index], self._loops[index])
        return Write(self._tensors[index], self._operations[index], region, self._itemsizes[index])

    def was_read(self, index: int) -> bool:
        """Return True if an operation has read the storage after the write at an index."""
        return index < self._read_ends.get(self._keys[index], 0)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which a loader runs, and the record of its writes. Not thread-safe."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shortcut = _PlainViews(self)
        self._depth = 0
        self._checkpoint: dict[str, CheckpointTensor] = {}
        self._log = _WriteLog()
        self._read_by_operations: set[str] = set()
        """Names of checkpoint tensors with elements that reached an operation which is not followed."""
        self._thread = threading.get_ident()
        self._collector: AbstractContextManager[None] = nullcontext()
        self._at_end = False
        self._only_copies = True

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        if not self._depth:  # it is entered again for the parts of an operation
            self._shortcut.__enter__()  # type: ignore[no-untyped-call]
            self._collector = gc_paused()  # writes stay until the map is made
            self._collector.__enter__()
        self._depth += 1
        return self

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._collector.__exit__(*error)
            self._shortcut.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled while recording, and importing the compiler would take seconds."""
        return False

    def tensor(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> RecordedTensor:
        """Return a tensor that stands for a checkpoint tensor. Each name is created once."""
        if name in self._checkpoint:
            raise ValueError(f"checkpoint tensor {name} was created before")
        identity = CheckpointTensor(name, _dtype_name(dtype), dtype.itemsize, tuple(shape))
        self._checkpoint[name] = identity
        return RecordedTensor(self, identity.shape, _strides(identity.shape), dtype, CheckpointView.of(identity))

    def end_checkpoint(self) -> None:
        """Note that the loader has requested a tensor after the last one of the checkpoint."""
        self._at_end = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record one operation and return its result."""
        if types:
            return self.dispatch(func, args, kwargs or {})
        return self._dispatch_plain(func, args, kwargs or {})

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record one operation and return its result. The mode must not be active."""
        if func is aten.copy_.default and isinstance(args[1], RecordedTensor):
            return self.copy(args[0], args[1])
        follow = FOLLOWED.get(func)
        if follow is not None and _has_recorded(args):
            try:
                return follow(self, func, args, kwargs)
            except NotStridedError as error:
                return self._computed(func, args, kwargs, f"{_operation(func)}: {error}")
        if _has_recorded(args) or _has_recorded(tuple(kwargs.values())):
            if _effect(func).is_composite:
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return self._computed(func, args, kwargs, _operation(func))
        return self._dispatch_plain(func, args, kwargs)

    def _dispatch_plain(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation on plain tensors, and record the values that it computes."""
        effect = _effect(func)
        if effect.is_composite and self._log.storages:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        used: set[int] = set()
        if self._log.storages and (effect.written or effect.creates_tensors):
            used = self._mark_read(func, args, kwargs)
        if effect.written:
            self._mark_written(func, args, kwargs, _operation(func))
        result = func(*args, **kwargs)
        if effect.creates_tensors and used:
            self._mark_results(func, used, result)
        return result

    def copy(self, destination: torch.Tensor, source: RecordedTensor) -> torch.Tensor:
        """Record a copy. Returns the destination."""
        if isinstance(destination, RecordedTensor):
            self._modify(destination, "copy_")
            self.note_read(source)
            return destination
        view = source.checkpoint_view
        if view is None:
            self._mark(destination, source.operation)
        elif source.dtype != destination.dtype:
            self.note_read(source)
            self._mark(destination, f"copy_ from {_dtype_name(source.dtype)} to {_dtype_name(destination.dtype)}")
        else:
            shape = tuple(destination.shape)
            if view.shape != shape:
                missing = len(shape) - len(view.shape)
                if missing < 0 or (1,) * missing + view.shape != shape:
                    self.note_read(source)
                    self._mark(destination, "copy_ with broadcast")
                    return destination
                view = view.reshaped(shape)
            modified = next((piece.tensor.modified_by for piece in view.pieces if piece.tensor.modified_by), "")
            if modified:
                self.note_read(source)
                self._mark(destination, modified)
            else:
                strides, offset = destination.stride(), int(destination.storage_offset())
                itemsize = destination.itemsize
                for piece in view.pieces:
                    self._record(destination, _write(piece, strides, offset, itemsize))
        return destination

    def fill(self, destination: torch.Tensor, source: RecordedTensor) -> torch.Tensor:
        """Record that a tensor is filled with the only element of another one. Returns the destination."""
        if destination.numel() == 1 and destination.dtype == source.dtype:
            view = cast(CheckpointView, source.checkpoint_view).reshaped(destination.shape)
            return self.copy(destination, RecordedTensor(self, view.shape, _strides(view.shape), source.dtype, view))
        self.note_read(source)
        self._mark(destination, "fill_ with a loaded value")
        return destination

    def note_read(self, *tensors: RecordedTensor) -> None:
        """Note that elements of checkpoint tensors flow into values that the map does not have."""
        for tensor in tensors:
            self._read_by_operations |= tensor.checkpoint_names()

    def _modify(self, tensor: RecordedTensor, operation: str) -> None:
        """Record an in-place operation on a recorded tensor, and so on all tensors that may share its memory."""
        self.note_read(tensor)
        # A constant does not fill the complete checkpoint tensor.
        modified_by = f"{operation} of a loaded tensor" if operation in FILL_OPERATIONS else operation
        if tensor.checkpoint_view is not None:
            for piece in tensor.checkpoint_view.pieces:
                piece.tensor.modified_by = modified_by

    def _record(self, tensor: torch.Tensor, write: Write) -> None:
        """Record a write to a tensor's storage."""
        if self._at_end or threading.get_ident() != self._thread:
            self._only_copies = False
        self._log.append(tensor.untyped_storage(), write)

    def _mark(self, tensor: torch.Tensor, operation: str) -> None:
        """Record that an operation computed all elements of a plain tensor."""
        if 0 in tensor.shape:
            return
        loops = tuple(Loop(size, 0, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
        region = Region(0, int(tensor.storage_offset()), loops)
        self._record(tensor, Write(None, operation, region, tensor.itemsize))

    def _mark_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], operation: str) -> None:
        """Record the arguments that an operation writes."""
        for value in _written_arguments(func, args, kwargs):
            if isinstance(value, RecordedTensor):
                self._modify(value, operation)
            elif operation not in FILL_OPERATIONS or value.untyped_storage()._cdata in self._log.storages:
                self._mark(value, operation)

    def _mark_read(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
        """Record that an operation reads plain tensors. Return the storages that were written before."""
        overwritten = _written_arguments(func, args, kwargs) if _operation(func) in OVERWRITING_OPERATIONS else []
        used: set[int] = set()
        for value in tree_flatten((list(args), dict(kwargs)))[0]:
            if not isinstance(value, torch.Tensor) or isinstance(value, RecordedTensor):
                continue
            if value.layout is torch.strided:
                key = value.untyped_storage()._cdata
                if key in self._log.storages:
                    used.add(key)
                    if not any(value is each for each in overwritten):
                        self._log.note_read(key)
                        self._only_copies = False
        return used

    def _mark_results(self, func: Any, used: set[int], result: Any) -> None:
        """Record that a plain operation computed new tensors from tensors that were loaded."""
        for value in tree_flatten(result)[0]:
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            if value.untyped_storage()._cdata not in used:
                self._mark(value, _operation(func))

    def _computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], operation: str) -> Any:
        """Return the result of an operation that is not followed."""
        if func not in FACTORIES:
            self.note_read(*_recorded((*args, *kwargs.values())))
            self._mark_read(func, args, kwargs)
        self._mark_written(func, args, kwargs, operation)
        written = {id(value): value for value in _written_arguments(func, args, kwargs)}
        if written and len(func._schema.returns) <= 1:
            return next(iter(written.values()))
        try:
            result = _on_meta(func, args, kwargs)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise UnsupportedTensor(_first_name(args), f"the loader reads its values by {operation}") from error
        if func in FACTORIES:
            return result
        if not any(isinstance(value, torch.Tensor) for value in tree_flatten(result)[0]):
            raise UnsupportedTensor(_first_name(args), f"the loader reads its values by {operation}")
        inherited = next((each.operation for each in _recorded(args) if each.checkpoint_view is None), operation)
        return tree_map(
            lambda value: (
                RecordedTensor.like(self, value, None, inherited) if isinstance(value, torch.Tensor) else value
            ),
            result,
        )

    @gc_paused()
    def placement_map(self, tensors: Mapping[str, torch.Tensor]) -> PlacementMap:
        """Return where the recorded writes lie in these own tensors, by name.

        Call it after loading, with all parameters and buffers. A tensor that lies within another one, such as a tied
        head, becomes an alias of it.
        """
        builder = PlacementMapBuilder(only_copies=self._only_copies and self._at_end)
        checkpoint = {
            name: builder.checkpoint.append(name, TensorType(each.dtype, each.itemsize, each.shape))
            for name, each in self._checkpoint.items()
        }
        owners: dict[int, list[OwnTensor]] = {}
        indices_of = self._log.by_storage()
        read = set(self._read_by_operations)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            # Owners come before their aliases.
            described = [(_describe(name, tensor), _storage_key(tensor), tensor) for name, tensor in tensors.items()]
            order = sorted(range(len(described)), key=lambda each: -_extent(described[each][0]))
            alias_of: dict[int, str] = {}
            for position in order:
                own, key, _ = described[position]
                owner = next((each for each in owners.get(key, ()) if _is_within(own, each)), None)
                if owner is None:
                    owners.setdefault(key, []).append(own)
                else:
                    alias_of[position] = owner.name
            for position, (own, key, tensor) in enumerate(described):
                if position in alias_of:
                    builder.aliases[own.name] = alias_of[position]
                    continue
                strides = tuple(step * own.itemsize for step in own.strides)
                index = builder.own.append(own.name, TensorType(own.dtype, own.itemsize, own.shape, strides))
                indices: list[int] = []
                if isinstance(tensor, RecordedTensor):
                    writes = _writes_of_recorded(tensor)
                else:
                    indices = indices_of(key)
                    writes = list(map(self._log.write, indices))
                lost = append_rows(builder, index, own, writes, checkpoint)
                read |= lost.unfollowed
                if lost.replaced:
                    were_read = map(self._log.write, filter(self._log.was_read, indices))
                    read |= lost.replaced.intersection(_names(were_read))
        for key in self._log.storages:
            ranges = [own.byte_range for own in owners.get(key, ())]
            writes_to_storage = map(self._log.write, indices_of(key))
            read.update(_names(write for write in writes_to_storage if not write.overlaps_any(ranges)))
        builder.read_completely.extend(name for name in self._checkpoint if name in read)
        return builder.build()


class _PlainViews(TorchFunctionMode):
    """Shortcut for views of plain tensors, which are not recorded, and for copies of recorded tensors into them.

    Both need no pass through torch's dispatcher, which takes most of the time of a recording. A view has torch's own
    class, as if the loader had used the parameter's data.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one function of torch."""
        if func in PLAIN_FUNCTIONS:
            if _is_plain(args[0].__class__) and (func is not GET_ITEM or _is_basic(args[1])):
                with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
                    return func(*args, **kwargs) if kwargs else func(*args)
        elif (
            func is COPY and len(args) == 2 and type(args[1]) is RecordedTensor and _is_plain(args[0].__class__)
        ) and not kwargs:
            with torch._C.DisableTorchFunctionSubclass():
                return self._recorder.copy(args[0], args[1])
        return func(*args, **(kwargs or {}))


GET_ITEM = torch.Tensor.__getitem__
COPY = torch.Tensor.copy_
ATTRIBUTES = ("shape", "dtype", "ndim", "device", "data", "is_meta")
PLAIN_FUNCTIONS = frozenset(
    {
        torch.Tensor.narrow, GET_ITEM, torch.Tensor.size, torch.Tensor.dim,
        *(cast(Any, getattr(torch.Tensor, name)).__get__ for name in ATTRIBUTES),
    }
)  # fmt: skip
"""Functions that return a view of a tensor, or its type."""


@cache
def _is_plain(tensor_class: Any) -> bool:
    """Return True for tensors whose class changes no operation's values: those of torch, and engines' parameters."""
    if tensor_class is torch.Tensor:
        return True
    is_dispatched = tensor_class.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return issubclass(tensor_class, torch.nn.Parameter) and not is_dispatched


def _is_basic(index: Any) -> bool:
    """Return True for the index of a view."""
    return type(index) is int or type(index) is slice


_strides = cache(contiguous_strides)


def _names(writes: Iterable[Write]) -> set[str]:
    """Return the names of the checkpoint tensors that are written."""
    return {write.tensor.name for write in writes if write.tensor is not None}


def _write(piece: Piece, strides: tuple[int, ...], offset: int, itemsize: int) -> Write:
    """Return the write of a piece to a destination with these strides and this offset."""
    if any(piece.starts):
        offset += sum(start * stride for start, stride in zip(piece.starts, strides, strict=True))
    return Write(piece.tensor, "", Region(piece.offset, offset, _loops(piece.dims, strides)), itemsize)


@lru_cache(maxsize=4096)
def _loops(dims: tuple[Factors, ...], strides: tuple[int, ...]) -> tuple[Loop, ...]:
    """Return the loops over a piece and a destination with these strides."""
    loops: list[Loop] = []
    for factors, stride in zip(dims, strides, strict=True):
        inner = 1
        nested: list[Loop] = []
        for count, step in reversed(factors):
            nested.append(Loop(count, step, stride * inner))
            inner *= count
        loops.extend(reversed(nested))
    return tuple(loops)


def _writes_of_recorded(tensor: RecordedTensor) -> list[Write]:
    """Return the writes that would create a recorded tensor which a loader kept as a parameter."""
    view = tensor.checkpoint_view
    operation = tensor.operation
    if view is not None:
        operation = next((piece.tensor.modified_by for piece in view.pieces if piece.tensor.modified_by), "")
        if not operation:
            return [_write(piece, tensor.stride(), 0, tensor.itemsize) for piece in view.pieces]
    loops = tuple(Loop(size, 0, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return [Write(None, operation, Region(0, 0, loops), tensor.itemsize)]


def _describe(name: str, tensor: torch.Tensor) -> OwnTensor:
    offset = 0 if isinstance(tensor, RecordedTensor) else int(tensor.storage_offset())
    return OwnTensor(
        name, _dtype_name(tensor.dtype), tensor.itemsize, tuple(tensor.shape), tuple(tensor.stride()), offset
    )


def _storage_key(tensor: torch.Tensor) -> int:
    return id(tensor) if isinstance(tensor, RecordedTensor) else int(tensor.untyped_storage()._cdata)


def _extent(own: OwnTensor) -> int:
    begin, end = own.byte_range
    return end - begin


def _is_within(own: OwnTensor, owner: OwnTensor) -> bool:
    """Return True if every byte of a tensor is one of the owner."""
    if own[1:] == owner[1:]:
        return True
    (begin, end), (owner_begin, owner_end) = own.byte_range, owner.byte_range
    elements = 1
    for size in owner.shape:
        elements *= size
    is_dense = owner_end - owner_begin == elements * owner.itemsize
    return is_dense and begin < end and owner_begin <= begin and end <= owner_end


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _operation(func: Any) -> str:
    return str(func._schema.name).split("::")[-1]


class _Effect(NamedTuple):
    written: tuple[tuple[int, str], ...]
    """Position and name of the arguments that an operation writes."""
    creates_tensors: bool
    """True if it returns new tensors whose values depend on its arguments: no views, no arguments."""
    is_composite: bool
    """True if it consists of other operations. In inference mode it arrives undivided."""


@cache
def _effect(func: Any) -> _Effect:
    schema = func._schema
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    creates_tensors = func not in FACTORIES and any(each.alias_info is None for each in schema.returns)
    return _Effect(written, creates_tensors, func._can_decompose())


def _written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    written: list[torch.Tensor] = []
    for position, name in _effect(func).written:
        value = args[position] if position < len(args) else kwargs.get(name)
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, torch.Tensor):
                written.append(each)
    return written


def _has_recorded(values: Sequence[Any]) -> bool:
    for value in values:
        if isinstance(value, RecordedTensor):
            return True
        if isinstance(value, list | tuple) and any(isinstance(each, RecordedTensor) for each in value):
            return True
    return False


def _recorded(values: Sequence[Any]) -> list[RecordedTensor]:
    return [value for value in tree_flatten(list(values))[0] if isinstance(value, RecordedTensor)]


def _first_name(values: Sequence[Any]) -> str:
    return next((name for each in _recorded(values) for name in sorted(each.checkpoint_names())), "computed tensor")


def _on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on the meta device."""

    return func(*map(_to_meta, args), **{name: _to_meta(value) for name, value in kwargs.items()})


def _to_meta(value: Any) -> Any:
    if isinstance(value, RecordedTensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, int | str):
        return value
    if isinstance(value, list | tuple):
        return [_to_meta(each) for each in value]
    if isinstance(value, torch.Tensor) and value.device != META and value.dim():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    return META if isinstance(value, torch.device) else value


Follow = Callable[[Recorder, Any, Sequence[Any], Mapping[str, Any]], Any]


def _followed(change: Callable[..., CheckpointView]) -> Follow:
    """Return the function that follows an operation with one result."""

    def follow(recorder: Recorder, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        source = args[0]
        view = source.checkpoint_view
        if view is not None:
            view = change(view, *args[1:], **kwargs)
        return RecordedTensor.like(recorder, _on_meta(func, args, kwargs), view, source.operation)

    return follow


def _dim(view: CheckpointView, dim: int, added: int = 0) -> int:
    return dim % (len(view.shape) + added) if view.shape or added else 0


SLICE = (0, None, None, 1)
"""Defaults of the arguments of a slice after the tensor."""


def _slice(recorder: Recorder, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source = args[0]
    dim, start, end, step = (
        args[position] if position < len(args) else SLICE[position - 1] for position in (1, 2, 3, 4)
    )
    view = source.checkpoint_view
    if view is None:
        return RecordedTensor.like(recorder, _on_meta(func, args, kwargs), None, source.operation)
    if kwargs:
        raise NotStridedError("has keyword arguments")
    dim = _dim(view, int(dim or 0))
    begin, stop, step = slice(start, end, step).indices(view.shape[dim])
    view = view.narrowed(dim, begin, max(begin, stop)).stepped(dim, step)
    strides = source.stride()
    if step != 1:
        strides = (*strides[:dim], strides[dim] * step, *strides[dim + 1 :])
    return RecordedTensor(recorder, view.shape, strides, source.dtype, view)


def _select(view: CheckpointView, dim: int, index: int) -> CheckpointView:
    dim = _dim(view, dim)
    index %= view.shape[dim]
    return view.narrowed(dim, index, index + 1).without_dim(dim)


def _transpose(view: CheckpointView, one: int, other: int) -> CheckpointView:
    order = list(range(len(view.shape)))
    one, other = _dim(view, one), _dim(view, other)
    if order:
        order[one], order[other] = other, one
    return view.permuted(order)


def _permute(view: CheckpointView, order: Sequence[int]) -> CheckpointView:
    return view.permuted([_dim(view, dim) for dim in order])


def _t(view: CheckpointView) -> CheckpointView:
    return view.permuted(range(len(view.shape))[::-1])


def _unchanged(view: CheckpointView, *_: Any, **__: Any) -> CheckpointView:
    return view


def _reshape(recorder: Recorder, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Follow an operation that keeps the row-major order of the elements."""
    source = args[0]
    meta = _on_meta(func, args, kwargs)
    view = source.checkpoint_view
    if view is not None:
        if meta.numel() != source.numel():
            raise NotStridedError("repeats elements")
        view = view.reshaped(meta.shape)
    return RecordedTensor.like(recorder, meta, view, source.operation)


def _retype(recorder: Recorder, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Follow a view or a copy with the same item size, or the same dtype."""
    source = args[0]
    meta = _on_meta(func, args, kwargs)
    if func is aten.view.dtype:
        if meta.itemsize != source.itemsize:
            raise NotStridedError("changes the item size")
    elif meta.dtype != source.dtype:
        raise NotStridedError(f"{_dtype_name(source.dtype)} to {_dtype_name(meta.dtype)}")
    return RecordedTensor.like(recorder, meta, source.checkpoint_view, source.operation)


def _split(recorder: Recorder, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source = args[0]
    view = source.checkpoint_view
    dim_position = 1 if func is aten.unbind.int else 2
    dim = args[dim_position] if len(args) > dim_position else kwargs.get("dim", 0)
    dim %= source.dim()
    results = []
    begin = 0
    for meta in _on_meta(func, args, kwargs):
        size = meta.shape[dim] if func is not aten.unbind.int else 1
        part = view
        if view is not None:
            part = view.narrowed(dim, begin, begin + size)
            if func is aten.unbind.int:
                part = part.without_dim(dim)
        begin += size
        results.append(RecordedTensor.like(recorder, meta, part, source.operation))
    return results


def _join(recorder: Recorder, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Follow the concatenation or the stack of recorded tensors."""
    sources: Sequence[Any] = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    meta = _on_meta(func, args, kwargs)
    if not all(isinstance(each, RecordedTensor) for each in sources):
        raise NotStridedError("joins other tensors")
    computed = next((each.operation for each in sources if each.checkpoint_view is None), "")
    if computed:
        recorder.note_read(*sources)
        return RecordedTensor.like(recorder, meta, None, computed)
    if any(each.dtype != meta.dtype for each in sources):
        raise NotStridedError("joins several dtypes")
    dim %= meta.dim()
    views = [cast(CheckpointView, each.checkpoint_view) for each in sources]
    if func is aten.stack.default:
        views = [view.with_dim(dim) for view in views]
    else:
        # torch ignores empty 1-D tensors of any shape.
        views = [view for view in views if view.shape != (0,)] or views[:1]
    return RecordedTensor.like(recorder, meta, concatenated(views, dim))


FOLLOWED: Mapping[Any, Follow] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _followed(_select),
    aten.transpose.int: _followed(_transpose),
    aten.permute.default: _followed(_permute),
    aten.t.default: _followed(_t),
    aten.detach.default: _followed(_unchanged),
    aten.alias.default: _followed(_unchanged),
    aten.clone.default: _followed(_unchanged),
    aten.lift_fresh.default: _followed(_unchanged),
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten._reshape_alias.default: _reshape,
    aten.unsqueeze.default: _reshape,
    aten.squeeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.expand.default: _reshape,
    aten.view.dtype: _retype,
    aten._to_copy.default: _retype,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _split,
    aten.cat.default: _join,
    aten.stack.default: _join,
}
"""Operations whose results consist of elements of their arguments."""

OVERWRITING_OPERATIONS = FILL_OPERATIONS | {"copy_"}
"""In-place operations that do not read what they write."""

FACTORIES = frozenset(
    {
        aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
        aten.new_empty_strided.default,
    }
)  # fmt: skip
"""Operations whose results depend on the shape and dtype of their arguments only. The results are plain tensors."""
