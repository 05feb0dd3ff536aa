"""SGLang's private names: functions that the plug-in hooks or calls, tensors, and configuration facts.

Imports neither SGLang nor torch.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from rfork.engine_command import LOAD_FORMAT
from rfork.engines import hook_targets as common
from rfork.engines.hook_targets import HookTarget, Incompatible, Method, patch_method
from rfork.engines.hook_targets import find_incompatible as find_incompatible

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig


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


def hook(method: str, wrapper: Method, on_failure: Callable[[], None] | None = None) -> None:
    """Wrap the method with this dotted path; see `rfork.engines.hook_targets.patch_method`.

    SGLang's `HookRegistry` is not used for hooks that it has not applied yet: it searches every module of the
    process for each function, which takes a third of a second for a dozen, and skips functions that another
    plug-in has hooked.
    """
    owner, _, name = method.rpartition(".")
    patch_method(pkgutil.resolve_name(owner), name, wrapper, on_failure=on_failure)


def format_incompatibility(incompatible: Incompatible, tested: Sequence[str] = TESTED) -> str:
    """Return a one-line message for users with the installed version of SGLang."""
    from importlib.metadata import version

    return common.format_incompatibility("SGLang", version("sglang"), incompatible, tested)


UNSUPPORTED: Final = {
    "weight_cache_mode": "off",
    "cpu_offload_gb": 0,
    "offload_group_size": -1,
    "ple_offload_embedding": None,
    "dwdp_size": 1,
    "enable_eplb": False,
    "elastic_ep_backend": None,
    "enable_elastic_expert_backup": False,
    "enable_paged_experts": False,
    "kt_weight_path": None,
    "startup_weight_load_mode": "serial",
    "encoder_only": False,
    "use_ray": False,
}
"""Options that move weights or create processes in ways rfork does not support, with the value that disables
each.
"""
SET_BY_WEIGHTS: Final = {
    "EmbeddingGemma2Model": "the function that computes its norms",
    "LlavaBaseForCausalLM": "its vision tower and its feature selection",
    "LlavaForConditionalGeneration": "image_feature_len",
    "LlavaVidForCausalLM": "its vision tower and its feature selection",
    "YiVLForCausalLM": "its vision tower and its feature selection",
    "NemotronHForCausalLMMTP": "whether it has its own head",
    "RadioModel": "whether it embeds videos",
}
"""State other than tensors that `load_weights` sets, by class (SGLang 0.5.23). A fork does not call
`load_weights`.
"""
SCRATCH: Final = (
    "*.workspace",  # Marlin kernels on layers, cutlass on the quantisation method
    "*.a_ptr",
    "*.b_ptr",
    "*.out_ptr",
    "*.a_scales_ptr",
    "*.b_scales_ptr",
    "*.expert_offsets",
    "*.problem_sizes1",
    "*.problem_sizes2",
    "*.a_ptrs",
    "*.b_ptrs",
    "*.out_ptrs",
    "*.a_scales_ptrs",
    "*.b_scales_ptrs",
    "*.alpha_ptrs",
    "*.blockscale_offsets",
    "*.layout_sfa",
    "*.layout_sfb",
    "*._counts_buf",
    "*.oe_n_gram_ids",
    "*.exclusive_req_len_sums",
    "*workspace_buffer",
    "*.dispatcher.*",  # communication buffers of expert parallelism
)
"""Tensors that each forward pass of SGLang 0.5.23 overwrites, or that hold addresses; none are weights.

They belong to layers, and to the expert methods of fp8.py, w4afp8.py and compressed-tensors.
"""
HELPER_ATTRIBUTES: Final = ("runner_core", "_aiter_runner", "moe_runner_config", "w13_kernel", "w2_kernel")
"""Attributes of SGLang's layers that refer to MoE runners and kernels, including those for Ascend."""
PATH_FIELDS: Final = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"})
"""Keys that state where a configuration was loaded from."""
RESOLVED: Final = (
    "kv_cache_dtype",
    "speculative_draft_kv_cache_dtype",
    "fp8_gemm_runner_backend",
    "fp4_gemm_runner_backend",
)
"""Options that affect the meaning of bytes: scales and kernel-specific layouts."""


def unsupported_reason(arguments: Mapping[str, object]) -> str | None:
    """Return why a server with these arguments cannot be forked, or None if it can."""
    for name, off in UNSUPPORTED.items():
        if (value := arguments.get(name, off)) != off and (value or off):
            return f"--{name.replace('_', '-')} cannot be used with --load-format {LOAD_FORMAT}"
    return None


def facts(model_config: ModelConfig) -> Iterator[str]:
    """Return the facts of the effective configuration, including the user's overrides."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_server_args

    path = str(model_config.model_path)
    yield f"config {digest(model_config.hf_config, path)}"
    own = getattr(model_config.hf_config, "quantization_config", None)
    yield f"quantization_config {digest(own, path) if own else 'none'}"
    view = resolving_view(get_server_args())
    for name in RESOLVED:
        if (value := getattr(view, name, None)) is not None:
            yield f"{name} {value}"


def digest(config: object, path: str = "") -> str:
    """Return 12 hexadecimal digits identifying a configuration, ignoring where it was loaded from."""
    config_json = json.dumps(_normalise(config, path), sort_keys=True, default=lambda value: type(value).__name__)
    return sha256(config_json.encode()).hexdigest()[:12]


def _normalise(value: object, path: str) -> object:
    """Return `value` without process-specific parts: addresses and folder paths."""
    if callable(to_dict := getattr(value, "to_dict", None)):
        value = to_dict()
    if isinstance(value, Mapping):
        return {str(key): _normalise(one, path) for key, one in value.items() if str(key) not in PATH_FIELDS}
    if isinstance(value, (list, tuple)):
        return [_normalise(one, path) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(one) for one in value)
    if isinstance(value, str) and path and value.startswith(path):
        return value.removeprefix(path)
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    return str(value) if type(value).__module__ == "torch" else type(value).__name__
