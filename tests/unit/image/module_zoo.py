"""A zoo of modules: one case for each known way to keep state in a module.

``python module_zoo.py seed FILE`` captures every case and writes the results. ``python module_zoo.py target
FILE`` builds the cases again with other values, fills those with equal layouts, and prints a verdict for each
as JSON.
"""

from __future__ import annotations

import array
import functools
import io
import json
import pickle
import sys
import warnings
import weakref
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.masked import masked_tensor
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from rfork.errors import UnsupportedTensor
from rfork.image.capture import capture

Values = Iterable[object]
Read = Callable[[Any], Values]


@dataclass(frozen=True)
class ModuleCase:
    """One case: how to build it from one side's values, what it computes with, and why it is rejected."""

    build: Callable[[int], nn.Module]
    read: Read
    refused: str = ""


MODULE_CASES: dict[str, ModuleCase] = {}


def module_case(name: str, build: Callable[[int], nn.Module], read: Read, refused: str = "") -> None:
    """Add one case to the zoo."""
    if name in MODULE_CASES:
        raise ValueError(name)
    MODULE_CASES[name] = ModuleCase(build, read, refused)


def filled(value: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor with the values of one side."""
    random = torch.rand(*(shape or (3,)))
    return random > 0.5 if dtype is torch.bool else (random * 10 + value).to(dtype)


class LayerWithAttribute(nn.Module):
    """A layer with one attribute of any type."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, 2))
        vars(self)["attribute"] = value


def attribute_case(name: str, make: Callable[[int], object], read: Read, refused: str = "") -> None:
    """Add a case that keeps its state in an attribute; `read` receives the attribute."""
    module_case(
        f"attribute: {name}",
        lambda value: LayerWithAttribute(make(value)),
        lambda module: read(module.attribute),
        refused,
    )


def layer_case(name: str, make: Callable[[], nn.Module], *inputs: torch.Tensor, refused: str = "") -> None:
    """Add a case that is used by calling it."""
    module_case(f"layer: {name}", lambda _: shuffled(make()).eval(), lambda module: flat(module(*inputs)), refused)


def shuffled(module: nn.Module) -> nn.Module:
    """Replace values that torch initialises to ones with random numbers."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point() and not nn.parameter.is_lazy(tensor):
                tensor.add_(torch.rand(1))
    return module


def flat(value: Any) -> Iterator[object]:
    """Return the tensors and numbers in outputs."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)
    else:
        yield value


class Color(Enum):
    """Keys of tables."""

    RED = 1
    BLUE = 2


@dataclass
class Record:
    """Like an engine's packed weights."""

    packed: torch.Tensor
    scale: torch.Tensor
    extra: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class FrozenRecord:
    """Like the packed weights of vLLM's b12x kernels."""

    packed: torch.Tensor
    scales: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Storage:
    """Like triton_kernels' storage."""

    data: torch.Tensor
    layout: object = None


@dataclass
class WrappedTensor:
    """Like triton_kernels.Tensor, which wraps a tensor."""

    storage: Storage
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class SlottedRecord:
    """A dataclass with slots."""

    tensor: torch.Tensor


class Plain:
    """An object of an ordinary class."""

    def __init__(self, **values: object) -> None:
        vars(self).update(values)


class Slots:
    """An object without a dict."""

    __slots__ = ("first", "unset")

    def __init__(self, first: torch.Tensor) -> None:
        self.first = first


class InheritedSlots(Slots):
    """Slots in two classes, and a dict."""

    __slots__ = ("__dict__", "second")


class QuantState:
    """Like the state that bitsandbytes keeps on a parameter."""

    def __init__(self, value: int) -> None:
        self.absmax, self.code = filled(value), filled(value, 16)
        self.blocksize, self.dtype, self.state2 = 64, torch.float16, None


class ListSubclass(list):  # type: ignore[type-arg]
    """A list with attributes."""


class DictSubclass(dict):  # type: ignore[type-arg]
    """A dict with attributes."""


class BytesSubclass(bytearray):
    """Bytes with attributes."""


Pair = namedtuple("Pair", "one two")


def quant_method(value: int) -> Plain:
    """Return an object like SGLang's MXFP4 method for experts with Triton kernels."""
    method = Plain(w13_weight_triton_tensor=WrappedTensor(Storage(filled(value, 4, dtype=torch.uint8))))
    vars(method)["w13_precision_config"] = SimpleNamespace(weight_scale=WrappedTensor(Storage(filled(value))))
    return method


def chain(value: int) -> Plain:
    """Return objects that refer to each other in a cycle."""
    first = Plain(tensor=filled(value))
    vars(first)["next"] = Plain(tensor=filled(value), back=first)
    return first


class ClassAttribute(nn.Module):
    """A tensor shared by all modules of the class."""

    table = torch.zeros(3)

    def __init__(self, value: int) -> None:
        super().__init__()
        type(self).table = filled(value)


class ClassList(nn.Module):
    """The same in a container."""

    tables: list[torch.Tensor] = []  # noqa: RUF012

    def __init__(self, value: int) -> None:
        super().__init__()
        type(self).tables = [filled(value)]


class HelperClass:
    """An object whose class refers to the tensor."""

    table = torch.zeros(3)


class ClassPartial(nn.Module):
    """The same in a function with arguments."""

    scaled: functools.partial[torch.Tensor]

    def __init__(self, value: int) -> None:
        super().__init__()
        setattr(type(self), "scaled", functools.partial(torch.mul, filled(value, 4)))  # noqa: B010


class ClassFloat(nn.Module):
    """A scale of all modules of the class."""

    scale = 1.0

    def __init__(self, value: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2))
        type(self).scale = 0.5 * value


