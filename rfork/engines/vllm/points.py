"""What of vLLM this plug-in holds on to, and whether it is still there; looked at before it loads."""

from __future__ import annotations

from typing import Final

from rfork.engines.points import Point, moved, told
from rfork.errors import EngineMismatch

TESTED: Final = ("0.32.0",)
"""Versions of vLLM that forks were seen with."""

WORKER = "vllm.v1.worker.gpu_worker.Worker"
LOADERS = "vllm.model_executor.model_loader"
POINTS: Final = (
    Point(f"{LOADERS}.register_model_loader", ("load_format",)),
    Point(f"{LOADERS}.base_loader.BaseModelLoader.__init__", ("load_config",)),
    Point(f"{LOADERS}.base_loader.BaseModelLoader.load_model", ("vllm_config", "model_config", "prefix")),
    Point(f"{LOADERS}.base_loader.BaseModelLoader.load_weights", ("model", "model_config")),
    Point(f"{LOADERS}.default_loader.DefaultModelLoader.get_all_weights", ("model_config", "model")),
    Point(f"{LOADERS}.default_loader.DefaultModelLoader.download_model", ("model_config",)),
    Point(f"{LOADERS}.dummy_loader.DummyModelLoader._process_online_quant_layer", ("layer", "info")),
    Point(f"{LOADERS}.reload.layerwise.get_layerwise_info", ("layer",)),
    Point(f"{LOADERS}.reload.utils.get_layer_tensors", ("layer",)),
    Point(f"{LOADERS}.weight_utils.initialize_single_dummy_weight", ("param",)),
    Point("vllm.model_executor.utils.weights_already_processed"),
    Point("vllm.model_executor.layers.utils.check_cpu_sgl_kernel", ("n", "k", "dtype")),
    Point("vllm._custom_ops._supports_onednn"),
    Point("vllm.distributed.parallel_state.get_tp_group"),
    Point("vllm.distributed.parallel_state.get_pp_group"),
    Point("vllm.distributed.parallel_state.get_ep_group"),
    Point(f"{WORKER}.execute_model", ("scheduler_output",)),
    Point(f"{WORKER}.get_model"),
    Point(f"{WORKER}.get_draft_model"),
    Point(f"{WORKER}.sleep", ("level",)),
    Point(f"{WORKER}.wake_up", ("tags",)),
    Point(f"{WORKER}.discard", ("tags",)),
    Point(f"{WORKER}.reset_weights"),
    Point(f"{WORKER}.reload_weights"),
    Point(f"{WORKER}.start_weight_update"),
    Point(f"{WORKER}.start_draft_weight_update"),
    Point(f"{WORKER}.update_weights", ("update_info",)),
    Point(f"{WORKER}.finish_weight_update"),
    Point(f"{WORKER}.shutdown"),
    Point("vllm.v1.engine.utils.CoreEngineProcManager.__init__", ("vllm_config",)),
    Point("vllm.v1.engine.utils.CoreEngineProcManager.shutdown", ("timeout",)),
)


def check(version: str, points: tuple[Point, ...] = POINTS, tested: tuple[str, ...] = TESTED) -> None:
    """Raise EngineMismatch, one line, where a point is not as it was in the versions that were tested.

    `version` is that of the engine that is running. Another one than those tested is a warning.
    """
    if wrong := moved(points):
        raise EngineMismatch(
            told("vLLM", version, wrong, tested),
            hint="use a tested version, or a newer rfork; other load formats work",
        )
    if version.partition("+")[0] not in tested:
        from rfork.logs import logger  # see `plugin`

        logger(__name__).warning(
            "rfork was not tested with this vLLM", version=version, tested=", ".join(tested)
        )
