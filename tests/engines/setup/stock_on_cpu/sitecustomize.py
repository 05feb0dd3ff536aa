"""On PYTHONPATH, lets an unmodified SGLang give its weights by its own R-Fork on a CPU.

SGLang asks CUDA's allocator where weights lie, unless torch is missing. With this they are registered one by
one, by SGLang's own first version of that function. Nothing else of it is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

NAME = "sglang.srt.model_loader.remote_instance_weight_loader_utils"


class CpuPatchFinder:
    """Finds that one module, and swaps the function once it was executed."""

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
