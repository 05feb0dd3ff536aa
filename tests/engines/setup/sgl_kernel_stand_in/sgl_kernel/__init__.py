"""Stand-in for SGLang's package of CUDA kernels, so that SGLang can be imported without CUDA.

Every name can be imported from it and from any submodule; every call raises. SGLang on a CPU, with torch's
own attention and sampling, calls none of them. The set-up adds the one module that is used, the pure Python
`scalar_type` of the real package.
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
    """Finds every submodule that has no file, and fills it with kernels that raise."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a module of that name, if it belongs to this package."""
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Use an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Make every name in it a kernel."""

        def kernel(name: str) -> MissingKernel:
            return kernel_named(module.__name__, name)

        module.__dict__["__getattr__"] = kernel


def kernel_named(module: str, name: str) -> MissingKernel:
    """Return the kernel of that name; AttributeError for names that Python itself looks up."""
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return MissingKernel(f"{module}.{name}")


def __getattr__(name: str) -> MissingKernel:
    return kernel_named(__name__, name)


# Last, so that modules with files come first.
sys.meta_path.append(SubmoduleFinder())
