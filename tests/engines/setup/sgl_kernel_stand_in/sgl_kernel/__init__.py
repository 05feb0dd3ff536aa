"""A stand-in for SGLang's package of CUDA kernels, so that SGLang can be imported where there is no CUDA.

Every name can be imported from it and from any submodule; whatever is called raises. SGLang on a CPU, asked
for torch's own attention and sampling, calls none of them. The set-up puts beside this file the one module
that is used, the pure Python `scalar_type` of the package whose place this takes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn


class MissingKernel:
    """A function of the real package, by name only."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: object, **options: object) -> NoReturn:
        raise NotImplementedError(f"{self.name} is a CUDA kernel, and this is only its stand-in")


class SubmoduleFinder(MetaPathFinder, Loader):
    """Finds every submodule that has no file, and makes it of kernels that raise."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A module of that name, if it is one of this package."""
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary module will do."""

    def exec_module(self, module: ModuleType) -> None:
        """Let every name in it be a kernel."""

        def kernel(name: str) -> MissingKernel:
            return kernel_named(module.__name__, name)

        module.__dict__["__getattr__"] = kernel


def kernel_named(module: str, name: str) -> MissingKernel:
    """The kernel of that name; AttributeError for names that Python itself asks for."""
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return MissingKernel(f"{module}.{name}")


def __getattr__(name: str) -> MissingKernel:
    return kernel_named(__name__, name)


# Last: the modules that have files come first.
sys.meta_path.append(SubmoduleFinder())
