"""SGLang functions that the plug-in hooks or calls, and checks that they are as expected."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from typing import Final

from rfork.engines import hook_targets as common
from rfork.engines.hook_targets import HookTarget, Incompatible
from rfork.engines.hook_targets import find_incompatible as find_incompatible
from rfork.engines.monkeypatch import Method, patch_method

TESTED: Final = ("0.5.23",)
"""Versions of SGLang tested with forks."""

ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
FROM_CLI_ARGS = "sglang.srt.server_args.ServerArgs.from_cli_args"
VERIFY_LOAD_FORMAT = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"

WEIGHTS = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
FROM_DISK = f"{WEIGHTS}.update_weights_from_disk"
FROM_IPC = f"{WEIGHTS}.update_weights_from_ipc"
FROM_TENSOR = f"{WEIGHTS}.update_weights_from_tensor"
FROM_DISTRIBUTED = f"{WEIGHTS}.load_weights_from_distributed"
BEGIN_UPDATE = f"{WEIGHTS}.begin_weight_update"
END_UPDATE = f"{WEIGHTS}.end_weight_update"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
REQUESTS = tuple(f"{MANAGER}.update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc"))
RELEASE_MEMORY = f"{MANAGER}.release_memory_occupation"
RESUME_MEMORY = f"{MANAGER}.resume_memory_occupation"

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
RUN_BATCH = f"{SCHEDULER}.run_batch"
PROCESS_RESULT = f"{SCHEDULER}.process_batch_result"
RUN_LOOP = f"{SCHEDULER}.run_event_loop"
RELEASE_HOST = f"{SCHEDULER}.release_host_resources"

TOKENIZER = "sglang.srt.managers.tokenizer_manager"
ON_SIGTERM = f"{TOKENIZER}.SignalHandler.sigterm_handler"
DISPATCH = f"{TOKENIZER}.TokenizerManager._dispatch_to_scheduler"

EARLY = (
    HookTarget("sglang.srt.plugins.hook_registry.HookRegistry.register", ("target", "hook")),
    HookTarget("sglang.srt.arg_groups.choices.add_load_format_choices"),
    HookTarget(ADD_CLI_ARGS, ("parser",)),
    HookTarget(FROM_CLI_ARGS, ("args",)),
    HookTarget(VERIFY_LOAD_FORMAT, ("self",)),
)
"""Targets of `register`, in modules that SGLang has already imported."""
LOADER = "sglang.srt.model_loader.loader"
SCHEDULING = (
    HookTarget(f"{LOADER}.get_model_loader", ("load_config", "model_config")),
    HookTarget(f"{LOADER}.BaseModelLoader.load_model", ("self", "model_config", "device_config")),
    HookTarget(f"{LOADER}.DefaultModelLoader.load_model", ("self", "model_config", "device_config")),
    HookTarget(f"{LOADER}._modules_with_quant_method", ("model",)),
    HookTarget(f"{LOADER}.device_loading_context", ("module", "target_device")),
    HookTarget(f"{LOADER}._get_quantization_config", ("model_config", "load_config")),
    HookTarget(f"{LOADER}._initialize_model", ("model_config", "load_config", "quant_config")),
    HookTarget(f"{LOADER}.post_load_weights", ("model",)),
    HookTarget(f"{LOADER}.set_default_torch_dtype", ("dtype",)),
    HookTarget("sglang.srt.model_loader.weight_utils.initialize_dummy_weights", ("model",)),
    HookTarget("sglang.srt.layers.rotary_embedding.factory._ROPE_DICT"),
    HookTarget("sglang.srt.arg_groups.model_path_hook.is_mistral_native_format", ("server_args",)),
    HookTarget("sglang.srt.arg_groups.overrides.resolving_view", ("server_args",)),
    HookTarget("sglang.srt.model_executor.model_runner_components.load_model_utils.UNBALANCED_MODEL_LOADING_TIMEOUT_S"),
    HookTarget("sglang.srt.utils.common.reserve_rope_cache_for_long_sequences", ("model", "model_config")),
    HookTarget(FROM_DISK, ("self", "model_path", "load_format")),
    HookTarget(FROM_IPC, ("self", "recv_req")),
    HookTarget(FROM_TENSOR, ("self", "named_tensors")),
    HookTarget(FROM_DISTRIBUTED, ("self", "named_tensors")),
    HookTarget(BEGIN_UPDATE, ("self",)),
    HookTarget(END_UPDATE, ("self", "run_post_load")),
    *(HookTarget(request, ("self", "recv_req")) for request in REQUESTS),
    HookTarget(f"{MANAGER}._select_runners", ("self", "selector")),
    HookTarget(RELEASE_MEMORY, ("self", "recv_req")),
    HookTarget(RESUME_MEMORY, ("self", "recv_req")),
    HookTarget(RUN_BATCH, ("self", "batch")),
    HookTarget(PROCESS_RESULT, ("self", "batch", "result")),
    HookTarget(RUN_LOOP, ("self",)),
    HookTarget(RELEASE_HOST, ("self",)),
)
"""Functions hooked in schedulers, and functions that the loader calls there."""
LAUNCHING = (
    HookTarget(ON_SIGTERM, ("self",)),
    HookTarget(DISPATCH, ("self",)),
)
"""Functions hooked in the launcher."""


def hook(method: str, wrapper: Method) -> None:
    """Wrap the method with this dotted path; see `rfork.engines.monkeypatch`.

    SGLang's `HookRegistry` is not used for hooks that it has not applied yet: it searches every module of the
    process for each function, which takes a third of a second for a dozen, and skips functions that another
    plug-in has hooked.
    """
    owner, _, name = method.rpartition(".")
    patch_method(pkgutil.resolve_name(owner), name, wrapper)


def format_incompatibility(incompatible: Incompatible, tested: Sequence[str] = TESTED) -> str:
    """Return a one-line message for users with the installed version of SGLang."""
    from importlib.metadata import version

    return common.format_incompatibility("SGLang", version("sglang"), incompatible, tested)
