"""Classes of the objects attached to modules: which ones are followed, and where their state is.

Weights may be attached to modules in objects of any class. Objects that cannot contain weights are not
followed, because they lead to the rest of the process (loggers, process groups, server configurations,
compiled code).
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
from collections import deque
from collections.abc import Iterator
from decimal import Decimal
from enum import Enum
from functools import cache, cached_property, lru_cache
from operator import itemgetter
from types import CellType, CodeType, FunctionType, MemberDescriptorType
from typing import Any, NamedTuple
from weakref import ProxyTypes

import numpy as np
import torch
from torch import nn

IGNORED_PACKAGES = (
    *("abc", "ast", "asyncio", "concurrent", "contextlib", "contextvars", "datetime", "decimal", "enum"),
    *("importlib", "inspect", "io", "logging", "multiprocessing", "pathlib", "random", "re", "selectors"),
    *("socket", "subprocess", "tempfile", "threading", "typing", "uuid", "weakref", "zipfile"),
    *("torch._C", "torch._dynamo", "torch._higher_order_ops", "torch._inductor", "torch._library"),
    *("torch._ops", "torch._subclasses", "torch.autograd", "torch.cuda", "torch.fx"),
    *("torch.jit", "torch.library", "torch.multiprocessing", "torch.profiler", "torch.random"),
    *("torch.utils.hooks", "torch.utils.weak", "triton.compiler", "triton.runtime", "rfork", "grpc", "ray"),
    *(
        "numpy.random",
        "accelerate.hooks",
        "transformers.cache_utils",
        "vllm.compilation",
        "vllm.config",
        "vllm.forward_context",
        "vllm.platforms",
    ),
    *("sglang.srt.configs", "sglang.srt.managers", "sglang.srt.mem_cache", "sglang.srt.server_args"),
)
"""Packages and modules whose objects contain no weights or lead away from the model."""
SCRIPT_VALUES = frozenset({"bool", "int", "float", "complex", "str", "List", "Dict", "Tuple", "Optional"})
"""Types of the attributes of scripts that are compared."""
IGNORED_COMPONENTS = frozenset({"distributed"})
"""Components of module names with the same effect: process groups and communicators of any package."""
CONFIGURATIONS = frozenset({"PretrainedConfig", "PreTrainedConfig", "GenerationConfig"})
"""Classes of transformers whose objects describe a model and contain paths and options of the process."""
_CONTAINERS = (dict, list, tuple, set, frozenset)
MAX_REFERENTS = 10_000
"""Maximum number of objects searched below an object without attributes."""
MAX_CLASS_DEPTH = 8
"""Maximum nesting of containers searched in a class attribute; the traversal has its own limits."""
LIBRARIES = frozenset({"torch", "numpy", "transformers", "vllm", "sglang", "rfork", *sys.stdlib_module_names})
"""Packages whose functions and classes refer to no state of a model through globals, closures and class attributes."""
HEAP_TYPE = 1 << 9
"""Flag of types created by Python code or by extensions through the type API."""


SCALARS = frozenset({bool, int, float, complex, str, bytes, torch.dtype})
"""Types of values that are compared instead of transferred."""
_SCALAR_TYPES = (
    *(int, float, complex, str, bytes, range, Decimal, Enum, np.generic, np.dtype),
    *(torch.dtype, torch.layout, torch.memory_format),
)
_GLOBAL_TYPES = (torch.Tensor, np.ndarray, nn.Module, list, tuple, dict)
"""Types of globals that may be part of a model."""
PLAIN_VALUES = SCALARS | {type(None), torch.device}
"""Types of most attributes of modules other than tensors."""


class ObjectType(NamedTuple):
    """Shared properties of the objects of one class."""

    followed: bool
    """Attributes, slots and class attributes may lead to state of the model."""
    compared: bool
    """Plain attribute values affect what the module computes."""
    slots: tuple[tuple[str, MemberDescriptorType], ...]
    class_attributes: tuple[tuple[str, object], ...]
    """Class attributes that may contain tensors, and functions of the class that refer to some."""
    class_floats: tuple[tuple[str, float], ...]
    """Class attributes that may be scales of the model."""
    ignores_private: bool
    """Private attributes only describe how the object was created, as in transformers' models."""
    computed_attributes: frozenset[str]
    """Cached properties: they are derived from other state and exist only after first use."""

    def compares(self, key: str, value: object) -> bool:
        """Return whether an attribute is compared for modules of this class."""
        if key in self.computed_attributes:
            return False
        return not (self.ignores_private and key.startswith("_")) or isinstance(value, float)


