"""A zoo of modules: each kind that has been seen to keep its state in its own way.

``python zoo.py seed FILE`` captures every kind and writes what it found; ``python zoo.py target FILE`` builds
the kinds anew with other values, fills those whose layout is equal, and prints a verdict for each as JSON.
"""

from __future__ import annotations

import array
import functools
import io
import json
import pickle
import sys
import warnings
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
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

from rfork.errors import UnsupportedTensor
from rfork.image.capture import capture

Values = Iterable[object]
Read = Callable[[Any], Values]


@dataclass(frozen=True)
class Kind:
    """How a kind is built from the values of one side, what it computes with, and why it is refused."""

    build: Callable[[int], nn.Module]
    read: Read
    refused: str = ""


KINDS: dict[str, Kind] = {}


def kind(name: str, build: Callable[[int], nn.Module], read: Read, refused: str = "") -> None:
    """Add one kind to the zoo."""
    if name in KINDS:
        raise ValueError(name)
    KINDS[name] = Kind(build, read, refused)


def made(value: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of one side's values."""
    random = torch.rand(*(shape or (3,)))
    return random > 0.5 if dtype is torch.bool else (random * 10 + value).to(dtype)


class Holder(nn.Module):
    """A layer with one attribute, whatever that is."""

    def __init__(self, held: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, 2))
        vars(self)["held"] = held


def held(name: str, make: Callable[[int], object], read: Read, refused: str = "") -> None:
    """Add a kind that keeps its state in an attribute; `read` is of the attribute."""
    kind(f"attribute: {name}", lambda value: Holder(make(value)), lambda module: read(module.held), refused)


def layer(name: str, make: Callable[[], nn.Module], *inputs: torch.Tensor, refused: str = "") -> None:
    """Add a kind that is used by calling it."""
    kind(f"layer: {name}", lambda _: shuffled(make()).eval(), lambda module: flat(module(*inputs)), refused)


def shuffled(module: nn.Module) -> nn.Module:
    """With random numbers where torch begins with ones."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point() and not nn.parameter.is_lazy(tensor):
                tensor.add_(torch.rand(1))
    return module


def flat(value: Any) -> Iterator[object]:
    """The tensors and numbers in outputs."""
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
    """As an engine's packed weights."""

    packed: torch.Tensor
    scale: torch.Tensor
    extra: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class FrozenRecord:
    """As the packed weights of vLLM's b12x kernels."""

    packed: torch.Tensor
    scales: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Storage:
    """As triton_kernels' storage."""

    data: torch.Tensor
    layout: object = None


@dataclass
class WrappedTensor:
    """As triton_kernels.Tensor: a tensor by another name."""

    storage: Storage
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class SlottedRecord:
    """A dataclass with slots."""

    tensor: torch.Tensor


class Plain:
    """An object of any class."""

    def __init__(self, **values: object) -> None:
        vars(self).update(values)


class Slots:
    """An object without a dict."""

    __slots__ = ("first", "unset")

    def __init__(self, first: torch.Tensor) -> None:
        self.first = first


class SlotsBelow(Slots):
    """Slots in two classes, and a dict."""

    __slots__ = ("__dict__", "second")


class QuantState:
    """As bitsandbytes keeps it on a parameter."""

    def __init__(self, value: int) -> None:
        self.absmax, self.code = made(value), made(value, 16)
        self.blocksize, self.dtype, self.state2 = 64, torch.float16, None


class ListOfMine(list):  # type: ignore[type-arg]
    """A list with attributes."""


class DictOfMine(dict):  # type: ignore[type-arg]
    """A dict with attributes."""


Pair = namedtuple("Pair", "one two")


def quant_method(value: int) -> Plain:
    """As SGLang's MXFP4 method for experts with triton kernels."""
    method = Plain(w13_weight_triton_tensor=WrappedTensor(Storage(made(value, 4, dtype=torch.uint8))))
    vars(method)["w13_precision_config"] = SimpleNamespace(weight_scale=WrappedTensor(Storage(made(value))))
    return method


def chain(value: int) -> Plain:
    """Objects that refer to one another in a circle."""
    first = Plain(tensor=made(value))
    vars(first)["next"] = Plain(tensor=made(value), back=first)
    return first


class ClassAttribute(nn.Module):
    """A tensor that all modules of the class share."""

    table = torch.zeros(3)

    def __init__(self, value: int) -> None:
        super().__init__()
        type(self).table = made(value)


