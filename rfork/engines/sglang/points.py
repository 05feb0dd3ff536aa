"""Which functions of SGLang the plug-in hooks or calls, and whether they are as it knows them."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from typing import Final

from rfork.engines import points as common
from rfork.engines.points import Moved, Point
from rfork.engines.points import moved as moved
from rfork.engines.wrapping import Method, wrap

TESTED: Final = ("0.5.23",)
"""Versions of SGLang that forks were seen with."""

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
REQUESTS = tuple(
    f"{MANAGER}.update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")
)
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
    Point("sglang.srt.plugins.hook_registry.HookRegistry.register", ("target", "hook")),
    Point("sglang.srt.arg_groups.choices.add_load_format_choices"),
    Point(ADD_CLI_ARGS, ("parser",)),
    Point(FROM_CLI_ARGS, ("args",)),
    Point(VERIFY_LOAD_FORMAT, ("self",)),
)
"""What `register` needs: in modules that SGLang has imported by then."""
LOADER = "sglang.srt.model_loader.loader"
SCHEDULING = (
    Point(f"{LOADER}.get_model_loader", ("load_config", "model_config")),
    Point(f"{LOADER}.BaseModelLoader.load_model", ("self", "model_config", "device_config")),
    Point(f"{LOADER}.DefaultModelLoader.load_model", ("self", "model_config", "device_config")),
    Point(f"{LOADER}._modules_with_quant_method", ("model",)),
    Point(f"{LOADER}.device_loading_context", ("module", "target_device")),
    Point(f"{LOADER}._get_quantization_config", ("model_config", "load_config")),
    Point(f"{LOADER}._initialize_model", ("model_config", "load_config", "quant_config")),
    Point(f"{LOADER}.post_load_weights", ("model",)),
    Point(f"{LOADER}.set_default_torch_dtype", ("dtype",)),
    Point("sglang.srt.model_loader.weight_utils.initialize_dummy_weights", ("model",)),
    Point("sglang.srt.layers.rotary_embedding.factory._ROPE_DICT"),
    Point("sglang.srt.arg_groups.model_path_hook.is_mistral_native_format", ("server_args",)),
    Point("sglang.srt.arg_groups.overrides.resolving_view", ("server_args",)),
    Point(
        "sglang.srt.model_executor.model_runner_components.load_model_utils.UNBALANCED_MODEL_LOADING_TIMEOUT_S"
    ),
    Point("sglang.srt.utils.common.reserve_rope_cache_for_long_sequences", ("model", "model_config")),
    Point(FROM_DISK, ("self", "model_path", "load_format")),
    Point(FROM_IPC, ("self", "recv_req")),
    Point(FROM_TENSOR, ("self", "named_tensors")),
    Point(FROM_DISTRIBUTED, ("self", "named_tensors")),
    Point(BEGIN_UPDATE, ("self",)),
    Point(END_UPDATE, ("self", "run_post_load")),
    *(Point(request, ("self", "recv_req")) for request in REQUESTS),
    Point(f"{MANAGER}._select_runners", ("self", "selector")),
    Point(RELEASE_MEMORY, ("self", "recv_req")),
    Point(RESUME_MEMORY, ("self", "recv_req")),
    Point(RUN_BATCH, ("self", "batch")),
    Point(PROCESS_RESULT, ("self", "batch", "result")),
    Point(RUN_LOOP, ("self",)),
    Point(RELEASE_HOST, ("self",)),
)
"""What is hooked in schedulers, and what the loader calls there."""
LAUNCHING = (
    Point(ON_SIGTERM, ("self",)),
    Point(DISPATCH, ("self",)),
)
"""What is hooked in the launcher."""


def hook(method: str, wrapper: Method) -> None:
    """Wrap a method, named by its path, of a class of SGLang's, as `rfork.engines.wrapping` says.

    What SGLang has not applied by then is not left to its `HookRegistry`: that looks for each function in all
    modules of the process, a third of a second for a dozen, and passes over what another plug-in has hooked.
    """
    owner, _, name = method.rpartition(".")
    wrap(pkgutil.resolve_name(owner), name, wrapper)


def told(moved: Moved, tested: Sequence[str] = TESTED) -> str:
    """One line for users, with the version of SGLang that is installed."""
    from importlib.metadata import version

    return common.told("SGLang", version("sglang"), moved, tested)
