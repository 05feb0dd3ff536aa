"""Finds the state of a module: each tensor it serves with, under all of its names, and its plain values.

Follows everything reachable from the module's attributes: containers, objects of any class, attributes of
tensors, closures. State that cannot be captured is reported with the reason, so that nothing is silently left
out.

Plain values (numbers, text, flags and enums used in the computation) are not transferred: source and target must
have equal ones. So they become part of the layout, as lines that name an attribute, its value and its owners. Two
layouts can then report the attribute in which they differ.
"""

from __future__ import annotations

import functools
import io
import re
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from enum import Enum
from functools import cache, cached_property
from hashlib import sha256
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TraceableWrapperSubclass, is_traceable_wrapper_subclass

from rfork.errors import ALL_TENSORS, UnsupportedTensor
from rfork.image.layout import ATTRIBUTE as MARKED
from rfork.image.object_types import (
    PLAIN_VALUES,
    SCALARS,
    ObjectType,
    buffer_reason,
    extension_state_reason,
    function_state,
    hidden_state_reason,
    is_ignored,
    is_in_library,
    is_plain,
    is_scalar,
    module_of,
    object_type,
    own_attributes,
    registered_modules,
    script_state,
    script_values,
    tensor_of,
)

_BY_REPR = (bool, int, float, complex, bytes, type(None), torch.Size)
_BY_TEXT = (torch.dtype, torch.device)

PROCESS_WORDS = frozenset(
    {
        *("rank", "ranks", "device", "devices", "host", "hostname", "port", "address", "addr", "pid", "uuid"),
        *("path", "paths", "dir", "dirs", "directory", "folder", "file", "files", "filename", "url", "uri"),
        *("ptr", "handle", "seed", "rng", "time", "timestamp", "cache", "cached", "caches", "counter"),
        *("counters", "calls", "seen", "warned", "warning", "warnings", "verbose", "debug", "logger"),
    }
)
"""Words in attribute names that refer to a process: its location, time or state."""
PROCESS_NAMES = frozenset(
    {
        *("step", "steps", "_step", "_steps", "global_step", "epoch", "iteration", "_version"),
        # From torch's buffers, accelerate and transformers: how a model was created or is trained.
        *("_is_buffer", "persistent", "_hf_hook", "_old_forward", "_is_hf_initialized", "hf_quantizer"),
        *("gradient_checkpointing", "_gradient_checkpointing_func", "is_quantized"),
    }
)
"""Attribute names with the same meaning, and annotations that libraries put on loaded objects."""
COMPILER_PREFIXES = ("_dynamo_", "_torchdynamo_")
"""Prefixes of the names of annotations that torch.compile puts on modules and parameters."""
CLOCK_WORDS = frozenset({"time", "timestamp", "seen"})
"""Words in names of floats that refer to a process. Other floats are scales of the model, whatever their names."""
_BASES: tuple[type, ...] = (bool, int, float, complex, str, bytes)
MAX_TEXT = 80
"""Maximum characters of a value; a longer value is cut and identified by its digest."""
MAX_VALUES = 256
"""Maximum number of values listed per attribute."""
_INTEGER = re.compile(r"-?\d+")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
OWN_ATTRIBUTES = frozenset(vars(nn.Module())) | {"_compiled_call_impl", "_flat_weight_refs"}
"""Attributes that torch itself keeps on modules: registries, hooks, compiled code, weak references of recurrent layers
to their parameters.
"""
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
"""Registries of hooks that compute with a module's inputs and outputs."""
PROXIES = frozenset(weakref.ProxyTypes)
BASE_TENSOR_TYPES = frozenset({torch.Tensor, nn.Parameter})
_CONTAINERS = (list, tuple, deque, dict, set, frozenset, np.ndarray)
MAX_DEPTH = 100
"""Maximum nesting of containers and objects."""
MAX_OBJECTS = 1_000_000
"""Maximum containers and objects of one module: more are a data set, not a model."""
MAX_ENTRIES = 64
"""Maximum entries of a dict whose plain values are listed by key; those of a larger one are one attribute."""
MAX_INTEGER_BITS = 4096
"""Maximum size of an integer that is shown in decimal: Python limits the digits."""
Excluded = Callable[[str], object]
"""True for names that the caller excludes."""