TABLE = torch.zeros(4)
TABLES = {"a": torch.zeros(4)}
ALIVE: list[object] = []
"""Objects that the cases only refer to weakly."""


class GlobalTable(nn.Module):
    """Tensors in globals of the Python module."""

    def __init__(self, value: int) -> None:
        super().__init__()
        set_tables(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use both, one of them in another function."""
        return x * TABLE + second_table()


def second_table() -> torch.Tensor:
    """Return a tensor of a global dict."""
    return TABLES["a"]


def set_tables(value: int) -> None:
    """Replace the tensors in globals."""
    global TABLE
    TABLE, TABLES["a"] = filled(value, 4), filled(value, 4)


def global_table(value: int) -> Callable[[], torch.Tensor]:
    """Return a function that uses a global tensor."""
    set_tables(value)
    return lambda: TABLE


def kept_alive(value: Any) -> Any:
    """Return the value, which lives as long as the process."""
    ALIVE.append(value)
    return value


def changed_class(value: int) -> type[HelperClass]:
    """Return a class with a tensor."""
    HelperClass.table = filled(value)
    return HelperClass


def local_class(state: Any) -> nn.Module:
    """Return a module whose methods close over the state."""

    class Local(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * state  # type: ignore[no-any-return]

    return Local(4, 3)


def default_of_method(tensor: torch.Tensor) -> nn.Module:
    """Return a module with a tensor as a default of its method."""

    class Local(nn.Linear):
        def forward(self, x: torch.Tensor, scale: torch.Tensor = tensor) -> torch.Tensor:
            return super().forward(x) * scale

    return Local(4, 3)


class SlottedModule(nn.Module):
    """A module with slots."""

    __slots__ = ("table",)

    def __init__(self, value: int) -> None:
        super().__init__()
        object.__setattr__(self, "table", filled(value))


class ExtraState(nn.Linear):
    """State that only `state_dict` includes."""

    def __init__(self, value: int) -> None:
        super().__init__(2, 2)
        self.factor = {"a": filled(value)}

    def get_extra_state(self) -> object:
        """Return a new object on each call."""
        return {"factor": [0.5]}

    def set_extra_state(self, state: object) -> None:
        """Ignore the state."""


class Lazy(nn.Module):
    """A table that exists only after the first use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2))
        self.table: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        """Create the table."""
        if self.table is None:
            self.table = self.weight.detach() * 2
        return self.table


class Opaque(torch.Tensor):
    """A wrapper that does not report the wrapped tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Opaque:
        """Create it without storage."""
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        vars(self)["wrapped"] = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Apply the function to the wrapped tensor."""
        return func(*(vars(each)["wrapped"] if isinstance(each, Opaque) else each for each in args), **(kwargs or {}))


