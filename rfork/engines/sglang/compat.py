"""SGLang's private names: functions that the plug-in hooks or calls, tensors, and configuration facts.

A name that differs between the supported versions, 0.5.16 to 0.5.23, is here with its alternatives. Imports
neither SGLang nor torch.
"""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from rfork.engine_command import LOAD_FORMAT
from rfork.engines import hook_targets as common
from rfork.engines.hook_targets import (
    Compatibility,
    HookTarget,
    Incompatible,
    Method,
    find_incompatible,
    patch_method,
    unlisted_methods,
)

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from torch import nn


TESTED: Final = ("0.5.16", "0.5.18", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
"""Versions of SGLang tested with forks."""


@cache
def first_of(*paths: str) -> str:
    """Return the first dotted path that exists, or the first one if none does: its check reports it as missing.

    The alternatives of a name that moved between versions, the newest first.
    """
    for path in paths:
        try:
            pkgutil.resolve_name(path)
        except Exception:  # a module may raise anything when it is imported
            continue
        return path
    return paths[0]


REGISTER = "sglang.srt.plugins.hook_registry.HookRegistry.register"
ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
FROM_CLI_ARGS = "sglang.srt.server_args.ServerArgs.from_cli_args"
VERIFY_LOAD_FORMAT = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
LOAD_FORMATS = ("sglang.srt.arg_groups.choices.LOAD_FORMAT_CHOICES", "sglang.srt.server_args.LOAD_FORMAT_CHOICES")
"""List of the load formats that the command line accepts: since 0.5.20, and before."""


Find = Callable[..., str]
"""Returns one of several dotted paths; see `first_of`."""


@cache
def early(find: Find = first_of) -> tuple[HookTarget, ...]:
    """Return the targets of `register`, in modules that SGLang has already imported."""
    return (
        HookTarget(REGISTER, ("target", "hook")),
        HookTarget(find(*LOAD_FORMATS)),
        HookTarget(ADD_CLI_ARGS, ("parser",)),
        HookTarget(FROM_CLI_ARGS, ("args",)),
        HookTarget(VERIFY_LOAD_FORMAT, ("self",)),
    )


@cache
def incompatible_early() -> Incompatible:
    """Check these targets in the installed SGLang."""
    return find_incompatible(early())


def load_formats() -> list[str]:
    """Return SGLang's own list of load formats."""
    formats: list[str] = pkgutil.resolve_name(first_of(*LOAD_FORMATS))
    return formats


WEIGHTS = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
FROM_DISK = f"{WEIGHTS}.update_weights_from_disk"
FROM_IPC = f"{WEIGHTS}.update_weights_from_ipc"
FROM_TENSOR = f"{WEIGHTS}.update_weights_from_tensor"
FROM_DISTRIBUTED = (f"{WEIGHTS}.load_weights_from_distributed", f"{WEIGHTS}.update_weights_from_distributed")
"""Since 0.5.21, and before."""
BEGIN_UPDATE = f"{WEIGHTS}.begin_weight_update"
END_UPDATE = f"{WEIGHTS}.end_weight_update"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
FULL_REQUESTS = tuple(f"{MANAGER}.update_weights_from_{source}" for source in ("disk", "ipc"))
STEP_REQUESTS = tuple(f"{MANAGER}.update_weights_from_{source}" for source in ("distributed", "tensor"))
CHECK_WEIGHTS = f"{MANAGER}.check_weights"
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

CONTEXT = "sglang.srt.runtime_context"
LOADER = "sglang.srt.model_loader.loader"
ROTARY_TABLES = "sglang.srt.layers.rotary_embedding.factory._ROPE_DICT"
RESERVE_ROTARY_TABLES = "sglang.srt.utils.common.reserve_rope_cache_for_long_sequences"
INITIALIZE = "initialize_dummy_weights"
"""Function of the loader's module that fills a model's weights, those of its `state_dict`, with random values."""
LOADING = "sglang.srt.model_executor.model_runner_components.load_model_utils"
LOAD_TIMEOUT = f"{LOADING}.UNBALANCED_MODEL_LOADING_TIMEOUT_S"
CHOOSE_LOADER = f"{LOADING}.get_model_loader"
"""Before 0.5.18 it chooses the loader of ModelOpt and AutoRound models before it considers a loader class, which those
loaders cannot use as a load format.
"""
MISTRAL_FORMAT = (
    "sglang.srt.arg_groups.model_path_hook.is_mistral_native_format",
    "sglang.srt.server_args.ServerArgs._is_mistral_native_format",
)
"""Since 0.5.19, and before."""


@cache
def scheduling(find: Find = first_of) -> tuple[HookTarget, ...]:
    """Return the functions that are hooked in schedulers, and those that the loader calls there."""
    return (
        HookTarget(f"{CONTEXT}.get_context"),
        HookTarget(f"{CONTEXT}.get_parallel"),
        HookTarget(f"{LOADER}.get_model_loader", ("load_config", "model_config")),
        HookTarget(f"{LOADER}.BaseModelLoader.load_model", ("self", "model_config", "device_config")),
        HookTarget(f"{LOADER}.DefaultModelLoader.load_model", ("self", "model_config", "device_config")),
        HookTarget(f"{LOADER}.DummyModelLoader.load_model", ("self", "model_config", "device_config")),
        HookTarget(f"{LOADER}.{INITIALIZE}", ("model",), "comfort"),
        HookTarget("sglang.srt.model_loader.utils.get_model_architecture", ("model_config",)),
        HookTarget(find(*MISTRAL_FORMAT)),
        HookTarget(ROTARY_TABLES),
        HookTarget(RESERVE_ROTARY_TABLES, ("model", "model_config"), "comfort"),
        HookTarget(LOAD_TIMEOUT, tier="comfort"),
        HookTarget(CHOOSE_LOADER, ("load_config", "model_config")),
        HookTarget(FROM_DISK, ("self", "model_path", "load_format"), "lifecycle"),
        HookTarget(FROM_IPC, ("self", "recv_req"), "lifecycle"),
        HookTarget(FROM_TENSOR, ("self", "named_tensors"), "lifecycle"),
        HookTarget(find(*FROM_DISTRIBUTED), ("self",), "lifecycle"),
        HookTarget(BEGIN_UPDATE, ("self",), "lifecycle", optional=True),  # since 0.5.21
        HookTarget(END_UPDATE, ("self",), "lifecycle", optional=True),
        *(HookTarget(request, ("self", "recv_req"), "lifecycle") for request in (*FULL_REQUESTS, *STEP_REQUESTS)),
        HookTarget(CHECK_WEIGHTS, ("self", "recv_req"), "lifecycle"),
        HookTarget(RELEASE_MEMORY, ("self", "recv_req"), "lifecycle"),
        HookTarget(RESUME_MEMORY, ("self", "recv_req"), "lifecycle"),
        HookTarget("sglang.srt.constants.GPU_MEMORY_TYPE_WEIGHTS", tier="lifecycle"),
        HookTarget(RUN_LOOP, ("self",), "comfort"),
        HookTarget(RELEASE_HOST, ("self",), "comfort"),
        HookTarget(RUN_BATCH, ("self", "batch"), "comfort"),
        HookTarget(PROCESS_RESULT, ("self", "batch", "result"), "comfort"),
    )


LAUNCHING = (
    HookTarget(ON_SIGTERM, ("self",), "comfort"),
    HookTarget(DISPATCH, ("self",), "comfort"),
)
"""Functions hooked in the launcher."""

CHANGES_WEIGHTS: Final = re.compile("weight|sleep|wake|release|resume|update|load|lora")
HARMLESS: Final = frozenset(
    {
        "destroy_weights_update_group",
        "flush_cache_after_weight_update",
        "get_weights_by_name",
        "init_weights_update_group",
        "receive_weights_from_distributed",
        "record_weight_version_after_update",
    }
)
"""Methods of SGLang's two weight updaters that change no weights, in all tested versions."""


def no_seed_reason(compatibility: Compatibility) -> str | None:
    """Return why this SGLang may change weights unnoticed, or None if all changes are noticed. Imports its modules."""
    reasons = [format_incompatibility(compatibility.lifecycle)] if compatibility.lifecycle else []
    known = known_methods()
    for owner in (WEIGHTS, MANAGER):
        try:
            found = unlisted_methods(pkgutil.resolve_name(owner), CHANGES_WEIGHTS, known)
        except (ImportError, AttributeError):
            continue  # the lifecycle targets report it
        if found:
            reasons.append(f"{owner.rpartition('.')[2]} of this SGLang may change weights in {', '.join(found)}")
    return "; ".join(reasons) or None


def known_methods() -> frozenset[str]:
    """Return the methods of both weight updaters that are hooked, call hooked ones, or are harmless."""
    return HARMLESS | {hook_target.path.rpartition(".")[2] for hook_target in scheduling()}


def find_compatibility() -> Compatibility:
    """Check the targets of schedulers in the installed SGLang. Imports their modules."""
    return Compatibility.of(scheduling())


def hook(method: str, wrapper: Method, on_failure: Callable[[], None] | None = None) -> None:
    """Wrap the method with this dotted path, if it exists; see `rfork.engines.hook_targets.patch_method`.

    SGLang's `HookRegistry` is not used for hooks that it has not applied yet: it searches every module of the
    process for each function, which takes a third of a second for a dozen, and skips functions that another
    plug-in has hooked.
    """
    owner, _, name = method.rpartition(".")
    try:
        found = pkgutil.resolve_name(owner)
    except (ImportError, AttributeError):
        return
    if hasattr(found, name):
        patch_method(found, name, wrapper, on_failure=on_failure)


def format_incompatibility(incompatible: Incompatible, tested: Sequence[str] = TESTED) -> str:
    """Return a one-line message for users with the installed version of SGLang."""
    from importlib.metadata import version

    return common.format_incompatibility("SGLang", version("sglang"), incompatible, tested)


ABSENT: Final = object()


def option(name: str, default: object = ABSENT) -> Any:
    """Return a resolved server argument in a scheduler; `default` if this SGLang has none of that name."""
    from sglang.srt.runtime_context import get_context

    context = get_context()
    config_leaf: Callable[[str], Any] | None = getattr(context, "config_leaf", None)  # since 0.5.18
    if config_leaf is not None:
        try:
            return config_leaf(name)
        except ValueError:  # not a part of the published configuration
            pass
    found = getattr(context.server_args, name, default)
    if found is ABSENT:
        raise AttributeError(f"SGLang has no server argument {name}")
    return found


def is_mistral_format() -> bool:
    """Return True if SGLang reads the server's model in Mistral's own format."""
    found = pkgutil.resolve_name(first_of(*MISTRAL_FORMAT))
    from sglang.srt.runtime_context import get_context

    return bool(found(get_context().server_args))


def rotary_tables() -> dict[Any, Any]:
    """Return the rotary tables that all models of a process share."""
    tables: dict[Any, Any] = pkgutil.resolve_name(ROTARY_TABLES)
    return tables


def reserve_rotary_tables(model: nn.Module, model_config: ModelConfig) -> None:
    """Extend the rotary tables to the length that SGLang needs, which it does itself after loading."""
    try:
        reserve = pkgutil.resolve_name(RESERVE_ROTARY_TABLES)
    except (ImportError, AttributeError):
        return
    named: dict[str, Any] = {}
    if "server_args" in inspect.signature(reserve).parameters:  # before 0.5.19
        from sglang.srt.runtime_context import get_context

        named["server_args"] = get_context().server_args
    reserve(model=model, model_config=model_config, **named)


def load_timeout_s() -> float | None:
    """Return how long the server's ranks wait for one that is loading, if known."""
    try:
        return float(pkgutil.resolve_name(LOAD_TIMEOUT))
    except (ImportError, AttributeError):
        return None


TARGET = "target"
"""SGLang's name for the role of the main model's runner, as opposed to its drafts."""


def runners(tp_worker: Any, draft_worker: Any | None) -> Iterator[tuple[str, Any]]:
    """Yield the role and the model runner of each model of a scheduler: the main one and its drafts."""
    for worker in (tp_worker, draft_worker):
        if worker is None:
            continue
        if (found := getattr(worker, "weight_update_runners", None)) is not None:  # since 0.5.21
            yield from found()
        elif worker is tp_worker:
            yield TARGET, worker.model_runner
        else:
            drafts = getattr(worker, "draft_worker", None)
            yield from (("draft", runner) for runner in getattr(drafts, "draft_runners", ()))


CPU_QUANTIZATION: Final = ("SGLANG_CPU_QUANTIZATION", "SGL_CPU_QUANTIZATION")
"""Variables with which SGLang's loader without weights takes other steps than its loader with weights."""


def is_quantized_on_cpu() -> bool:
    """Return True if one of these variables is set."""
    return any(os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "y") for name in CPU_QUANTIZATION)


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


def unsupported_option(ignored: Container[str] = ()) -> str | None:
    """Return why a model cannot be forked with the resolved server arguments, or None if it can. In a scheduler."""
    return unsupported_reason({name: option(name, off) for name, off in UNSUPPORTED.items() if name not in ignored})


def facts(model_config: ModelConfig) -> Iterator[str]:
    """Return the facts of the effective configuration, including the user's overrides."""
    path = str(model_config.model_path)
    yield f"config {digest(model_config.hf_config, path)}"
    own = getattr(model_config.hf_config, "quantization_config", None)
    yield f"quantization_config {digest(own, path) if own else 'none'}"
    for name in RESOLVED:
        if (value := option(name, None)) is not None:
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
