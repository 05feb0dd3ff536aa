"""What of vLLM this plug-in holds on to, and whether it is still there; looked at before it loads."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from rfork.errors import RforkError
from rfork.logs import logger

log = logger(__name__)

TESTED: Final = ("0.32.0",)


class HooksMoved(RforkError):
    """This vLLM is not made as those that the plug-in was written for."""


@dataclass(frozen=True, slots=True)
class Point:
    """A function, method or class of vLLM, and parameters that it is called with, or that are read."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()


WORKER = "vllm.v1.worker.gpu_worker"
LOADERS = "vllm.model_executor.model_loader"
POINTS: Final = (
    Point(LOADERS, "register_model_loader", ("load_format",)),
    Point(f"{LOADERS}.base_loader", "BaseModelLoader.__init__", ("load_config",)),
    Point(f"{LOADERS}.base_loader", "BaseModelLoader.load_model", ("vllm_config", "model_config", "prefix")),
    Point(f"{LOADERS}.base_loader", "BaseModelLoader.load_weights", ("model", "model_config")),
    Point(f"{LOADERS}.default_loader", "DefaultModelLoader.get_all_weights", ("model_config", "model")),
    Point(f"{LOADERS}.default_loader", "DefaultModelLoader.download_model", ("model_config",)),
    Point(f"{LOADERS}.dummy_loader", "DummyModelLoader._process_online_quant_layer", ("layer", "info")),
    Point(f"{LOADERS}.reload.layerwise", "get_layerwise_info", ("layer",)),
    Point(f"{LOADERS}.reload.utils", "get_layer_tensors", ("layer",)),
    Point(f"{LOADERS}.weight_utils", "initialize_single_dummy_weight", ("param",)),
    Point("vllm.model_executor.utils", "weights_already_processed"),
    Point("vllm.model_executor.layers.utils", "check_cpu_sgl_kernel", ("n", "k", "dtype")),
    Point("vllm._custom_ops", "_supports_onednn"),
    Point("vllm.distributed.parallel_state", "get_tp_group"),
    Point("vllm.distributed.parallel_state", "get_pp_group"),
    Point("vllm.distributed.parallel_state", "get_ep_group"),
    Point(WORKER, "Worker.execute_model", ("scheduler_output",)),
    Point(WORKER, "Worker.get_model"),
    Point(WORKER, "Worker.get_draft_model"),
    Point(WORKER, "Worker.sleep", ("level",)),
    Point(WORKER, "Worker.wake_up", ("tags",)),
    Point(WORKER, "Worker.discard", ("tags",)),
    Point(WORKER, "Worker.reset_weights"),
    Point(WORKER, "Worker.reload_weights"),
    Point(WORKER, "Worker.start_weight_update"),
    Point(WORKER, "Worker.start_draft_weight_update"),
    Point(WORKER, "Worker.update_weights", ("update_info",)),
    Point(WORKER, "Worker.finish_weight_update"),
    Point(WORKER, "Worker.shutdown"),
    Point("vllm.v1.engine.utils", "CoreEngineProcManager.__init__", ("vllm_config",)),
    Point("vllm.v1.engine.utils", "CoreEngineProcManager.shutdown", ("timeout",)),
)


def check(version: str, points: tuple[Point, ...] = POINTS, tested: tuple[str, ...] = TESTED) -> None:
    """Raise HooksMoved, one line, where a point is not as it was in the versions that were tested.

    `version` is that of the engine that is running. Another one than those tested is a warning.
    """
    if moved := list(moved_among(points)):
        raise HooksMoved(
            f"rfork does not fit vLLM {version} (tested: {', '.join(tested)}): {'; '.join(moved)}",
            hint="use a tested version, or a newer rfork; other load formats work",
        )
    if version.partition("+")[0] not in tested:
        log.warning("rfork was not tested with this vLLM", version=version, tested=", ".join(tested))


def moved_among(points: tuple[Point, ...]) -> Iterator[str]:
    """What is missing, or takes other parameters, one phrase each."""
    for point in points:
        named = f"{point.module}.{point.name}"
        try:
            found: object = importlib.import_module(point.module)
            for part in point.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            yield f"there is no {named}"
            continue
        if point.parameters and (missing := set(point.parameters) - _parameters(found)):
            yield f"{named} takes no {', '.join(sorted(missing))}"


def _parameters(found: object) -> set[str]:
    """The names of a callable's parameters; none of what cannot be called."""
    if not isinstance(found, Callable):  # type: ignore[arg-type]
        return set()
    try:
        return set(inspect.signature(found).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return set()
