"""Names of a layer's method, and the decision whether such a layer can be forked."""

from __future__ import annotations

import pytest
from torch import nn

from rfork.engines.layer_methods import ForkableMethods, dotted_name, method_name


class Base:
    """An engine's base class of methods."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        return


class Stepless(Base):
    pass


class Read(Base):
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        return


class Inheriting(Read):
    pass


class Unread(Read):
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        return


class Kernel:
    pass


class Scheme:
    def __init__(self) -> None:
        self.kernel = Kernel()


METHODS = ForkableMethods(
    base=(dotted_name(Base),), read=(dotted_name(Read),), proven={"cpu": ("Unread/Scheme/Kernel",)}, command="check it"
)


def layer_with(method: object, scheme: object = None, **attributes: object) -> nn.Module:
    """Return a layer with this method."""
    layer = nn.Linear(2, 2)
    vars(method).update(attributes)
    vars(layer).update({"quant_method": method, "scheme": scheme})
    return layer


def test_a_name_has_method_scheme_and_kernel() -> None:
    """Kernels of one method keep different state, so each has a name of its own."""
    assert "" == method_name(nn.Linear(2, 2))
    assert "Read" == method_name(layer_with(Read()))
    assert "Read/Kernel" == method_name(layer_with(Read(), kernel=Kernel()))
    assert "Read/Kernel" == method_name(layer_with(Read(), experts_cls=Kernel))
    assert "Read/Scheme/Kernel" == method_name(layer_with(Read(), Scheme()))


@pytest.mark.parametrize("method", [Stepless, Read, Inheriting])
def test_known_post_processing_is_forked(method: type[Base]) -> None:
    """That of the base class does nothing, and a subclass inherits what was read."""
    assert METHODS.refusal(layer_with(method()), "cuda") is None


def test_a_method_is_proven_for_one_type_of_device() -> None:
    """With another device, kernel or override it is another method."""
    proven = layer_with(Unread(), Scheme())
    assert METHODS.refusal(proven, "cpu") is None
    reason = METHODS.refusal(proven, "cuda")
    assert "Unread/Scheme/Kernel has not passed the golden check on cuda: `check it` runs it" == reason
    assert METHODS.refusal(layer_with(Unread()), "cpu") is not None


def test_the_user_may_accept_a_method() -> None:
    """By the name that the check prints."""
    layer = layer_with(Unread(), kernel=Kernel())
    assert METHODS.refusal(layer, "cuda", ("Unread/Kernel",)) is None


def test_layers_without_a_method_are_forked() -> None:
    """They are plain modules."""
    assert METHODS.refusal(nn.Linear(2, 2), "cuda") is None
