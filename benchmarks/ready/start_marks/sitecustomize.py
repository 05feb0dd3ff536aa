"""Prints when an unmodified engine reaches the steps of its start-up, if on PYTHONPATH.

Each mark is a line ``MARK {"name": …, "pid": …, "began": …, "ended": …}`` on the standard error, with times of
`time.monotonic`. With BENCH_NO_WEIGHTS, the engines' loaders of dummy weights leave the memory as it is, because
generating random values takes longer than loading real ones, and vLLM does not pack weights, as with rfork. Nothing
else is changed.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

IMPORTED = {"vllm.v1.worker.cpu_worker", "sglang.srt.managers.scheduler"}
"""Modules of a worker that import all others it needs."""
CALLS = {
    "vllm.v1.worker.cpu_model_runner": {"get_model": "load"},
    "vllm.model_executor.model_loader.base_loader": {"initialize_model": "build"},
    "sglang.srt.model_executor.model_runner": {"ModelRunner.load_model": "load"},
    "sglang.srt.model_loader.loader": {"_initialize_model": "build"},
    "rfork.receiver.session": {"ForkSession.run": "fork"},
}
"""Functions by module, and the mark of each call."""


def nothing(*_: object, **__: object) -> bool:
    """Replace a function that fills or packs weights."""
    return False


NO_WEIGHTS: dict[str, dict[str, object]] = {
    "vllm.model_executor.model_loader.dummy_loader": {"initialize_single_dummy_weight": nothing},
    "vllm._custom_ops": {"_supports_onednn": False},
    "vllm.model_executor.layers.utils": {"check_cpu_sgl_kernel": nothing},
    "sglang.srt.model_loader.loader": {"initialize_dummy_weights": nothing},
}
"""Attributes to replace, by module."""


def mark(name: str, began: float, **fields: object) -> None:
    """Print one mark, whose end is now."""
    times = {"began": began, "ended": time.monotonic()}
    os.write(2, f"MARK {json.dumps({'name': name, 'pid': os.getpid(), **times, **fields})}\n".encode())


def marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a mark for each call. A fork's mark has the values of its report."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        began = time.monotonic()
        if name == "load":
            mark("loads", began)
        result = function(*arguments, **keywords)
        report = {}
        if name == "fork":
            sources = [[source.host, source.transport, source.verified_bytes] for source in result.sources]
            report = {"phases": result.phases, "sources": sources, "bytes": result.image_bytes}
        mark(name, began, **report)
        return result

    return wrapper


def instrument(module: ModuleType, name: str, imported_from: float) -> None:
    """Add the marks to a module that has just been executed."""
    if name in IMPORTED:
        mark("imported", imported_from)
    for path, call in CALLS.get(name, {}).items():
        owner: Any = module
        *parents, attribute = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, attribute, marked(call, getattr(owner, attribute)))
    if name in NO_WEIGHTS and "BENCH_NO_WEIGHTS" in os.environ:
        vars(module).update(NO_WEIGHTS[name])


class MarkFinder:
    """Finds those modules, and adds the marks once they are executed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        if name not in IMPORTED and name not in CALLS and name not in NO_WEIGHTS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute, began = spec.loader.exec_module, time.monotonic()

        def exec_module(module: ModuleType) -> None:
            execute(module)
            instrument(module, name, began)

        vars(spec.loader)["exec_module"] = exec_module
        return spec


sys.meta_path.insert(0, MarkFinder)