class Typed(Opaque):
    """A wrapper that reports the wrapped tensor, and has a dtype of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor | None, dtype: torch.dtype) -> Typed:
        """Create it without storage."""
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=dtype)

    def __init__(self, inner: torch.Tensor | None, dtype: torch.dtype) -> None:
        if inner is not None:
            vars(self)["packed"] = inner

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        """Return the name of the wrapped tensor."""
        return ["packed"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: object, size: object, stride: object) -> Typed:
        """Not used."""
        raise NotImplementedError


class Subclass(torch.Tensor):
    """A subclass with its own bytes."""


class Doubled(nn.Module):
    """A parametrisation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the scaled weight."""
        return weight * self.scale


class Scalars(nn.Module):
    """Plain values that the module computes with."""

    def __init__(self, **values: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2))
        vars(self).update(values)


X = torch.linspace(-1, 1, 8).reshape(2, 4)
SEQUENCE = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
PICTURE = torch.linspace(-1, 1, 32).reshape(1, 2, 4, 4)

# Layers of torch.
layer_case("linear", lambda: nn.Linear(4, 3), X)
layer_case("linear without bias", lambda: nn.Linear(4, 3, bias=False), X)
layer_case("bfloat16", lambda: nn.Linear(4, 3, dtype=torch.bfloat16), X.bfloat16())
layer_case("float64", lambda: nn.Linear(4, 3, dtype=torch.float64), X.double())
layer_case("complex", lambda: nn.Linear(4, 3, dtype=torch.complex64), X.to(torch.complex64))
layer_case("bilinear", lambda: nn.Bilinear(4, 4, 2), X, X)
layer_case("embedding", lambda: nn.Embedding(5, 3), torch.arange(5))
layer_case("embedding bag", lambda: nn.EmbeddingBag(5, 3), torch.arange(4).reshape(2, 2))
layer_case("conv1d", lambda: nn.Conv1d(3, 2, 2), SEQUENCE)
layer_case("conv2d", lambda: nn.Conv2d(2, 2, 3), PICTURE)
layer_case("conv transpose", lambda: nn.ConvTranspose2d(2, 2, 3), PICTURE)
layer_case("channels last", lambda: nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last), PICTURE)  # type: ignore[call-overload]
layer_case("batch norm", lambda: nn.BatchNorm2d(2), PICTURE)
layer_case("instance norm", lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True), PICTURE)
layer_case("layer norm", lambda: nn.LayerNorm(4), X)
layer_case("group norm", lambda: nn.GroupNorm(1, 2), PICTURE)
layer_case("rms norm", lambda: nn.RMSNorm(4), X)
layer_case("prelu", lambda: nn.PReLU(4), X)
layer_case("lstm", lambda: nn.LSTM(4, 3, 2, bidirectional=True), SEQUENCE)
layer_case("gru", lambda: nn.GRU(4, 3), SEQUENCE)
layer_case("rnn cell", lambda: nn.RNNCell(4, 3), X)
layer_case("attention", lambda: nn.MultiheadAttention(4, 2), X, X, X)
layer_case("attention with different sizes", lambda: nn.MultiheadAttention(4, 2, kdim=4, vdim=4, bias=False), X, X, X)
layer_case("encoder layer", lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), SEQUENCE)
layer_case("decoder layer", lambda: nn.TransformerDecoderLayer(4, 2, 8), SEQUENCE, SEQUENCE)
layer_case("sequential", lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)), X)
layer_case("weight norm", lambda: parametrizations.weight_norm(nn.Linear(4, 3)), X)
layer_case("spectral norm", lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), X)
layer_case("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(4, 3)), X)
layer_case("legacy weight norm", lambda: nn.utils.weight_norm(nn.Linear(4, 3)), X)
layer_case("legacy spectral norm", lambda: nn.utils.spectral_norm(nn.Linear(4, 3)), X)
layer_case("pruned", lambda: prune.random_unstructured(nn.Linear(4, 3), "weight", 0.5), X)
layer_case("parametrised", lambda: parametrized(nn.Linear(4, 3)), X)
layer_case("lora", lambda: Lora(), X)
layer_case(
    "dynamically quantised linear",
    lambda: quantized(nn.Linear(4, 3)),
    X,
    refused="_packed_params.*packs tensors",
)
layer_case("dynamically quantised lstm", lambda: quantized(nn.LSTM(4, 3)), SEQUENCE, refused="packs tensors")
layer_case("script", lambda: torch.jit.script(nn.Linear(4, 3)), X)
layer_case(
    "frozen script",
    lambda: torch.jit.freeze(torch.jit.script(nn.Linear(4, 3).eval())),
    X,
    refused="frozen or traced",
)
layer_case("traced", lambda: torch.jit.trace(nn.Linear(4, 3), X), X)
layer_case("lazy linear", lambda: nn.LazyLinear(3), X, refused="lazy")
layer_case("fx", lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU())), X)


def parametrized(module: nn.Module) -> nn.Module:
    """Add a parametrisation that has a parameter."""
    parametrize.register_parametrization(module, "weight", Doubled())
    return module


def quantized(module: nn.Module) -> nn.Module:
    """Return the weights in a script object."""
    quantised: nn.Module = torch.ao.quantization.quantize_dynamic(nn.Sequential(module))
    return quantised


def packed(module: nn.Module) -> object:
    """Return only the script object."""
    return vars(quantized(module).get_submodule("0._packed_params"))["_packed_params"]


class Script(nn.Module):
    """Has a tensor that is neither parameter nor buffer, and a method other than `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.table = torch.rand(4)

    @torch.jit.export
    def used(self, x: torch.Tensor) -> torch.Tensor:
        """Use both."""
        return x * self.weight * self.table


def traced_function(value: int) -> object:
    """Return a function with a tensor as a constant of its code."""
    constant = filled(value, 4)
    return torch.jit.trace(lambda x: x * constant, X)


class SelfNested(nn.Linear):
    """A class with a list that contains itself."""

    loop: list[object] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.loop.append(self.loop)


class Lora(nn.Module):
    """A layer that is only referenced, from a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3)
        vars(self)["adapter"] = SimpleNamespace(down=nn.Linear(4, 1), up=nn.Linear(1, 3), base=self.base)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use both."""
        adapter = vars(self)["adapter"]
        return self.base(x) + adapter.up(adapter.down(x))  # type: ignore[no-any-return]


module_case(
    "layer: script with a tensor as attribute",
    lambda _: torch.jit.script(Script()),
    lambda module: [module.used(X)],
    "attribute 'table'",
)
attribute_case("traced function", traced_function, lambda it: [it(X)], "frozen or traced")
layer_case("class with a list that contains itself", SelfNested, X)

# Containers and objects in attributes.
attribute_case("tensor", filled, lambda it: [it])
attribute_case("list", lambda v: [filled(v), filled(v)], list)
attribute_case("nested list", lambda v: [[filled(v)], [[filled(v)]]], flat)
attribute_case(
    "list subclass with attributes",
    lambda v: with_attribute(ListSubclass([filled(v)]), v),
    lambda it: [*it, it.more],
)
attribute_case("tuple", lambda v: (filled(v), 3, "x"), lambda it: [it[0]])
attribute_case("named tuple", lambda v: Pair(filled(v), filled(v)), list)
attribute_case("deque", lambda v: deque([filled(v), filled(v)]), list)
attribute_case("dict", lambda v: {"a": filled(v), "b": [filled(v)]}, lambda it: [it["a"], *it["b"]])
attribute_case(
    "dict in another order", lambda v: ordered({"a": filled(v), "b": filled(v)}, v), lambda it: [it["a"], it["b"]]
)
attribute_case(
    "dict of enums in another order",
    lambda v: ordered({c: filled(v) for c in Color}, v),
    lambda it: [it[c] for c in Color],
)
attribute_case(
    "dict of tuples in another order",
    lambda v: ordered({(1, "a"): filled(v), (2, "b"): filled(v)}, v),
    lambda it: [it[1, "a"], it[2, "b"]],
)
attribute_case("dict of equal texts", lambda v: ordered({1: filled(v), "1": filled(v)}, v), lambda it: [it[1], it["1"]])
attribute_case("dict of types", lambda v: {torch.float16: filled(v), int: filled(v)}, lambda it: it.values())
attribute_case(
    "dict of objects",
    lambda v: {object(): filled(v), object(): filled(v)},
    lambda it: it.values(),
    "without a stable name",
)
attribute_case("dict of tensors as keys", lambda v: {filled(v): 1}, lambda it: it.keys(), "without a stable name")
attribute_case(
    "dict subclass with attributes",
    lambda v: with_attribute(DictSubclass(a=filled(v)), v),
    lambda it: [it["a"], it.more],
)
attribute_case("ordered dict", lambda v: OrderedDict(a=filled(v)), lambda it: it.values())
attribute_case("default dict", lambda v: defaultdict(list, a=[filled(v)]), lambda it: it["a"])
attribute_case("user dict", lambda v: UserDict(a=filled(v)), lambda it: it.values())
attribute_case("chain map", lambda v: ChainMap({"a": filled(v)}, {"b": filled(v)}), lambda it: [it["a"], it["b"]])
attribute_case("mapping proxy", lambda v: MappingProxyType({"a": filled(v)}), lambda it: it.values())
attribute_case("dict of numpy numbers as keys", lambda v: {np.int64(1): filled(v)}, lambda it: it.values())
attribute_case("dict of frozen sets as keys", lambda v: {frozenset({1, 2}): filled(v)}, lambda it: it.values())
attribute_case("class", lambda v: changed_class(v), lambda it: [it.table])
attribute_case("weak reference", lambda v: weakref.ref(kept_alive(filled(v))), lambda it: [it()])
attribute_case(
    "weak values",
    lambda v: weakref.WeakValueDictionary(a=kept_alive(filled(v))),
    lambda it: it.values(),
)
attribute_case(
    "weak keys",
    lambda v: weakref.WeakKeyDictionary({kept_alive(Plain()): filled(v)}),
    lambda it: it.values(),
    "without a stable name",
)
attribute_case("function that uses a global", lambda v: global_table(v), lambda it: [it()])
attribute_case("exported program", lambda v: torch.export.export(nn.Linear(4, 3), (X,)), lambda it: [it.module()(X)])
attribute_case(
    "frozen script in a list",
    lambda v: [torch.jit.freeze(torch.jit.script(nn.Linear(4, 3).eval()))],
    lambda it: [],
    "frozen or traced",
)
attribute_case("set", lambda v: {filled(v), filled(v)}, lambda it: sorted(it, key=torch.sum), "in a set")
attribute_case("frozen set", lambda v: frozenset([filled(v)]), list, "in a set")
attribute_case(
    "partial",
    lambda v: functools.partial(torch.add, filled(v), alpha=filled(v, 1)),
    lambda it: [*it.args, it.keywords["alpha"]],
)
attribute_case("closure", lambda v: closure(filled(v)), lambda it: [it()])
attribute_case("default of a function", lambda v: default(filled(v)), lambda it: [it()])
attribute_case("bound method", lambda v: Plain(t=filled(v)).__dict__.get, lambda it: [it("t")], "without names")
attribute_case("method of an object", lambda v: Counted(filled(v)).read, lambda it: [it()])
attribute_case("iterator", lambda v: iter([filled(v)]), lambda it: it.__reduce__()[1][0], "without names")
attribute_case(
    "namespace", lambda v: SimpleNamespace(a=filled(v), b=SimpleNamespace(c=filled(v))), lambda it: [it.a, it.b.c]
)
attribute_case("object", lambda v: Plain(t=filled(v)), lambda it: [it.t])
attribute_case(
    "nested object",
    lambda v: functools.reduce(lambda inner, _: Plain(x=[inner]), range(20), Plain(t=filled(v))),
    lambda it: [deep(it)],
)
attribute_case(
    "object nested too deeply",
    lambda v: functools.reduce(lambda inner, _: Plain(x=inner), range(150), Plain(t=filled(v))),
    lambda it: [],
    "objects deep",
)
attribute_case("objects in a cycle", chain, lambda it: [it.tensor, it.next.tensor])
attribute_case("object with slots", lambda v: Slots(filled(v)), lambda it: [it.first])
attribute_case(
    "object with slots in two classes", lambda v: inherited_slots(v), lambda it: [it.first, it.second, it.third]
)
attribute_case("object whose class refers to a tensor", lambda v: helper_class(v), lambda it: [it.table])
attribute_case(
    "dataclass", lambda v: Record(filled(v), filled(v), [filled(v)]), lambda it: [it.packed, it.scale, *it.extra]
)
attribute_case(
    "frozen dataclass",
    lambda v: FrozenRecord(filled(v), (filled(v), filled(v))),
    lambda it: [it.packed, *it.scales],
)
attribute_case("dataclass with slots", lambda v: SlottedRecord(filled(v)), lambda it: [it.tensor])
attribute_case(
    "dataclasses of triton kernels",
    quant_method,
    lambda it: [it.w13_weight_triton_tensor.storage.data, it.w13_precision_config.weight_scale.storage.data],
)
attribute_case("module in an object", lambda v: Plain(m=nn.Linear(2, 2)), lambda it: [it.m.weight, it.m.bias])
attribute_case("modules in a list", lambda v: [nn.Linear(2, 2)], lambda it: [it[0].weight])
attribute_case(
    "module in a dataclass",
    lambda v: Record(filled(v), filled(v), [nn.Linear(2, 2)]),
    lambda it: [it.extra[0].weight],
)
attribute_case(
    "dynamically quantised module in an object",
    lambda v: Plain(m=quantized(nn.Linear(4, 3))),
    lambda it: [it.m(X)],
    "packs tensors",
)
attribute_case(
    "module with buffers in an object",
    lambda v: Plain(m=shuffled(nn.BatchNorm1d(3))),
    lambda it: [it.m.running_var],
)
attribute_case(
    "distribution", lambda v: torch.distributions.Normal(filled(v), filled(v)), lambda it: [it.loc, it.scale]
)
attribute_case("numpy array", lambda v: np.full(3, float(v)), lambda it: [it])
attribute_case("numpy array with strides", lambda v: np.full((4, 4), float(v))[::2, ::2], lambda it: [it])
attribute_case("numpy arrays in a list", lambda v: [np.full(3, v), np.full(2, v, dtype=np.uint8)], list)
attribute_case("numpy array of objects", lambda v: np.array([filled(v), None], dtype=object), lambda it: [it[0]])
attribute_case("read-only numpy array", lambda v: read_only(v), lambda it: [it], "read-only")
attribute_case("numpy array with negative strides", lambda v: np.arange(3.0)[::-1] * 1 + v, lambda it: [it])
attribute_case(
    "numpy view with negative strides", lambda v: np.full(3, float(v))[::-1], lambda it: [it], "cannot become a tensor"
)
attribute_case("numpy array of text", lambda v: np.array([str(v)]), lambda it: [str(it)], "cannot become a tensor")
attribute_case("bytearray", lambda v: bytearray([v] * 4), lambda it: [bytes(it)], "bytes belong to no tensor")
attribute_case("array", lambda v: array.array("f", [v]), lambda it: [it.tolist()], "bytes belong to no tensor")
attribute_case(
    "bytearray subclass with attributes",
    lambda v: with_attribute(BytesSubclass([v] * 4), v),
    lambda it: [bytes(it)],
    "bytes belong to no tensor",
)
attribute_case("read-only memoryview", lambda v: memoryview(bytes([v])), lambda it: [bytes(it)], "belong to no tensor")
attribute_case("memoryview", lambda v: memoryview(bytearray([v])), lambda it: [bytes(it)], "bytes belong to no tensor")
attribute_case(
    "script object",
    lambda v: packed(nn.Linear(2, 2)),
    lambda it: [],
    "packs tensors",
)


def with_attribute(container: Any, value: int) -> object:
    """Return a container with a tensor as an additional attribute."""
    container.more = filled(value)
    return container


def ordered(table: dict[Any, Any], value: int) -> dict[Any, Any]:
    """Return the entries in the order of one side."""
    return table if value == 1 else dict(reversed(table.items()))


def default(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function with the tensor as a default."""

    def read(default_tensor: torch.Tensor = tensor) -> torch.Tensor:
        return default_tensor

    return read


def closure(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that closes over the tensor."""
    return lambda: tensor * 2


class Counted:
    """An object with a method."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def read(self) -> torch.Tensor:
        """Return the tensor."""
        return self.tensor


def deep(it: Any) -> torch.Tensor:
    """Return the innermost tensor."""
    while hasattr(it, "x"):
        it = it.x[0]
    tensor: torch.Tensor = it.t
    return tensor


def inherited_slots(value: int) -> InheritedSlots:
    """Return an object with all of its attributes set."""
    slotted = InheritedSlots(filled(value))
    slotted.second = filled(value)  # type: ignore[attr-defined]
    slotted.third = filled(value)  # type: ignore[attr-defined]
    return slotted


def helper_class(value: int) -> HelperClass:
    """Return an object whose class is changed."""
    HelperClass.table = filled(value)
    return HelperClass()


def read_only(value: int) -> Any:
    """Return an array as of a read-only mapped file."""
    made_ = np.full(3, float(value))
    made_.flags.writeable = False
    return made_


# State attached to modules and parameters.
def on_parameter(attribute: object) -> nn.Module:
    """Return a linear layer whose weight has an attribute."""
    module = nn.Linear(2, 2)
    vars(module.weight)["quant_state"] = attribute
    return module


module_case("parameter: tensor on it", lambda v: on_parameter(filled(v)), lambda m: [m.weight, m.weight.quant_state])
module_case(
    "parameter: quant_state of bitsandbytes",
    lambda v: on_parameter(QuantState(v)),
    lambda m: [m.weight.quant_state.absmax, m.weight.quant_state.code],
)
module_case(
    "parameter: dataclass on it",
    lambda v: on_parameter(Record(filled(v), filled(v))),
    lambda m: [m.weight.quant_state.packed, m.weight.quant_state.scale],
)
module_case("parameter: set on it", lambda v: on_parameter({filled(v)}), lambda m: [], "in a set")
module_case("module: class attribute", ClassAttribute, lambda m: [m.table])
module_case("module: list as class attribute", ClassList, lambda m: [*m.tables])
module_case("module: function as class attribute", ClassPartial, lambda m: [type(m).scaled(X)])
module_case("module: float as class attribute", ClassFloat, lambda m: [m.scale], "attribute scale")
module_case("module: globals", GlobalTable, lambda m: [m(X)])
module_case("module: method that closes over a tensor", lambda v: local_class(filled(v)), lambda m: [m(X)])
module_case("module: method that closes over a float", lambda v: local_class(0.5 * v), lambda m: [], "attribute state")
module_case("module: method with a tensor as default", lambda v: default_of_method(filled(v)), lambda m: [m(X)])
module_case("module: weak proxy of its parent", lambda v: parent_by_proxy(), lambda m: [m.child.weight])
module_case("module: weak proxy of an object that is gone", lambda v: dead_proxy(), lambda m: [m.weight])
module_case("module: script with a number", lambda v: torch.jit.script(Scaled(v)), lambda m: [m(X)], "attribute alpha")
module_case(
    "module: script with a constant number",
    lambda v: torch.jit.script(Constant(v)),
    lambda m: [m(X)],
    "attribute constants",
)
module_case(
    "module: script with a number, in a list",
    lambda v: LayerWithAttribute([torch.jit.script(Scaled(v))]),
    lambda m: [m.attribute[0](X)],
    "attribute alpha",
)
module_case("module: integers and left over addresses", lambda v: stale_addresses(), lambda m: [m.ids])
module_case("module: table of addresses", lambda v: addresses(), lambda m: [], "'table'.*addresses of the module's own")
module_case("module: table of large numbers", lambda v: large_numbers(v), lambda m: [m.table])
module_case("module: slots", SlottedModule, lambda m: [m.table])
module_case("module: extra state", ExtraState, lambda m: [m.weight], "_extra_state.*get_extra_state")
module_case("module: hook with a closure", lambda v: hooked(filled(v, 3)), lambda m: [m(X)])
module_case("module: instance's own forward", lambda v: own_forward(filled(v)), lambda m: [m.forward()])
module_case(
    "module: parameter list", lambda v: nn.ParameterList([nn.Parameter(filled(v)), nn.Parameter(filled(v))]), list
)
module_case("module: parameter dict", lambda v: nn.ParameterDict({"a": nn.Parameter(filled(v))}), lambda m: m.values())
module_case("module: module list", lambda v: nn.ModuleList([nn.Linear(2, 2)]), lambda m: [m[0].weight])
module_case("module: module dict", lambda v: nn.ModuleDict({"a": nn.Linear(2, 2)}), lambda m: [m["a"].weight])
module_case("module: buffers", lambda v: buffers(v), lambda m: [m.kept, m.hidden])
module_case(
    "module: table made by the first call, on the seed",
    lambda v: called(Lazy(), v == 1),
    lambda m: [m()],
    "table",
)
module_case("module: table made by the first call, on both", lambda v: called(Lazy(), True), lambda m: [m()])
module_case("module: shared twice", lambda v: shared(), lambda m: [m["a"].weight, m["b"].weight])
module_case(
    "module: tied weights",
    lambda v: tied(),
    lambda m: [m.embed.weight, m.head.weight, m.head.weight is m.embed.weight],
)
module_case(
    "module: tied on the seed alone",
    lambda v: tied() if v == 1 else untied(),
    lambda m: [m.embed.weight, m.head.weight],
    "weight",
)


def addresses() -> nn.Module:
    """Return a module with the addresses of its parameters, as for a grouped kernel."""
    module = nn.Linear(4, 4)
    module.register_buffer("table", torch.tensor([module.weight.data_ptr(), module.bias.data_ptr() + 4]))
    return module


def stale_addresses() -> nn.Module:
    """Return a module with uninitialised integers: addresses of earlier objects, and others."""
    module = nn.Linear(4, 4)
    module.register_buffer("ids", torch.tensor([module.weight.data_ptr() - 16, module.weight.data_ptr(), 7]))
    return module


def large_numbers(value: int) -> nn.Module:
    """Return a module with integers that are no addresses of it."""
    module = nn.Linear(4, 4)
    module.register_buffer("table", torch.tensor([value, -value, 2**62, 0]))
    return module


class Scaled(nn.Linear):
    """A layer with a number in an attribute."""

    def __init__(self, value: int) -> None:
        super().__init__(4, 3)
        self.alpha = 0.5 * value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale the result."""
        return nn.functional.linear(x, self.weight, self.bias) * self.alpha


class Constant(Scaled):
    """The same, compiled into the code of a script."""

    __constants__ = ["alpha"]  # noqa: RUF012


def parent_by_proxy() -> Any:
    """Return a module whose child refers to it weakly."""
    module = nn.Module()
    module.child = nn.Linear(2, 2)
    vars(module.child)["parent"] = weakref.proxy(module)
    return module


def dead_proxy() -> nn.Module:
    """Return a module with a weak reference to an object that does not exist any more."""
    module = nn.Linear(2, 2)
    vars(module)["owner"] = weakref.proxy(Plain())
    return module


def hooked(tensor: torch.Tensor | float) -> nn.Module:
    """Return a module with a hook that computes."""
    module = nn.Linear(4, 3)
    module.register_forward_hook(lambda _module, _inputs, output: output * tensor)
    return module


def own_forward(tensor: torch.Tensor) -> nn.Module:
    """Return a module with an instance-level forward."""
    module = nn.Linear(2, 2)
    vars(module)["forward"] = functools.partial(torch.mul, tensor, 2)
    return module


def buffers(value: int) -> nn.Module:
    """Return a module with persistent and non-persistent buffers."""
    module = nn.Module()
    module.register_buffer("kept", filled(value))
    module.register_buffer("hidden", filled(value), persistent=False)
    return module


def called(module: nn.Module, calls: bool) -> nn.Module:
    """Return the module, called before or not."""
    if calls:
        module()
    return module


def shared() -> nn.Module:
    """Return a module with one layer at two paths."""
    one = nn.Linear(2, 2)
    return nn.ModuleDict({"a": one, "b": one})


def untied() -> Any:
    """Return an embedding and a separate head."""
    module = nn.Module()
    module.embed, module.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    return module


def tied() -> Any:
    """Return an embedding that is also the head."""
    module = untied()
    module.head.weight = module.embed.weight
    return module


# Tensors of other types and forms.
attribute_case("tensor subclass", lambda v: filled(v).as_subclass(Subclass), lambda it: [it.as_subclass(torch.Tensor)])
attribute_case("traceable wrapper", lambda v: TwoTensor(filled(v), filled(v)), lambda it: [it.a, it.b])
attribute_case(
    "traceable wrapper of another type",
    lambda v: Typed(torch.full((3,), v, dtype=torch.int8), torch.float32 if v == 1 else torch.float64),
    lambda it: [],
    "attribute dtype",
)
attribute_case(
    "traceable wrapper without a tensor that it lists", lambda v: Typed(None, torch.float32), lambda it: [], "packed"
)
attribute_case("opaque wrapper", lambda v: Opaque(filled(v)), lambda it: [it.wrapped], "without an address")
attribute_case(
    "masked tensor",
    lambda v: masked_tensor(filled(v), torch.tensor([True, False, True])),
    lambda it: [],
    "without an address",
)
attribute_case(
    "nested tensor", lambda v: torch.nested.nested_tensor([filled(v), filled(v, 2)]), lambda it: [], "nested"
)
attribute_case(
    "jagged tensor",
    lambda v: torch.nested.nested_tensor([filled(v), filled(v, 2)], layout=torch.jagged),
    lambda it: [it.values()],
)
attribute_case("sparse coo", lambda v: filled(v, 2, 2).to_sparse(), lambda it: [], "sparse_coo")
attribute_case("sparse csr", lambda v: filled(v, 2, 2).to_sparse_csr(), lambda it: [], "sparse_csr")
attribute_case(
    "quantised tensor",
    lambda v: torch.quantize_per_tensor(filled(v), 0.1, 0, torch.qint8),
    lambda it: [],
    "quantized",
)
attribute_case("conjugate view", lambda v: filled(v, dtype=torch.complex64).conj(), lambda it: [], "conjugate")
attribute_case("negative view", lambda v: filled(v, dtype=torch.complex64).conj().imag, lambda it: [], "negative")
attribute_case("complex", lambda v: filled(v, dtype=torch.complex64), lambda it: [it])
attribute_case("view as real", lambda v: torch.view_as_real(filled(v, dtype=torch.complex64)), lambda it: [it])
attribute_case("meta", lambda v: torch.empty(2, device="meta"), lambda it: [], "device meta")
attribute_case("no bytes", lambda v: [torch.empty(0, 4), filled(v)], lambda it: [it[1]])
attribute_case("number", lambda v: torch.tensor(float(v)), lambda it: [it])
attribute_case("inference tensor", lambda v: inference(v), lambda it: [it])
attribute_case("expanded", lambda v: filled(v, 1, 3).expand(4, 3), lambda it: [it])
attribute_case("expanded among neighbours", lambda v: neighbours(v), list)
attribute_case("transposed", lambda v: filled(v, 3, 4).t(), lambda it: [it])
attribute_case("views inside a larger block", lambda v: list(filled(v, 12).split(4)), list)
attribute_case("views with gaps", lambda v: filled(v, 12)[::3], lambda it: [it])
attribute_case("overlapping views", lambda v: overlapping(v), list)
attribute_case("view of another type", lambda v: both_views(filled(v, 4)), list)
attribute_case("storage that is too short", lambda v: shrunk(v), lambda it: [], "storage has")
attribute_case("storage itself", lambda v: filled(v).untyped_storage(), lambda it: [bytes(it.tolist())])
attribute_case(
    "packed sequence",
    lambda v: nn.utils.rnn.pack_sequence([filled(v), filled(v, 2)]),
    lambda it: [it.data, it.batch_sizes],
)
for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.uint16, torch.int8):
    attribute_case(f"{dtype}", lambda v, dtype=dtype: filled(v, 4, dtype=dtype), lambda it: [it])  # type: ignore[misc]


def inference(value: int) -> torch.Tensor:
    """Return a tensor created in inference mode."""
    with torch.inference_mode():
        return filled(value)


def neighbours(value: int) -> list[torch.Tensor]:
    """Return an expanded tensor between others of one block."""
    block = filled(value, 9)
    return [block[:3], block[3:4].expand(6), block[4:]]


def overlapping(value: int) -> list[torch.Tensor]:
    """Return overlapping views of one block."""
    block = filled(value, 8)
    return [block[:6], block[2:]]


def both_views(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return two views of one storage."""
    return [tensor, tensor.view(torch.int32)]


def shrunk(value: int) -> torch.Tensor:
    """Return a tensor most of whose memory was released."""
    tensor = filled(value, 8)
    tensor.untyped_storage().resize_(4)
    return tensor


# Plain values: equal, or rejected with the attribute's name.
def scalar(name: str, make: Callable[[int], object], refused: str = "attribute alpha: here .*, there ") -> None:
    """Add a case that differs in one attribute."""
    module_case(f"value: {name}", lambda v: Scalars(alpha=make(v)), lambda m: [m.weight, repr(m.alpha)], refused)


scalar("equal numbers", lambda v: 0.5, "")
scalar("number", float)
scalar("zeros of two signs", lambda v: 0.0 if v == 1 else -0.0)
scalar("integer", lambda v: v)
scalar("flag", lambda v: v == 1)
scalar("flag or integer", lambda v: True if v == 1 else 1)
scalar("text", lambda v: f"mode {v}")
scalar("enum", lambda v: Color(v))
scalar("type of numbers", lambda v: torch.float16 if v == 1 else torch.bfloat16)
scalar("tuple", lambda v: (v, v))
scalar("list of numbers", lambda v: [1, v])
scalar("number or nothing", lambda v: None if v == 1 else 2.0)
scalar("numpy number", lambda v: np.float32(v))
scalar("bytes", lambda v: bytes([v]))
scalar("in a dict", lambda v: {"beta": v}, "attribute beta")
scalar("in an object", lambda v: SimpleNamespace(beta=v), "attribute beta")
scalar(
    "in a dataclass",
    lambda v: Record(torch.ones(1), torch.ones(1), [SimpleNamespace(gamma=v)]),
    "attribute gamma",
)
scalar("in a closure", lambda v: lambda: v, "attribute v")
scalar("list of many numbers", lambda v: [0.5 * v] * 1000)
scalar("dict of many numbers", lambda v: {f"layer{index}": 0.5 * v for index in range(1000)})
scalar("set of many numbers", lambda v: set(range(v, v + 1000)))
scalar("set of tuples", lambda v: {(v, 1)})
scalar("empty list or another", lambda v: [] if v == 1 else ["merged"])
scalar("list with a device", lambda v: [torch.device("cpu"), 0.5 * v])
scalar("range", lambda v: range(v, 9))
scalar("slice", lambda v: slice(v, 9), "attribute start")
scalar("decimal number", Decimal)
module_case("value: integer of many digits", lambda v: Scalars(alpha=10**5000 + v), lambda m: [], "attribute alpha")
scalar("type of numpy numbers", lambda v: np.dtype("f4" if v == 1 else "f2"))
scalar("memory format", lambda v: torch.channels_last if v == 1 else torch.contiguous_format)
scalar("bytes of a file in memory", lambda v: io.BytesIO(bytes([v])))
scalar("in a mapping proxy", lambda v: MappingProxyType({"beta": v}), "attribute beta")
scalar("in a numpy array of objects", lambda v: np.array([v, None], dtype=object))
scalar("under a numpy number", lambda v: {np.int64(1): 0.5 * v}, "attribute .int64.1")
module_case(
    "value: in a hook",
    lambda v: hooked(0.5 * v),
    lambda m: [m(X)],
    "attribute tensor",
)
module_case(
    "value: float whose name has a word of the process",
    lambda v: Scalars(kv_cache_scale=0.5 * v),
    lambda m: [m.kv_cache_scale],
    "attribute kv_cache_scale",
)
module_case(
    "value: in an object that is found first under a name of the process",
    lambda v: helper_twice(SimpleNamespace(alpha=0.5 * v)),
    lambda m: [m.helper.alpha],
    "attribute alpha: here .* at helper",
)


def helper_twice(helper: object) -> nn.Module:
    """Return a module with the helper under two names."""
    return Scalars(cache_helper=helper, helper=helper)


scalar("on the parameter", lambda v: 1, "")
module_case(
    "value: on a parameter",
    lambda v: on_parameter(SimpleNamespace(blocksize=v)),
    lambda m: [m.weight.quant_state.blocksize],
    "attribute blocksize",
)
module_case(
    "value: of the process",
    lambda v: Scalars(device_id=v, cache_path=f"/tmp/{v}", folder="x" * v, rank=v),
    lambda m: [m.weight],
)
module_case(
    "value: annotations of torch.compile",
    lambda v: Scalars(_torchdynamo_wrapper_id=v, _dynamo_static_input_type=f"type {v}"),
    lambda m: [m.weight],
)
module_case(
    "value: gradient checkpointing of a trainer",
    lambda v: (
        Scalars(
            gradient_checkpointing=True, _gradient_checkpointing_func=functools.partial(checkpoint, use_reentrant=False)
        )
        if v == 1
        else Scalars(gradient_checkpointing=False)
    ),
    lambda m: [m.weight],
)
module_case("value: mode", lambda v: nn.Linear(2, 2).train(v == 1), lambda m: [m.weight])


def bits(value: object) -> object:
    """Return the value in a form that is compared bit by bit."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous().clone()
        raw = bytes(plain.untyped_storage().tolist()) if plain.numel() else b""
        return str(plain.dtype), tuple(plain.shape), raw
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return repr(value)


def values_of(case_: ModuleCase, module: nn.Module) -> list[object]:
    """Return what a module computes and its attribute values."""
    with torch.no_grad():
        return [bits(value) for value in case_.read(module)]


def built(case_: ModuleCase, value: int) -> nn.Module:
    """Return a module with the values of one side."""
    torch.manual_seed(value)
    return case_.build(value)


def seed() -> dict[str, object]:
    """Capture every case: its layout, bytes and values, or the reason for its rejection."""
    found: dict[str, object] = {}
    for name, each in MODULE_CASES.items():
        module = built(each, 1)
        try:
            image = capture(module)
        except UnsupportedTensor as error:
            found[name] = str(error)
            continue
        with image.readable(0, image.layout.image_bytes) as views:
            found[name] = image.layout, b"".join(views), values_of(each, module)
    return found


def compare(case_: ModuleCase, seeded: Any) -> str:
    """Return ``equal``, ``different``, or the reason why the fork is rejected."""
    if isinstance(seeded, str):
        return seeded
    layout, raw, values = seeded
    module = built(case_, 2)
    try:
        image = capture(module)
    except UnsupportedTensor as error:
        return str(error)
    if difference := image.layout.first_difference(layout):
        return difference
    if image.layout.layout_id != layout.layout_id:
        return "different: equal layouts have different ids"
    before = values_of(case_, module)
    with image.writable(0, image.layout.image_bytes) as target_views:
        for target_view in target_views:
            target_view[:], raw = raw[: target_view.nbytes], raw[target_view.nbytes :]
    after = values_of(case_, module)
    if after != values:
        return f"different: {after} is not {values}"
    return "equal" if before != after or not values else "already equal before the copy"


def main(side: str, file: Path) -> None:
    """Run one of the two processes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if side == "seed":
        file.write_bytes(pickle.dumps(seed()))
    else:
        seeded = pickle.load(io.BytesIO(file.read_bytes()))
        print(json.dumps({name: compare(each, seeded[name]) for name, each in MODULE_CASES.items()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