def key_name(key: object) -> str | None:
    """Return the name of a key's type and value, or None if it has no stable name.

    A text key is its own name; any other key is its Python literal in brackets: ``table.a``, ``table[7]``,
    ``table[(Gate.UP, 'a')]``.
    """
    if type(key) is str and not key.startswith("["):
        return key
    literal = _literal(key)
    return None if literal is None else f"[{literal}]"


def _literal(key: object) -> str | None:
    if isinstance(key, Enum):
        return f"{type(key).__name__}.{key.name or key.value}"
    if type(key) is str or type(key) in _BY_REPR:
        return repr(key)
    if isinstance(key, _BY_TEXT):
        return str(key)
    if isinstance(key, np.generic):
        return f"{type(key).__name__}({key.item()!r})"
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}"
    if isinstance(key, frozenset):
        elements = [_literal(item) for item in key]
        return None if None in elements else f"frozenset({', '.join(sorted(filter(None, elements)))})"
    if isinstance(key, tuple):
        items = [_literal(item) for item in key]
        if None not in items:
            return f"{'' if type(key) is tuple else type(key).__name__}({', '.join(filter(None, items))})"
    return None


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that contain a tensor's bytes: itself, or the tensors it wraps (a DTensor's shard)."""
    wraps: bool = is_traceable_wrapper_subclass(tensor)
    if not wraps:
        yield tensor
        return
    for _, inner in inner_tensors(tensor):
        yield from plain_tensors(inner)


def inner_tensors(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the inner tensors of a wrapper with their attribute names. The wrapper itself has no bytes."""
    names, _ = cast(TraceableWrapperSubclass, tensor).__tensor_flatten__()
    for name in names:
        value = getattr(tensor, name)
        if isinstance(value, torch.Tensor):  # a DTensor also lists its device mesh
            yield name, value


class Attributes:
    """Plain values by attribute, each with its owners."""

    def __init__(self) -> None:
        self._owners: dict[str, list[str]] = {}
        """Keyed by ``attribute=value``: a model has few of them, but tens of thousands of owners."""

    def add(self, owner: str, key: str, value: object) -> None:
        """Add one attribute of a module or of an object attached to it, unless the attribute is process-specific."""
        if is_compared(key, _is_scale(value)) and not _is_location(value):
            self._owners.setdefault(f"{key}={_text(value)}", []).append(owner)

    def change_since(self, older: Attributes, excluded: Callable[[str], object] | None = None) -> str | None:
        """Return the first attribute that has another value than in `older`, or None.

        Integers may change: modules count calls and updates. Attributes may be added: a first call creates tables.
        """
        for line, owners in older._owners.items():
            key, _, value = line.partition("=")
            if _INTEGER.fullmatch(value):
                continue
            for owner in sorted(set(owners).difference(self._owners.get(line, ()))):
                if excluded is None or not excluded(_name(owner, key)):
                    return f"attribute {key} of {owner or 'the module'} was {value} when the seed was made"
        return None

    def lines(self, excluded: Callable[[str], object] | None = None) -> tuple[str, ...]:
        """Return one line for each value of each attribute, without owners whose attribute is `excluded`."""
        found = []
        values = Counter(line.partition("=")[0] for line in self._owners)
        overflowing: dict[str, list[str]] = {}
        for line, owners in self._owners.items():
            key = line.partition("=")[0]
            kept = owners if excluded is None else [each for each in owners if not excluded(_name(each, key))]
            if not kept:
                continue
            if values[key] > MAX_VALUES:
                overflowing.setdefault(key, []).extend(f"{each} {line}" for each in kept)
            else:
                found.append(f"{line} at {_owners_text(kept)}")
        found.extend(f"{key}={values[key]} values at {_owners_text(names)}" for key, names in overflowing.items())
        return tuple(sorted(found))


@cache
def is_compared(key: str, is_scale: bool = False) -> bool:
    """Return whether an attribute of this name belongs to the model rather than to a process that runs it."""
    if key in PROCESS_NAMES or key.startswith(COMPILER_PREFIXES):
        return False
    return (CLOCK_WORDS if is_scale else PROCESS_WORDS).isdisjoint(word.lower() for word in _WORDS.findall(key))


