"""Lets an unmodified SGLang serve its weights with its own R-Fork on a CPU, if on PYTHONPATH.

SGLang queries CUDA's allocator for the address of weights, unless torch is missing. With this patch they are
registered individually, by SGLang's own first version of that function. Nothing else is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

NAME = "sglang.srt.model_loader.remote_instance_weight_loader_utils"


class CpuPatchFinder:
    """Finds that one module, and replaces the function after the module was executed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        spec = PathFinder.find_spec(name, path, target) if name == NAME else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            vars(module)["register_memory_region_v2"] = vars(module)["register_memory_region_v1"]

        vars(spec.loader)["exec_module"] = exec_module
        return spec


sys.meta_path.insert(0, CpuPatchFinder)