def object_type(cls: type, root: type = object) -> ObjectType:
    """Inspect a class and its bases up to `root`, whose own attributes are known."""
    bases = cls.__mro__
    own = bases[: bases.index(root)] if root in bases else bases
    configuration = any(base.__name__ in CONFIGURATIONS for base in own)
    followed = root is not object or not (configuration or is_ignored(module_of(cls)))
    slots: dict[str, MemberDescriptorType] = {}
    class_attributes: dict[str, object] = {}
    class_floats: dict[str, float] = {}
    computed_attributes = set()
    for base in reversed(own) if followed else ():
        if not base.__flags__ & HEAP_TYPE:
            continue
        is_library = is_in_library(base)
        for key, value in vars(base).items():
            function = _function_of(value)
            if type(value) is MemberDescriptorType:
                slots[key] = value
            elif key.startswith("__") and function is None:
                continue
            elif isinstance(value, cached_property):
                computed_attributes.add(key)
            elif function is not None:
                if not is_library and _refers_to_state(function):
                    class_attributes[key] = function
            elif isinstance(value, float) and not is_library:
                class_floats[key] = value
            elif _may_contain_tensors(value):
                class_attributes[key] = value
    compared = not cls.__name__.endswith("Config")
    return ObjectType(
        followed,
        compared,
        tuple(sorted(slots.items(), key=itemgetter(0))),
        tuple(sorted(class_attributes.items(), key=itemgetter(0))),
        tuple(sorted(class_floats.items(), key=itemgetter(0))),
        any(base.__name__ == "PreTrainedModel" for base in own),
        frozenset(computed_attributes),
    )


def module_of(value: object) -> str:
    """Return the dotted name of the module that defines a class or function."""
    found = getattr(value, "__module__", None)
    return found if isinstance(found, str) else ""


@cache
def is_ignored(module: str) -> bool:
    """Return whether objects defined by this module are not followed."""
    parts = module.split(".")
    if not IGNORED_COMPONENTS.isdisjoint(parts):
        return True
    return any(module == name or module.startswith(f"{name}.") for name in IGNORED_PACKAGES)


def is_in_library(value: object) -> bool:
    """Return whether one of `LIBRARIES` defines a class or function."""
    return module_of(value).partition(".")[0] in LIBRARIES


def _may_contain_tensors(value: object, depth: int = 0) -> bool:
    """Return whether a class attribute may contain tensors: containers of plain values, code and descriptors do not."""
    if depth > MAX_CLASS_DEPTH:
        return True
    if type(value) in ProxyTypes:
        return False
    if isinstance(value, torch.Tensor | np.ndarray | nn.Module):
        return True
    if isinstance(value, list | tuple | set | frozenset | deque | dict):
        items = value.values() if isinstance(value, dict) else value
        # Vocabularies have a million entries.
        return not PLAIN_VALUES.issuperset(map(type, items)) and any(
            _may_contain_tensors(item, depth + 1) for item in items
        )
    if isinstance(value, functools.partial):
        return any(_may_contain_tensors(item, depth + 1) for item in (value.args, value.keywords))
    if callable(value) and not is_in_library(type(value)):
        return any(isinstance(each, torch.Tensor | np.ndarray) for each in own_attributes(value).values())
    return (
        bool(own_attributes(value))
        and not isinstance(value, type | FunctionType)
        and not callable(value)
        and not hasattr(type(value), "__get__")
        and not is_ignored(module_of(type(value)))
        and module_of(type(value)).partition(".")[0] not in sys.stdlib_module_names - {"types"}
    )


def registered_modules(root: nn.Module) -> set[int]:
    """Return the ids of all modules registered in the tree. Much faster than `nn.Module.modules`."""
    found, left = {id(root)}, [root]
    while left:
        for child in left.pop()._modules.values():
            if child is not None and id(child) not in found:
                found.add(id(child))
                left.append(child)
    return found