def _is_scale(value: object) -> bool:
    """Return whether a value is a floating-point number, or several."""
    if isinstance(value, list | tuple):
        return bool(value) and all(type(each) is float for each in value)
    return isinstance(value, float | np.floating)


def _owners_text(owners: Sequence[str]) -> str:
    """Return the first owner; if there are more, also their number and a digest of their names."""
    first = min(owners) or "the module"
    if len(owners) == 1:
        return first
    digest = sha256("\n".join(sorted(owners)).encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{first} and {len(owners) - 1} more ({digest})"


def _name(owner: str, key: str) -> str:
    return f"{owner}.{key}" if owner else key


def _text(value: Any) -> str:
    if type(value) not in _BASES and isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, np.generic):
        value = value.item()
    base: Any = type(value)
    if base not in _BASES:  # reduce a subclass to its base type
        base = next((each for each in _BASES if isinstance(value, each)), base)
    is_long = base is int and value.bit_length() > MAX_INTEGER_BITS
    text = hex(value) if is_long else str(base.__repr__(value))
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}… ({sha256(text.encode(errors='surrogatepass')).hexdigest()[:8]})"


def _is_location(value: object) -> bool:
    """Return whether a value is a path or a URL, which differs between machines."""
    return isinstance(value, str) and (value[:1] in ("/", "~") or "://" in value)


class ModuleTensors:
    """Tensors by dotted name, the reason for each rejected name, and the plain values."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.refused: dict[str, str] = {}
        self.attributes = Attributes()


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return every plain tensor reachable from `module` by dotted name.

    Like `state_of_module`. Raises UnsupportedTensor for state that has no name or is outside tensors.
    """
    state = state_of_module(module)
    for name, reason in state.refused.items():
        raise UnsupportedTensor(name, reason)
    return state.tensors


def state_of_module(module: nn.Module, excluded: Excluded | None = None) -> ModuleTensors:
    """Return everything that `module` computes with, including names that are `excluded`.

    Tensors are parameters and buffers (persistent or not), and tensors reachable from attributes: of modules,
    of objects of any class (including slots and class attributes), of other tensors, in containers and in
    closures. A tensor subclass that wraps others is replaced by its inner tensors, as ``weight.inner``; a
    numpy array by a tensor of its memory. A module registered at two paths has both names. Modules that are
    only referenced (from lists or back to a parent) and other objects are visited once; a module that is also
    registered in the tree is visited only there. An object at several paths is named after the first path
    that is not excluded. Gradients are ignored.
    """
    walk = _TensorWalker(module, excluded)
    walk.walk_module("", module)
    walk.walk_postponed()
    return walk.state


class _ModuleClass(NamedTuple):
    """Shared properties of the modules of one class."""

    type_info: ObjectType
    is_script: bool
    has_extra_state: bool
    """State that `get_extra_state` returns, outside tensors."""

    @classmethod
    def of(cls, module_class: type[nn.Module]) -> _ModuleClass:
        return cls(
            object_type(module_class, nn.Module),
            issubclass(module_class, torch.jit.ScriptModule),
            module_class.get_extra_state is not nn.Module.get_extra_state,
        )