class ClassList(nn.Module):
    """The same, in a container."""

    tables: list[torch.Tensor] = []  # noqa: RUF012

    def __init__(self, value: int) -> None:
        super().__init__()
        type(self).tables = [made(value)]


class HelperClass:
    """An object whose class holds the tensor."""

    table = torch.zeros(3)


class SlottedModule(nn.Module):
    """A module with slots."""

    __slots__ = ("table",)

    def __init__(self, value: int) -> None:
        super().__init__()
        object.__setattr__(self, "table", made(value))


class ExtraState(nn.Linear):
    """State that only `state_dict` hears of."""

    def __init__(self, value: int) -> None:
        super().__init__(2, 2)
        self.factor = {"a": made(value)}

    def get_extra_state(self) -> object:
        """Made anew for each call."""
        return {"factor": [0.5]}

    def set_extra_state(self, state: object) -> None:
        """Nothing."""


class Lazy(nn.Module):
    """A table that exists once it was used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2))
        self.table: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        """Make the table."""
        if self.table is None:
            self.table = self.weight.detach() * 2
        return self.table


class Opaque(torch.Tensor):
    """A wrapper that does not say what it wraps."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Opaque:
        """Without storage."""
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        vars(self)["wrapped"] = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """On what is wrapped."""
        return func(
            *(vars(each)["wrapped"] if isinstance(each, Opaque) else each for each in args), **(kwargs or {})
        )


class Subclass(torch.Tensor):
    """A subclass with bytes of its own."""


class Doubled(nn.Module):
    """A parametrisation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Scaled."""
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
layer("linear", lambda: nn.Linear(4, 3), X)
layer("linear without bias", lambda: nn.Linear(4, 3, bias=False), X)
layer("bfloat16", lambda: nn.Linear(4, 3, dtype=torch.bfloat16), X.bfloat16())
layer("float64", lambda: nn.Linear(4, 3, dtype=torch.float64), X.double())
layer("complex", lambda: nn.Linear(4, 3, dtype=torch.complex64), X.to(torch.complex64))
layer("bilinear", lambda: nn.Bilinear(4, 4, 2), X, X)
layer("embedding", lambda: nn.Embedding(5, 3), torch.arange(5))
layer("embedding bag", lambda: nn.EmbeddingBag(5, 3), torch.arange(4).reshape(2, 2))
layer("conv1d", lambda: nn.Conv1d(3, 2, 2), SEQUENCE)
layer("conv2d", lambda: nn.Conv2d(2, 2, 3), PICTURE)
layer("conv transpose", lambda: nn.ConvTranspose2d(2, 2, 3), PICTURE)
layer("channels last", lambda: nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last), PICTURE)  # type: ignore[call-overload]
layer("batch norm", lambda: nn.BatchNorm2d(2), PICTURE)
layer("instance norm", lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True), PICTURE)
layer("layer norm", lambda: nn.LayerNorm(4), X)
layer("group norm", lambda: nn.GroupNorm(1, 2), PICTURE)
layer("rms norm", lambda: nn.RMSNorm(4), X)
layer("prelu", lambda: nn.PReLU(4), X)
layer("lstm", lambda: nn.LSTM(4, 3, 2, bidirectional=True), SEQUENCE)
layer("gru", lambda: nn.GRU(4, 3), SEQUENCE)
layer("rnn cell", lambda: nn.RNNCell(4, 3), X)
layer("attention", lambda: nn.MultiheadAttention(4, 2), X, X, X)
layer("attention of other sizes", lambda: nn.MultiheadAttention(4, 2, kdim=4, vdim=4, bias=False), X, X, X)
layer("encoder layer", lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), SEQUENCE)
layer("decoder layer", lambda: nn.TransformerDecoderLayer(4, 2, 8), SEQUENCE, SEQUENCE)
layer("sequential", lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)), X)
layer("weight norm", lambda: parametrizations.weight_norm(nn.Linear(4, 3)), X)
layer("spectral norm", lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), X)
layer("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(4, 3)), X)
layer("old weight norm", lambda: nn.utils.weight_norm(nn.Linear(4, 3)), X)
layer("old spectral norm", lambda: nn.utils.spectral_norm(nn.Linear(4, 3)), X)
layer("pruned", lambda: prune.random_unstructured(nn.Linear(4, 3), "weight", 0.5), X)
layer("parametrised", lambda: parametrized(nn.Linear(4, 3)), X)
layer("lora", lambda: Lora(), X)
layer(
    "dynamically quantised linear",
    lambda: quantized(nn.Linear(4, 3)),
    X,
    refused="_packed_params.*packs tensors",
)
layer("dynamically quantised lstm", lambda: quantized(nn.LSTM(4, 3)), SEQUENCE, refused="packs tensors")
layer("script", lambda: torch.jit.script(nn.Linear(4, 3)), X)
layer(
    "frozen script",
    lambda: torch.jit.freeze(torch.jit.script(nn.Linear(4, 3).eval())),
    X,
    refused="frozen or traced",
)
layer("traced", lambda: torch.jit.trace(nn.Linear(4, 3), X), X)
layer("lazy linear", lambda: nn.LazyLinear(3), X, refused="lazy")
layer("fx", lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU())), X)


