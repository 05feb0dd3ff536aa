"""Lets SGLang's weight checker run on a CPU, if on PYTHONPATH. Nothing else is changed.

Older versions wait for CUDA before they compute digests, which fails without CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

NAME = "sglang.srt.utils.weight_checker"


class CpuCheckerFinder:
    """Finds that one module, and makes torch's wait for CUDA do nothing once it was executed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        spec = PathFinder.find_spec(name, path, target) if name == NAME else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            import torch

            execute(module)
            if not torch.cuda.is_available():
                vars(torch.cuda)["synchronize"] = lambda device=None: None

        vars(spec.loader)["exec_module"] = exec_module
        return spec


sys.meta_path.insert(0, CpuCheckerFinder)