class _TensorWalker:
    """One traversal. Objects are entered once, and containers on the current path are not entered again, so cycles end.

    Tensors are stored as found, and plain tensors need no further step: a model has tens of thousands.
    """

    def __init__(self, root: nn.Module, excluded: Excluded | None) -> None:
        self.state = ModuleTensors()
        self._excluded = excluded
        self._postponed: list[tuple[str, object, bool]] = []
        self._root = root
        self._seen: dict[int, object] = {}
        """Visited objects and referenced modules; kept alive, because ids are unique only while objects
        exist.
        """
        self._scripts: dict[int, nn.Module] = {}
        """Visited script modules and their descendants; kept alive like visited objects."""
        self._compared: set[int] = set()
        """Ids of visited objects whose plain values are compared."""
        self._only_values = 0
        """Nesting of objects that were visited before, without comparing their plain values."""
        self._path: set[int] = set()
        self._classes: dict[type, ObjectType] = {}
        self._module_classes: dict[type[nn.Module], _ModuleClass] = {}
        self._ordinary: set[type] = set()
        """Classes of objects other than tensors, modules, containers, code and plain values."""
        self._visited = 0
        self._depth = 0
        self._unregistered = 0
        """Nesting of modules that are only referenced."""
        self._compare = MARKED not in vars(root)
        """For an engine's model only flags are compared: its floats are part of the image, and limits differ
        between servers.
        """

    @cached_property
    def _registered_modules(self) -> set[int]:
        return registered_modules(self._root)

    def walk_module(self, name: str, module: nn.Module) -> None:
        """Collect the state of a registered module and of its registered descendants."""
        path, module_id, module_class = self._path, id(module), type(module)
        if module_id in path:
            return
        path.add(module_id)
        prefix = f"{name}." if name else ""
        for registry in (module._parameters, module._buffers):
            for key, tensor in registry.items():
                if tensor is not None:
                    self._tensor(prefix + key, tensor)
        known = self._module_classes.get(module_class)
        if known is None:
            known = self._module_classes[module_class] = _ModuleClass.of(module_class)
        type_info, is_script, has_extra_state = known
        if is_script:
            self._script(name, module)
        else:
            attributes = vars(module)
            if not OWN_ATTRIBUTES.issuperset(attributes):
                for key in sorted(attributes.keys() - OWN_ATTRIBUTES):
                    value = attributes[key]
                    if type(value) in SCALARS:
                        if (self._compare or type(value) is bool) and type_info.compares(key, value):
                            self.state.attributes.add(name, key, value)
                    elif value is not None:
                        self._attribute(name, key, value, compare=self._compare and type_info.compares(key, value))
            if type_info.slots or type_info.class_attributes or type_info.class_floats:
                self._class_attributes(name, module, type_info, attributes, compare=self._compare)
            for key in HOOKS:
                if hooks := attributes.get(key):
                    for index, hook in enumerate(hooks.values()):
                        self._value(f"{prefix}{key}.{index}", hook, compare=self._compare)
        if has_extra_state:
            self.state.refused[f"{prefix}_extra_state"] = (
                f"{module_class.__name__}.get_extra_state keeps state outside tensors"
            )
        for key, child in module._modules.items():
            if child is not None:
                self.walk_module(prefix + key, child)
        path.discard(module_id)

    def walk_postponed(self) -> None:
        """Collect what is reachable only under excluded names."""
        self._excluded = None
        for name, value, compare in self._postponed:
            self._value(name, value, compare=compare)

    def _script(self, name: str, module: nn.Module) -> None:
        """Check a script module for state other than parameters and buffers, which is in its code."""
        if id(module) in self._scripts or not hasattr(module, "_c"):
            return
        self._scripts.update((id(each), each) for each in module.modules())
        if reason := script_state(module):
            self.state.refused[name or ALL_TENSORS] = reason
        self._script_values(name, module)

    def _script_values(self, name: str, script: object) -> None:
        for path, key, value in script_values(script) if self._compare else ():
            self._attribute(_join(name, path) if path else name, key, value, compare=True)

    def _attribute(self, owner: str, key: str, value: object, *, compare: bool) -> None:
        """Collect one attribute of a module, an object or a tensor."""
        if type(value) in PROXIES:
            return  # refers to an owner of this object, and fails once that is gone
        if type(value) in SCALARS or (type(value) not in self._ordinary and is_scalar(value)):
            if compare:
                self.state.attributes.add(owner, key, value)
        elif type(value) not in PLAIN_VALUES:
            self._value(_join(owner, key), value, compare=compare and is_compared(key, _is_scale(value)))

    def _class_attributes(
        self, owner: str, value: object, type_info: ObjectType, own: dict[str, object], *, compare: bool
    ) -> None:
        for key, slot in type_info.slots:
            try:
                member = slot.__get__(value)
            except AttributeError:  # not set
                continue
            self._attribute(owner, key, member, compare=compare and not key.startswith("__"))
        for key, member in type_info.class_attributes:
            if key not in own:
                self._value(_join(owner, key), member, compare=compare and isinstance(member, FunctionType))
        for key, number in type_info.class_floats:
            if compare and key not in own:
                self.state.attributes.add(owner, key, number)

    def _class(self, name: str, cls: type) -> None:
        """Collect the tensors in the attributes of a class that an object refers to."""
        if id(cls) not in self._seen and not is_in_library(cls):
            self._seen[id(cls)] = cls
            for key, member in object_type(cls).class_attributes:
                self._value(_join(name, key), member, compare=False)

    def _value(self, name: str, value: object, *, compare: bool) -> None:
        """Collect the state of an attribute value of any type."""
        ordinary = type(value) in self._ordinary
        if not ordinary and isinstance(value, torch.Tensor):
            self._tensor(name, value)
        elif self._excluded is not None and self._excluded(name):
            self._postponed.append((name, value, compare))
        elif not ordinary and isinstance(value, nn.Module):
            if id(value) not in self._registered_modules and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._unregistered += 1
                self.walk_module(name, value)
                self._unregistered -= 1
        elif not ordinary and isinstance(value, type):
            self._class(name, value)
        elif (ordinary or not isinstance(value, ModuleType)) and self._enter(name, value):
            self._depth += 1
            self._contents(name, value, compare)
            self._depth -= 1
            self._path.discard(id(value))

    def _enter(self, name: str, value: object) -> bool:
        """Return True if an object should be visited now. Enforces the limits of the traversal."""
        if id(value) in self._path:
            return False
        self._visited += 1
        if self._depth >= MAX_DEPTH:
            self.state.refused[name] = f"it is more than {MAX_DEPTH} objects deep"
        elif self._visited > MAX_OBJECTS:
            self.state.refused[name] = f"the module refers to more than {MAX_OBJECTS} objects"
        else:
            self._path.add(id(value))
            return True
        return False

    def _contents(self, name: str, value: object, compare: bool) -> None:
        if type(value) in self._ordinary:
            pass
        elif isinstance(value, list | tuple | deque):
            self._sequence(name, value, compare)
        elif isinstance(value, dict):
            self._entries(name, value, compare)
        elif isinstance(value, set | frozenset):
            if not all(map(is_plain, value)):
                self._without_names(name, value)
            elif compare:
                self._scalars(name, sorted(filter(None, map(_literal, value))))
        elif isinstance(value, np.ndarray):
            self._array(name, value, compare)
        elif isinstance(value, MappingProxyType | weakref.WeakKeyDictionary):
            self._entries(name, dict(value), compare)
            return
        elif isinstance(value, weakref.WeakValueDictionary):
            self._entries(name, {key: each for key, each in value.items() if _is_array(each)}, compare=False)
            return
        elif isinstance(value, weakref.ref):
            if _is_array(referent := value()):
                self._value(name, referent, compare=False)
            return
        elif isinstance(value, slice):
            self._entries(name, {"start": value.start, "stop": value.stop, "step": value.step}, compare)
            return
        elif isinstance(value, io.BytesIO | io.StringIO):
            if compare:
                self._scalars(name, [value.getvalue()])
        elif isinstance(value, torch.UntypedStorage):
            self._add(name, torch.empty(0, dtype=torch.uint8, device=value.device).set_(value))
            return
        elif isinstance(value, functools.partial):
            parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
            self._entries(name, parts, compare)
        elif isinstance(value, FunctionType):
            if is_ignored(module_of(value)):
                return
            self._entries(name, dict(function_state(value)), compare)
        elif isinstance(value, MethodType):
            self._value(f"{name}.__self__", value.__self__, compare=compare)
            return
        elif not isinstance(value, torch.jit.ScriptFunction):
            self._ordinary.add(type(value))
        self._object(name, value, compare)

    def _sequence(self, name: str, items: list[object] | tuple[object, ...] | deque[object], compare: bool) -> None:
        if PLAIN_VALUES.issuperset(map(type, items)):
            if compare:
                self._scalars(name, [item for item in items if type(item) is not torch.device])
            return
        for index, item in enumerate(items):
            self._attribute(name, str(index), item, compare=compare)

    def _scalars(self, name: str, values: Iterable[object]) -> None:
        """Add several plain values as one attribute."""
        owner, _, key = name.rpartition(".")
        self.state.attributes.add(owner, key, (*values,))

    def _entries(self, name: str, entries: dict[Any, object], compare: bool) -> None:
        many: list[str] | None = [] if len(entries) > MAX_ENTRIES else None
        for key, value in dict.items(entries):
            if type(value) in PLAIN_VALUES and not compare:
                continue
            part = key_name(key)
            if part is not None and many is not None and type(value) in SCALARS:
                if is_compared(part, _is_scale(value)):
                    many.append(f"{part}={_text(value)}")
            elif part is not None:
                self._attribute(name, part, value, compare=compare)
            elif not is_plain(value) or not is_plain(key):
                self._without_names(name, (key, value))
        if many:
            self._scalars(name, sorted(many))

    def _without_names(self, name: str, items: Iterable[object]) -> None:
        """Reject tensors without a stable name. The objects that contain them are visited like any other."""
        probe = copy(self)
        probe.state, probe._seen = ModuleTensors(), dict(self._seen)
        probe._sequence(name, list(items), compare=False)
        if probe.state.tensors or probe.state.refused:
            self.state.refused[name] = "it contains tensors in a set or under dict keys without a stable name"

    def _array(self, name: str, array: np.ndarray, compare: bool) -> None:
        if array.dtype.hasobject:
            self._sequence(name, list(array.flat), compare)
            return
        try:
            self._add(name, tensor_of(array))
        except (TypeError, ValueError) as error:
            self.state.refused[name] = f"it is a numpy array that cannot become a tensor: {error}"

    def _object(self, name: str, value: object, compare: bool) -> None:
        """Collect the attributes, slots and class attributes of an object, once, under its first name."""
        cls = type(value)
        if cls in _CONTAINERS:
            return
        if id(value) in self._seen:
            if not compare or id(value) in self._compared:
                return
            # Found first where plain values are not compared: its tensors have their names already.
            self._only_values += 1
            self._object_attributes(name, value, compare)
            self._only_values -= 1
            return
        self._object_attributes(name, value, compare)

    def _object_attributes(self, name: str, value: object, compare: bool) -> None:
        cls = type(value)
        self._seen[id(value)] = value
        if compare:
            self._compared.add(id(value))
        type_info = self._classes.get(cls)
        if type_info is None:
            type_info = self._classes[cls] = object_type(cls)
        attributes = own_attributes(value)
        if isinstance(value, torch.jit.ScriptFunction) and (reason := script_state(value)):
            self.state.refused[name] = reason
        if isinstance(value, torch.jit.ScriptFunction):
            self._script_values(name, value)
        if not type_info.followed:
            return
        if reason := self._hidden_state_reason(value, has_attributes=bool(attributes or type_info.slots)):
            self.state.refused[name] = reason
        compare = compare and type_info.compared
        for key in sorted(attributes):
            self._attribute(name, key, attributes[key], compare=compare)
        if type_info.slots or type_info.class_attributes or type_info.class_floats:
            self._class_attributes(name, value, type_info, attributes, compare=compare)

    def _hidden_state_reason(self, value: object, *, has_attributes: bool) -> str | None:
        if isinstance(value, _CONTAINERS):
            return None
        if has_attributes:
            return buffer_reason(value)
        reason = hidden_state_reason(value)
        return reason or (extension_state_reason(value) if self._compare else None)

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        if self._only_values:
            return
        tensor_attributes = vars(tensor)
        if not tensor_attributes and type(tensor) in BASE_TENSOR_TYPES:
            if self._unregistered or self.state.tensors.setdefault(name, tensor) is not tensor:
                self._add(name, tensor)
            return
        if id(tensor) in self._path:
            return
        self._path.add(id(tensor))
        wraps: bool = is_traceable_wrapper_subclass(tensor)
        if wraps:
            try:
                inner = list(inner_tensors(tensor))
            except AttributeError as error:
                self.state.refused[name] = f"its __tensor_flatten__ lists a tensor that it does not have: {error}"
                inner = []
            for key, value in inner:
                self._tensor(_join(name, key), value)
            if self._compare:
                self.state.attributes.add(name, "dtype", tensor.dtype)
        else:
            self._add(name, tensor)
        for key, value in tensor_attributes.items():
            self._attribute(name, key, value, compare=self._compare or type(value) is bool)
        self._path.discard(id(tensor))

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        if self._only_values:
            return
        if self._unregistered and tensor.is_meta and not self._compare:
            return  # an engine keeps a layer that it does not compute with, such as the head of an embedding model
        if self.state.tensors.setdefault(name, tensor) is not tensor:
            self.state.refused[name] = "another tensor has the same name"


def _is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _join(prefix: str, key: str) -> str:
    return prefix + key if key.startswith("[") else f"{prefix}.{key}" if prefix else key