def parametrized(module: nn.Module) -> nn.Module:
    """With a parametrisation that has a parameter."""
    parametrize.register_parametrization(module, "weight", Doubled())
    return module


def quantized(module: nn.Module) -> nn.Module:
    """The weights in a script object."""
    quantised: nn.Module = torch.ao.quantization.quantize_dynamic(nn.Sequential(module))
    return quantised


def packed(module: nn.Module) -> object:
    """The script object alone."""
    return vars(quantized(module).get_submodule("0._packed_params"))["_packed_params"]


class Script(nn.Module):
    """With a tensor that is neither parameter nor buffer, and a method that is not `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.table = torch.rand(4)

    @torch.jit.export
    def used(self, x: torch.Tensor) -> torch.Tensor:
        """Both."""
        return x * self.weight * self.table


def traced_function(value: int) -> object:
    """A function over a tensor that is a constant of its code."""
    constant = made(value, 4)
    return torch.jit.trace(lambda x: x * constant, X)


class SelfNested(nn.Linear):
    """A class with a list that holds itself."""

    loop: list[object] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.loop.append(self.loop)


class Lora(nn.Module):
    """A layer that is only referred to, from a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3)
        vars(self)["adapter"] = SimpleNamespace(down=nn.Linear(4, 1), up=nn.Linear(1, 3), base=self.base)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both."""
        adapter = vars(self)["adapter"]
        return self.base(x) + adapter.up(adapter.down(x))  # type: ignore[no-any-return]


kind(
    "layer: script with a tensor as attribute",
    lambda _: torch.jit.script(Script()),
    lambda module: [module.used(X)],
    "attribute 'table'",
)
held("traced function", traced_function, lambda it: [it(X)], "frozen or traced")
layer("class with a list that holds itself", SelfNested, X)

# Containers and objects in attributes.
held("tensor", made, lambda it: [it])
held("list", lambda v: [made(v), made(v)], list)
held("nested list", lambda v: [[made(v)], [[made(v)]]], flat)
held(
    "list subclass with attributes",
    lambda v: with_attribute(ListOfMine([made(v)]), v),
    lambda it: [*it, it.more],
)
held("tuple", lambda v: (made(v), 3, "x"), lambda it: [it[0]])
held("named tuple", lambda v: Pair(made(v), made(v)), list)
held("deque", lambda v: deque([made(v), made(v)]), list)
held("dict", lambda v: {"a": made(v), "b": [made(v)]}, lambda it: [it["a"], *it["b"]])
held(
    "dict in another order", lambda v: ordered({"a": made(v), "b": made(v)}, v), lambda it: [it["a"], it["b"]]
)
held(
    "dict of enums in another order",
    lambda v: ordered({c: made(v) for c in Color}, v),
    lambda it: [it[c] for c in Color],
)
held(
    "dict of tuples in another order",
    lambda v: ordered({(1, "a"): made(v), (2, "b"): made(v)}, v),
    lambda it: [it[1, "a"], it[2, "b"]],
)
held("dict of equal texts", lambda v: ordered({1: made(v), "1": made(v)}, v), lambda it: [it[1], it["1"]])
held("dict of types", lambda v: {torch.float16: made(v), int: made(v)}, lambda it: it.values())
held(
    "dict of objects",
    lambda v: {object(): made(v), object(): made(v)},
    lambda it: it.values(),
    "without a stable name",
)
held("dict of tensors as keys", lambda v: {made(v): 1}, lambda it: it.keys(), "without a stable name")
held(
    "dict subclass with attributes",
    lambda v: with_attribute(DictOfMine(a=made(v)), v),
    lambda it: [it["a"], it.more],
)
held("ordered dict", lambda v: OrderedDict(a=made(v)), lambda it: it.values())
held("default dict", lambda v: defaultdict(list, a=[made(v)]), lambda it: it["a"])
held("user dict", lambda v: UserDict(a=made(v)), lambda it: it.values())
held("chain map", lambda v: ChainMap({"a": made(v)}, {"b": made(v)}), lambda it: [it["a"], it["b"]])
held("mapping proxy", lambda v: MappingProxyType({"a": made(v)}), lambda it: it.values(), "names in it")
held("set", lambda v: {made(v), made(v)}, lambda it: sorted(it, key=torch.sum), "in a set")
held("frozen set", lambda v: frozenset([made(v)]), list, "in a set")
held(
    "partial",
    lambda v: functools.partial(torch.add, made(v), alpha=made(v, 1)),
    lambda it: [*it.args, it.keywords["alpha"]],
)
held("closure", lambda v: closure(made(v)), lambda it: [it()])
held("default of a function", lambda v: default(made(v)), lambda it: [it()])
held("bound method", lambda v: Plain(t=made(v)).__dict__.get, lambda it: [it("t")], "names in it")
held("method of an object", lambda v: Counted(made(v)).read, lambda it: [it()])
held("iterator", lambda v: iter([made(v)]), lambda it: it.__reduce__()[1][0], "names in it")
held(
    "namespace", lambda v: SimpleNamespace(a=made(v), b=SimpleNamespace(c=made(v))), lambda it: [it.a, it.b.c]
)
held("object", lambda v: Plain(t=made(v)), lambda it: [it.t])
held(
    "object deep down",
    lambda v: functools.reduce(lambda inner, _: Plain(x=[inner]), range(20), Plain(t=made(v))),
    lambda it: [deep(it)],
)
held(
    "object too deep down",
    lambda v: functools.reduce(lambda inner, _: Plain(x=inner), range(150), Plain(t=made(v))),
    lambda it: [],
    "objects deep",
)
held("objects in a circle", chain, lambda it: [it.tensor, it.next.tensor])
held("object with slots", lambda v: Slots(made(v)), lambda it: [it.first])
held("object with slots in two classes", lambda v: slots_below(v), lambda it: [it.first, it.second, it.third])
held("object whose class holds a tensor", lambda v: helper_class(v), lambda it: [it.table])
held("dataclass", lambda v: Record(made(v), made(v), [made(v)]), lambda it: [it.packed, it.scale, *it.extra])
held(
    "frozen dataclass",
    lambda v: FrozenRecord(made(v), (made(v), made(v))),
    lambda it: [it.packed, *it.scales],
)
held("dataclass with slots", lambda v: SlottedRecord(made(v)), lambda it: [it.tensor])
held(
    "dataclasses of triton kernels",
    quant_method,
    lambda it: [it.w13_weight_triton_tensor.storage.data, it.w13_precision_config.weight_scale.storage.data],
)
held("module in an object", lambda v: Plain(m=nn.Linear(2, 2)), lambda it: [it.m.weight, it.m.bias])
held("modules in a list", lambda v: [nn.Linear(2, 2)], lambda it: [it[0].weight])
held(
    "module in a dataclass",
    lambda v: Record(made(v), made(v), [nn.Linear(2, 2)]),
    lambda it: [it.extra[0].weight],
)
held(
    "dynamically quantised module in an object",
    lambda v: Plain(m=quantized(nn.Linear(4, 3))),
    lambda it: [it.m(X)],
    "packs tensors",
)
held(
    "module with buffers in an object",
    lambda v: Plain(m=shuffled(nn.BatchNorm1d(3))),
    lambda it: [it.m.running_var],
)
held("distribution", lambda v: torch.distributions.Normal(made(v), made(v)), lambda it: [it.loc, it.scale])
held("numpy array", lambda v: np.full(3, float(v)), lambda it: [it])
held("numpy array of strides", lambda v: np.full((4, 4), float(v))[::2, ::2], lambda it: [it])
held("numpy arrays in a list", lambda v: [np.full(3, v), np.full(2, v, dtype=np.uint8)], list)
held("numpy array of objects", lambda v: np.array([made(v), None], dtype=object), lambda it: [it[0]])
held("numpy array that is read-only", lambda v: read_only(v), lambda it: [it], "read-only")
held("numpy array of negative strides", lambda v: np.arange(3.0)[::-1] * 1 + v, lambda it: [it])
held("numpy view of negative strides", lambda v: np.full(3, float(v))[::-1], lambda it: [it], "no tensor")
held("numpy array of text", lambda v: np.array([str(v)]), lambda it: [str(it)], "no tensor")
held("bytearray", lambda v: bytearray([v] * 4), lambda it: [bytes(it)], "bytes are no tensor's")
held("array", lambda v: array.array("f", [v]), lambda it: [it.tolist()], "bytes are no tensor's")
held("memoryview", lambda v: memoryview(bytearray([v])), lambda it: [bytes(it)], "bytes are no tensor's")
held(
    "script object",
    lambda v: packed(nn.Linear(2, 2)),
    lambda it: [],
    "packs tensors",
)


def with_attribute(container: Any, value: int) -> object:
    """A container that has a tensor beside its items."""
    container.more = made(value)
    return container


def ordered(table: dict[Any, Any], value: int) -> dict[Any, Any]:
    """Entries in the order of one side."""
    return table if value == 1 else dict(reversed(table.items()))


def default(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that a tensor is the default of."""

    def read(held: torch.Tensor = tensor) -> torch.Tensor:
        return held

    return read