def own_attributes(value: object) -> dict[str, object]:
    """Return the content of an object's dict, bypassing its class's attribute access."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return {key: attribute for key, attribute in attributes.items() if isinstance(key, str)}


def function_state(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield what a function computes with besides its arguments: its closure and its defaults."""
    cells: tuple[CellType, ...] = function.__closure__ or ()
    for key, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            yield key, cell.cell_contents
        except ValueError:  # not set yet
            continue
    yield from ((f"defaults.{index}", value) for index, value in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    yield from _function_globals(function)


def _function_globals(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the globals that a function uses and that may contain tensors, or that are functions of its module."""
    if is_in_library(function):
        return
    for key in sorted(_global_names(function.__code__)):
        value = function.__globals__.get(key)
        if isinstance(value, FunctionType):
            if value is not function and value.__module__ == function.__module__:
                yield key, value
        elif isinstance(value, _GLOBAL_TYPES) and _may_contain_tensors(value):
            yield key, value


@lru_cache(maxsize=10_000)
def _global_names(code: CodeType) -> frozenset[str]:
    """Return the names of the globals that a function's code reads. `co_names` has those of attributes, too."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    nested = (each for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(found).union(*map(_global_names, nested))


def _function_of(member: object) -> FunctionType | None:
    """Return the function of a class member: a method, a static or class method, or a property."""
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    elif isinstance(member, property):
        member = member.fget
    return member if isinstance(member, FunctionType) else None


def _refers_to_state(function: FunctionType, known: set[int] | None = None) -> bool:
    """Return whether a function computes with tensors or scales besides its arguments, directly or in functions."""
    known = set() if known is None else known
    known.add(id(function))
    closure = frozenset(function.__code__.co_freevars)
    for key, value in function_state(function):
        if isinstance(value, FunctionType):
            if id(value) not in known and _refers_to_state(value, known):
                return True
        elif (isinstance(value, float) and key in closure) or _may_contain_tensors(value):
            return True
    return False


def is_scalar(value: object) -> bool:
    """Return whether a value is a number, text, flag or enum, including subclasses."""
    return isinstance(value, _SCALAR_TYPES)


def is_plain(value: object) -> bool:
    """Return whether a value cannot contain a tensor."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return type(value) in PLAIN_VALUES or isinstance(value, Enum | type | FunctionType)


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """Return a tensor of an array's memory. Raises TypeError or ValueError if that is not possible."""
    if not array.flags.writeable:
        raise ValueError("it is read-only")
    return torch.from_numpy(array)


def hidden_state_reason(value: object) -> str | None:
    """Return why the state of an object without attributes cannot be captured, or None if it has no state."""
    value_class = type(value)
    name = f"{module_of(value_class)}.{value_class.__qualname__}".removeprefix("builtins.")
    if isinstance(value, torch.ScriptObject):
        return f"it is a {_script_name(value)}, which packs tensors in an opaque object"
    if not isinstance(value, FunctionType) and _refers_to_tensors(value):
        return f"it is a {name} of tensors without names"
    return buffer_reason(value)


def buffer_reason(value: object) -> str | None:
    """Return why the bytes of an object cannot be captured, or None if it has none of its own."""
    try:
        with memoryview(value) as view:  # type: ignore[arg-type]
            if not view.nbytes:
                return None
    except (TypeError, ValueError, BufferError):
        return None
    value_class = type(value)
    name = f"{module_of(value_class)}.{value_class.__qualname__}".removeprefix("builtins.")
    return f"it is a {name}, whose bytes belong to no tensor"


def _refers_to_tensors(value: object) -> bool:
    """Return whether an object refers to tensors, directly or in containers that only it can reach."""
    found: list[object] = gc.get_referents(value)
    for each in found:  # grows during iteration
        if isinstance(each, torch.Tensor | np.ndarray):
            return True
        if type(each) in _CONTAINERS and len(found) < MAX_REFERENTS:
            found += gc.get_referents(each)
    return False


def extension_state_reason(value: object) -> str | None:
    """Return why the state of an object may be in memory of an extension module, or None if it is not."""
    value_class = type(value)
    known = {"torch", "numpy", *sys.stdlib_module_names}
    module = module_of(value_class)
    if module.partition(".")[0] in known or callable(value) or _is_python_class(value_class):
        return None
    return f"it is a {module}.{value_class.__qualname__}, whose state is in memory of an extension module"


def _is_python_class(value_class: type) -> bool:
    """Return whether Python code defined the class, so that all of its state is in attributes."""
    return any("__slots__" in vars(base) or "__dict__" in vars(base) for base in value_class.__mro__)


def _script_name(value: Any) -> str:
    try:
        return str(value._type().qualified_name()).removeprefix("__torch__.torch.classes.")
    except (AttributeError, RuntimeError):
        return "ScriptObject"


def script_state(script: Any) -> str | None:
    """Return why a script module or function has tensors besides parameters and buffers, or None."""
    known: set[str] = set()
    if isinstance(script, nn.Module):
        known = {name.rpartition(".")[2] for name, _ in (*script.named_parameters(), *script.named_buffers())}
    for graph in _script_graphs(script):
        for node in graph.findAllNodes("prim::Constant"):
            if node.hasAttribute("value") and node.kindOf("value") in ("t", "ts"):
                return "it is a frozen or traced script, which keeps tensors as constants of its code"
        for node in graph.findAllNodes("prim::GetAttr"):
            if "Tensor" in str(node.output().type()) and node.s("name") not in known:
                return f"it is a script with tensors in the attribute {node.s('name')!r}"
    return None


def script_values(script: Any) -> Iterator[tuple[str, str, object]]:
    """Yield the plain values that a script computes with: the path of the module, the attribute's name and its value.

    Numbers that are constants of its code are one value, named ``constants``.
    """
    constants: list[float] = []
    names: set[str] = set()
    for graph in _script_graphs(script):
        for node in graph.findAllNodes("prim::Constant"):
            if node.hasAttribute("value") and node.kindOf("value") == "f":
                constants.append(node.f("value"))
        for node in graph.findAllNodes("prim::GetAttr"):
            if str(node.output().type()).partition("[")[0] in SCRIPT_VALUES:
                names.add(node.s("name"))
    if constants:
        yield "", "constants", (*constants,)
    for path, module in script.named_modules() if isinstance(script, nn.Module) else ():
        code = getattr(module, "_c", None)
        for name in sorted(names - {"training"}):
            if code is not None and code.hasattr(name):
                yield path, name, code.getattr(name)


def _script_graphs(script: Any) -> Iterator[Any]:
    """Yield the graphs of a script's methods. Keep a reference to each: its nodes do not keep it alive."""
    if not isinstance(script, nn.Module):
        yield script.inlined_graph
        return
    code: Any = script._c
    for name in code._method_names():
        yield code._get_method(name).inlined_graph
