"""vLLM functions that the plug-in hooks or calls, checked before a model is loaded."""

from __future__ import annotations

from typing import Final

from rfork.engines.hook_targets import HookTarget, find_incompatible, format_incompatibility
from rfork.errors import EngineMismatch

TESTED: Final = ("0.32.0",)
"""Versions of vLLM tested with forks."""

WORKER = "vllm.v1.worker.gpu_worker.Worker"
LOADERS = "vllm.model_executor.model_loader"
HOOK_TARGETS: Final = (
    HookTarget(f"{LOADERS}.register_model_loader", ("load_format",)),
    HookTarget(f"{LOADERS}.base_loader.BaseModelLoader.__init__", ("load_config",)),
    HookTarget(f"{LOADERS}.base_loader.BaseModelLoader.load_model", ("vllm_config", "model_config", "prefix")),
    HookTarget(f"{LOADERS}.base_loader.BaseModelLoader.load_weights", ("model", "model_config")),
    HookTarget(f"{LOADERS}.default_loader.DefaultModelLoader.get_all_weights", ("model_config", "model")),
    HookTarget(f"{LOADERS}.default_loader.DefaultModelLoader.download_model", ("model_config",)),
    HookTarget(f"{LOADERS}.dummy_loader.DummyModelLoader._process_online_quant_layer", ("layer", "info")),
    HookTarget(f"{LOADERS}.reload.layerwise.get_layerwise_info", ("layer",)),
    HookTarget(f"{LOADERS}.reload.utils.get_layer_tensors", ("layer",)),
    HookTarget(f"{LOADERS}.weight_utils.initialize_single_dummy_weight", ("param",)),
    HookTarget("vllm.model_executor.utils.weights_already_processed"),
    HookTarget("vllm.model_executor.layers.utils.check_cpu_sgl_kernel", ("n", "k", "dtype")),
    HookTarget("vllm._custom_ops._supports_onednn"),
    HookTarget("vllm.distributed.parallel_state.get_tp_group"),
    HookTarget("vllm.distributed.parallel_state.get_pp_group"),
    HookTarget("vllm.distributed.parallel_state.get_ep_group"),
    HookTarget(f"{WORKER}.execute_model", ("scheduler_output",)),
    HookTarget(f"{WORKER}.get_model"),
    HookTarget(f"{WORKER}.get_draft_model"),
    HookTarget(f"{WORKER}.sleep", ("level",)),
    HookTarget(f"{WORKER}.wake_up", ("tags",)),
    HookTarget(f"{WORKER}.discard", ("tags",)),
    HookTarget(f"{WORKER}.reset_weights"),
    HookTarget(f"{WORKER}.reload_weights"),
    HookTarget(f"{WORKER}.start_weight_update"),
    HookTarget(f"{WORKER}.start_draft_weight_update"),
    HookTarget(f"{WORKER}.update_weights", ("update_info",)),
    HookTarget(f"{WORKER}.finish_weight_update"),
    HookTarget(f"{WORKER}.shutdown"),
    HookTarget("vllm.v1.engine.utils.CoreEngineProcManager.__init__", ("vllm_config",)),
    HookTarget("vllm.v1.engine.utils.CoreEngineProcManager.shutdown", ("timeout",)),
)


def check(version: str, hook_targets: tuple[HookTarget, ...] = HOOK_TARGETS, tested: tuple[str, ...] = TESTED) -> None:
    """Raise EngineMismatch with one line if a hook target differs from the tested versions.

    `version` is that of the running engine. An untested version is a warning.
    """
    if incompatible := find_incompatible(hook_targets):
        raise EngineMismatch(
            format_incompatibility("vLLM", version, incompatible, tested),
            hint="use a tested version, or a newer rfork; other load formats work",
        )
    if version.partition("+")[0] not in tested:
        from rfork.logs import logger  # late import, see `plugin`

        logger(__name__).warning("untested vLLM version", version=version, tested=", ".join(tested))