def closure(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function over a tensor."""
    return lambda: tensor * 2


class Counted:
    """An object with a method."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def read(self) -> torch.Tensor:
        """The tensor."""
        return self.tensor


def deep(it: Any) -> torch.Tensor:
    """The tensor at the end."""
    while hasattr(it, "x"):
        it = it.x[0]
    tensor: torch.Tensor = it.t
    return tensor


def slots_below(value: int) -> SlotsBelow:
    """With all that it can hold."""
    slotted = SlotsBelow(made(value))
    slotted.second = made(value)  # type: ignore[attr-defined]
    slotted.third = made(value)  # type: ignore[attr-defined]
    return slotted


def helper_class(value: int) -> HelperClass:
    """One whose class is changed."""
    HelperClass.table = made(value)
    return HelperClass()


def read_only(value: int) -> Any:
    """As of a mapped file."""
    made_ = np.full(3, float(value))
    made_.flags.writeable = False
    return made_


# What hangs on modules and parameters.
def on_parameter(hang: object) -> nn.Module:
    """A linear layer whose weight has an attribute."""
    module = nn.Linear(2, 2)
    vars(module.weight)["quant_state"] = hang
    return module


kind("parameter: tensor on it", lambda v: on_parameter(made(v)), lambda m: [m.weight, m.weight.quant_state])
kind(
    "parameter: quant_state of bitsandbytes",
    lambda v: on_parameter(QuantState(v)),
    lambda m: [m.weight.quant_state.absmax, m.weight.quant_state.code],
)
kind(
    "parameter: dataclass on it",
    lambda v: on_parameter(Record(made(v), made(v))),
    lambda m: [m.weight.quant_state.packed, m.weight.quant_state.scale],
)
kind("parameter: set on it", lambda v: on_parameter({made(v)}), lambda m: [], "in a set")
kind("module: class attribute", ClassAttribute, lambda m: [m.table])
kind("module: list as class attribute", ClassList, lambda m: [*m.tables])
kind("module: slots", SlottedModule, lambda m: [m.table])
kind("module: extra state", ExtraState, lambda m: [m.weight], "_extra_state.*get_extra_state")
kind("module: hook with a closure", lambda v: hooked(made(v, 3)), lambda m: [m(X)])
kind("module: instance's own forward", lambda v: own_forward(made(v)), lambda m: [m.forward()])
kind(
    "module: parameter list", lambda v: nn.ParameterList([nn.Parameter(made(v)), nn.Parameter(made(v))]), list
)
kind("module: parameter dict", lambda v: nn.ParameterDict({"a": nn.Parameter(made(v))}), lambda m: m.values())
kind("module: module list", lambda v: nn.ModuleList([nn.Linear(2, 2)]), lambda m: [m[0].weight])
kind("module: module dict", lambda v: nn.ModuleDict({"a": nn.Linear(2, 2)}), lambda m: [m["a"].weight])
kind("module: buffers", lambda v: buffers(v), lambda m: [m.kept, m.hidden])
kind(
    "module: table made by the first call, on the seed",
    lambda v: called(Lazy(), v == 1),
    lambda m: [m()],
    "table",
)
kind("module: table made by the first call, on both", lambda v: called(Lazy(), True), lambda m: [m()])
kind("module: shared twice", lambda v: shared(), lambda m: [m["a"].weight, m["b"].weight])
kind(
    "module: tied weights",
    lambda v: tied(),
    lambda m: [m.embed.weight, m.head.weight, m.head.weight is m.embed.weight],
)
kind(
    "module: tied on the seed alone",
    lambda v: tied() if v == 1 else untied(),
    lambda m: [m.embed.weight, m.head.weight],
    "weight",
)


def hooked(tensor: torch.Tensor) -> nn.Module:
    """A hook that computes."""
    module = nn.Linear(4, 3)
    module.register_forward_hook(lambda _module, _inputs, output: output * tensor)
    return module


def own_forward(tensor: torch.Tensor) -> nn.Module:
    """A forward of the instance's."""
    module = nn.Linear(2, 2)
    vars(module)["forward"] = functools.partial(torch.mul, tensor, 2)
    return module


def buffers(value: int) -> nn.Module:
    """Of both kinds."""
    module = nn.Module()
    module.register_buffer("kept", made(value))
    module.register_buffer("hidden", made(value), persistent=False)
    return module


def called(module: nn.Module, calls: bool) -> nn.Module:
    """Used before, or not."""
    if calls:
        module()
    return module


def shared() -> nn.Module:
    """One layer at two paths."""
    one = nn.Linear(2, 2)
    return nn.ModuleDict({"a": one, "b": one})


def untied() -> Any:
    """An embedding and a head."""
    module = nn.Module()
    module.embed, module.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    return module


def tied() -> Any:
    """An embedding that is the head as well."""
    module = untied()
    module.head.weight = module.embed.weight
    return module


# Tensors of other types and forms.
held("tensor subclass", lambda v: made(v).as_subclass(Subclass), lambda it: [it.as_subclass(torch.Tensor)])
held("traceable wrapper", lambda v: TwoTensor(made(v), made(v)), lambda it: [it.a, it.b])
held("opaque wrapper", lambda v: Opaque(made(v)), lambda it: [it.wrapped], "at no address")
held(
    "masked tensor",
    lambda v: masked_tensor(made(v), torch.tensor([True, False, True])),
    lambda it: [],
    "at no address",
)
held("nested tensor", lambda v: torch.nested.nested_tensor([made(v), made(v, 2)]), lambda it: [], "nested")
held(
    "jagged tensor",
    lambda v: torch.nested.nested_tensor([made(v), made(v, 2)], layout=torch.jagged),
    lambda it: [it.values()],
)
held("sparse coo", lambda v: made(v, 2, 2).to_sparse(), lambda it: [], "sparse_coo")
held("sparse csr", lambda v: made(v, 2, 2).to_sparse_csr(), lambda it: [], "sparse_csr")
held(
    "quantised tensor",
    lambda v: torch.quantize_per_tensor(made(v), 0.1, 0, torch.qint8),
    lambda it: [],
    "quantized",
)
held("conjugate view", lambda v: made(v, dtype=torch.complex64).conj(), lambda it: [], "conjugate")
held("negative view", lambda v: made(v, dtype=torch.complex64).conj().imag, lambda it: [], "negative")
held("complex", lambda v: made(v, dtype=torch.complex64), lambda it: [it])
held("view as real", lambda v: torch.view_as_real(made(v, dtype=torch.complex64)), lambda it: [it])
held("meta", lambda v: torch.empty(2, device="meta"), lambda it: [], "device meta")
held("no bytes", lambda v: [torch.empty(0, 4), made(v)], lambda it: [it[1]])
held("number", lambda v: torch.tensor(float(v)), lambda it: [it])
held("inference tensor", lambda v: inference(v), lambda it: [it])
held("expanded", lambda v: made(v, 1, 3).expand(4, 3), lambda it: [it])
held("expanded among neighbours", lambda v: neighbours(v), list)
held("transposed", lambda v: made(v, 3, 4).t(), lambda it: [it])
held("views inside a larger block", lambda v: list(made(v, 12).split(4)), list)
held("views with gaps", lambda v: made(v, 12)[::3], lambda it: [it])
held("overlapping views", lambda v: overlapping(v), list)
held("view of another type", lambda v: both_views(made(v, 4)), list)
held("storage that is too short", lambda v: shrunk(v), lambda it: [], "storage has")
held("storage itself", lambda v: made(v).untyped_storage(), lambda it: [bytes(it.tolist())])
held(
    "packed sequence",
    lambda v: nn.utils.rnn.pack_sequence([made(v), made(v, 2)]),
    lambda it: [it.data, it.batch_sizes],
)
for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.uint16, torch.int8):
    held(f"{dtype}", lambda v, dtype=dtype: made(v, 4, dtype=dtype), lambda it: [it])  # type: ignore[misc]


def inference(value: int) -> torch.Tensor:
    """One made in inference mode."""
    with torch.inference_mode():
        return made(value)


def neighbours(value: int) -> list[torch.Tensor]:
    """An expanded tensor between others of one block."""
    block = made(value, 9)
    return [block[:3], block[3:4].expand(6), block[4:]]


def overlapping(value: int) -> list[torch.Tensor]:
    """Of one block."""
    block = made(value, 8)
    return [block[:6], block[2:]]


def both_views(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Of one storage."""
    return [tensor, tensor.view(torch.int32)]


def shrunk(value: int) -> torch.Tensor:
    """Most of its memory is gone."""
    tensor = made(value, 8)
    tensor.untyped_storage().resize_(4)
    return tensor


# Plain values: equal, or refused by the attribute's name.
def scalar(
    name: str, make: Callable[[int], object], refused: str = "attribute alpha: here .*, there "
) -> None:
    """Add a kind that differs in one attribute."""
    kind(f"value: {name}", lambda v: Scalars(alpha=make(v)), lambda m: [m.weight, repr(m.alpha)], refused)


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
scalar("on the parameter", lambda v: 1, "")
kind(
    "value: on a parameter",
    lambda v: on_parameter(SimpleNamespace(blocksize=v)),
    lambda m: [m.weight.quant_state.blocksize],
    "attribute blocksize",
)
kind(
    "value: of the process",
    lambda v: Scalars(device_id=v, cache_path=f"/tmp/{v}", folder="x" * v, rank=v),
    lambda m: [m.weight],
)
kind("value: mode", lambda v: nn.Linear(2, 2).train(v == 1), lambda m: [m.weight])


def bits(value: object) -> object:
    """What is compared, bit for bit."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous().clone()
        raw = bytes(plain.untyped_storage().tolist()) if plain.numel() else b""
        return str(plain.dtype), tuple(plain.shape), raw
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return repr(value)


def values_of(zoo_kind: Kind, module: nn.Module) -> list[object]:
    """What a module computes and holds."""
    with torch.no_grad():
        return [bits(value) for value in zoo_kind.read(module)]


def built(zoo_kind: Kind, value: int) -> nn.Module:
    """A module with the values of one side."""
    torch.manual_seed(value)
    return zoo_kind.build(value)


def seed() -> dict[str, object]:
    """Capture every kind: its layout, its bytes and its values, or why it is refused."""
    found: dict[str, object] = {}
    for name, each in KINDS.items():
        module = built(each, 1)
        try:
            image = capture(module)
        except UnsupportedTensor as error:
            found[name] = str(error)
            continue
        with image.readable(0, image.layout.image_bytes) as views:
            found[name] = image.layout, b"".join(views), values_of(each, module)
    return found


def verdict(zoo_kind: Kind, seeded: Any) -> str:
    """``equal``, ``different``, or why the fork is refused."""
    if isinstance(seeded, str):
        return seeded
    layout, raw, values = seeded
    module = built(zoo_kind, 2)
    try:
        image = capture(module)
    except UnsupportedTensor as error:
        return str(error)
    if difference := image.layout.first_difference(layout):
        return difference
    if image.layout.layout_id != layout.layout_id:
        return "different: layouts that are equal have two names"
    before = values_of(zoo_kind, module)
    with image.writable(0, image.layout.image_bytes) as places:
        for place in places:
            place[:], raw = raw[: place.nbytes], raw[place.nbytes :]
    after = values_of(zoo_kind, module)
    if after != values:
        return f"different: {after} is not {values}"
    return "equal" if before != after or not values else "equal before it was filled"


def main(side: str, file: Path) -> None:
    """One of the two processes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if side == "seed":
        file.write_bytes(pickle.dumps(seed()))
    else:
        seeded = pickle.load(io.BytesIO(file.read_bytes()))
        print(json.dumps({name: verdict(each, seeded[name]) for name, each in KINDS.items()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
