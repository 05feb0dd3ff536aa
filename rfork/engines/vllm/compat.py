"""vLLM's private names, and what rfork reads from vLLM's configuration.

The names are the functions that are hooked or called, tensors that are no weights, and options that select
kernels. Importing this module imports no part of vLLM.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import pkgutil
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from rfork import settings as options
from rfork.engines.arguments import canonical_model_name
from rfork.engines.hook_targets import (
    Compatibility,
    HookTarget,
    find_incompatible,
    format_incompatibility,
    unlisted_methods,
)
from rfork.errors import EngineMismatch, SettingsError
from rfork.logs import logger
from rfork.settings import InstanceSettings

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig


TESTED: Final = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
"""Versions of vLLM whose servers have forked, as in docs/engine-matrix.json."""

WORKER: Final = "vllm.v1.worker.gpu_worker.Worker"
LOADERS: Final = "vllm.model_executor.model_loader"
GROUPS: Final = "vllm.distributed.parallel_state"
MANAGER: Final = "vllm.v1.engine.utils.CoreEngineProcManager"
CONFIG: Final = "vllm.config"

ROTARY_TABLES: Final = "vllm.model_executor.layers.rotary_embedding._ROPE_DICT"

DUMMY_LAYER_TARGETS: Final = (
    HookTarget(f"{LOADERS}.dummy_loader.DummyModelLoader._process_online_quant_layer", ("layer", "info"), "comfort"),
    HookTarget(f"{LOADERS}.reload.layerwise.get_layerwise_info", ("layer",), "comfort"),
    HookTarget(f"{LOADERS}.reload.utils.get_layer_tensors", ("layer",), "comfort"),
    HookTarget(f"{LOADERS}.weight_utils.initialize_single_dummy_weight", ("param",), "comfort"),
)
"""Private functions that let rfork skip initialising weights that a fork overwrites."""

WEIGHT_CACHE_DAEMON: Final = f"{LOADERS}.weight_cache.daemon.WeightCacheDaemon"
DAEMON_TARGETS: Final = (HookTarget(f"{WEIGHT_CACHE_DAEMON}._handle_release", ("conn",), "lifecycle"),)
"""Methods of the weight cache daemon, checked in its process only."""
DAEMON_COMMANDS: Final = frozenset({"_handle_connection", "_handle_get_state", "_handle_release"})
"""The daemon's methods that handle requests in vLLM 0.32."""

HOOK_TARGETS: Final = (
    HookTarget(f"{LOADERS}.register_model_loader", ("load_format",)),
    HookTarget(f"{LOADERS}.get_model_loader", ("load_config",)),
    HookTarget(f"{LOADERS}.base_loader.BaseModelLoader.__init__", ("load_config",)),
    HookTarget(f"{LOADERS}.base_loader.BaseModelLoader.load_model", ("vllm_config", "model_config", "prefix")),
    HookTarget(f"{LOADERS}.base_loader.BaseModelLoader.load_weights", ("model", "model_config")),
    HookTarget(f"{LOADERS}.default_loader.DefaultModelLoader.get_all_weights", ("model_config", "model")),
    HookTarget(f"{LOADERS}.default_loader.DefaultModelLoader.download_model", ("model_config",)),
    HookTarget(f"{LOADERS}.dummy_loader.DummyModelLoader.load_weights", ("model", "model_config")),
    HookTarget("vllm.model_executor.layers.quantization.base_config.QuantizeMethodBase"),
    HookTarget(f"{CONFIG}.replace", ("dataclass_instance",)),
    HookTarget(f"{CONFIG}.CompilationConfig.static_forward_context"),
    HookTarget(f"{CONFIG}.CompilationConfig.static_all_moe_layers"),
    HookTarget(f"{GROUPS}.get_tp_group"),
    HookTarget(f"{GROUPS}.get_pp_group"),
    HookTarget(f"{GROUPS}.get_ep_group"),
    *(
        HookTarget(f"{WORKER}.{method}", parameters, "lifecycle")
        for method, parameters in (
            ("get_model", ()),
            ("get_draft_model", ()),
            ("initialize_from_config", ()),
            ("sleep", ("level",)),
            ("wake_up", ("tags",)),
            ("reload_weights", ()),
            ("start_weight_update", ()),
            ("start_draft_weight_update", ()),
            ("update_weights", ()),
            ("finish_weight_update", ()),
        )
    ),
    # The first since vLLM 0.31, the second since 0.32.
    HookTarget(f"{WORKER}.discard", ("tags",), "lifecycle", optional=True),
    HookTarget(f"{WORKER}.reset_weights", (), "lifecycle", optional=True),
    HookTarget(f"{WORKER}.execute_model", (), "comfort"),
    HookTarget(f"{WORKER}.sample_tokens", (), "comfort"),
    HookTarget(f"{WORKER}.shutdown", (), "comfort"),
    HookTarget("vllm.v1.outputs.AsyncModelRunnerOutput.get_output", (), "comfort"),
    HookTarget(f"{MANAGER}.__init__", ("vllm_config",), "comfort"),
    HookTarget(f"{MANAGER}.shutdown", (), "comfort"),
    HookTarget(f"{MANAGER}.finished_procs", (), "comfort"),
    HookTarget("vllm._custom_ops._supports_onednn", (), "comfort"),
    HookTarget("vllm.model_executor.layers.utils.check_cpu_sgl_kernel", ("n", "k", "dtype"), "comfort"),
    # Since vLLM 0.30. Without it, models whose kernels must be rebuilt are not forked.
    HookTarget("vllm.model_executor.utils.weights_already_processed", (), "comfort", optional=True),
    # Without them, no fork across layouts.
    HookTarget(f"{LOADERS}.utils.initialize_model", ("vllm_config", "prefix", "model_config"), "comfort"),
    HookTarget(f"{LOADERS}.default_loader.DefaultModelLoader._get_weights_iterator", ("source",), "comfort"),
    HookTarget(f"{LOADERS}.default_loader.DefaultModelLoader._prepare_weights", ("fall_back_to_pt",), "comfort"),
    HookTarget(f"{LOADERS}.default_loader.DefaultModelLoader.load_weights", ("model", "model_config"), "comfort"),
    HookTarget(ROTARY_TABLES, (), "comfort"),
    *DUMMY_LAYER_TARGETS,
)

WEIGHT_METHODS: Final = re.compile(
    "weight|sleep|wake|suspend|resume|discard|reload|restore|update|load|lora|reset|swap|param"
)
"""Pattern of names of worker methods that may change or move weights."""
KNOWN_METHODS: Final = frozenset(
    {
        # Hooked.
        *("sleep", "wake_up", "discard", "reset_weights", "reload_weights"),
        *("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"),
        # They leave the weights of the model unchanged: LoRA weights are separate tensors.
        *("add_lora", "list_loras", "pin_lora", "remove_lora"),
        *("compute_weight_checksums", "supports_draft_weight_updates", "checkpoint_restore"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
        *("get_simple_cpu_offload_num_cpu_blocks", "reset_encoder_cache", "reset_mm_cache"),
        *("update_config", "update_max_model_len"),
        # Called once, before the model is served.
        "load_model",
    }
)
"""Worker methods of the tested versions that match `WEIGHT_METHODS`."""


def unknown_weight_methods(worker_class: type) -> Sequence[str]:
    """Return vLLM's own worker methods that may change weights and that this rfork does not know.

    Methods of worker extensions, which vLLM adds to the class, do not count: they change weights through the
    worker's methods or the model's `load_weights`.
    """
    return [
        name
        for name in unlisted_methods(worker_class, WEIGHT_METHODS, KNOWN_METHODS)
        if _module_of(worker_class, name).partition(".")[0] == "vllm"
    ]


def _module_of(owner: type, name: str) -> str:
    return next(base.__module__ for base in owner.__mro__ if name in vars(base))


@dataclass(frozen=True, slots=True)
class VersionDecision:
    """Decision on the installed version of vLLM."""

    no_fork_reason: str | None = None
    """Reason for using vLLM's own loader; None if the model may be forked."""
    no_seed_reason: str | None = None
    """Reason for not serving a forked model to others; None if it may be served."""
    warnings: tuple[str, ...] = ()


def decide(
    version: str,
    compatibility: Compatibility,
    unknown_methods: Sequence[str] = (),
    tested: Sequence[str] = TESTED,
) -> VersionDecision:
    """Decide whether a version may fork and seed, from its missing hook targets and unknown worker methods."""
    if compatibility.core:
        return VersionDecision(format_incompatibility("vLLM", version, compatibility.core, tested))
    warnings = []
    if version.partition("+")[0] not in tested:
        warnings.append(f"untested vLLM version {version} (tested: {', '.join(tested)})")
    if compatibility.comfort:
        details = "; ".join(f"{hook_target.path} {mismatch}" for hook_target, mismatch in compatibility.comfort)
        warnings.append(f"some features of rfork are off with vLLM {version}: {details}")
    no_seed_reason = None
    if compatibility.lifecycle:
        no_seed_reason = format_incompatibility("vLLM", version, compatibility.lifecycle, tested)
    elif unknown_methods:
        no_seed_reason = f"vLLM {version} may change weights in unknown worker methods: {', '.join(unknown_methods)}"
    return VersionDecision(no_seed_reason=no_seed_reason, warnings=tuple(warnings))


def decide_installed(version: str) -> VersionDecision:
    """Decide for the running vLLM. Imports the modules of the hook targets. `version` is its version."""
    compatibility = Compatibility.of(HOOK_TARGETS)
    if compatibility.core or compatibility.lifecycle:
        return decide(version, compatibility)
    return decide(version, compatibility, unknown_weight_methods(worker_class()))


def decide_installed_daemon(version: str) -> VersionDecision:
    """Decide for the running vLLM in a weight cache daemon, which has no worker and only ever releases its weights."""
    core = [hook_target for hook_target in HOOK_TARGETS if hook_target.tier == "core"]
    return decide(version, Compatibility.of((*core, *DAEMON_TARGETS)), unknown_daemon_commands())


def unknown_daemon_commands() -> Sequence[str]:
    """Return the daemon's handlers of commands that this rfork does not know, and that may change weights."""
    daemon_class: type = pkgutil.resolve_name(WEIGHT_CACHE_DAEMON)
    return sorted(name for name in dir(daemon_class) if name.startswith("_handle_") and name not in DAEMON_COMMANDS)


def worker_class() -> type:
    """Return the class whose methods vLLM's workers run."""
    found: type = pkgutil.resolve_name(WORKER)
    return found


def can_skip_dummy_weights() -> bool:
    """Return True if vLLM has the private functions of `DUMMY_LAYER_TARGETS`."""
    return not find_incompatible(DUMMY_LAYER_TARGETS)


def load_timeout_s(environment: object) -> float:
    """Return how long vLLM waits for an engine to load. `environment` is the module `vllm.envs`."""
    return float(getattr(environment, "VLLM_ENGINE_READY_TIMEOUT_S", math.inf))


def is_quantised_online(vllm_config: VllmConfig) -> bool:
    """Return True if vLLM quantises the weights while it loads them."""
    quant_config = vllm_config.quant_config
    if quant_config is None:
        return False
    try:
        from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    except ImportError:
        return True  # unknown
    nested = getattr(quant_config, "online_quantization_config", None)
    return isinstance(quant_config, OnlineQuantizationConfig) or isinstance(nested, OnlineQuantizationConfig)


def config_of_twin(vllm_config: VllmConfig) -> VllmConfig:
    """Return a copy of a configuration for a second model: what models change while they are built is copied too."""
    twin = copy.copy(vllm_config)
    compilation = twin.compilation_config = copy.copy(vllm_config.compilation_config)
    for name, value in vars(compilation).items():
        if isinstance(value, dict | list | set):
            setattr(compilation, name, copy.copy(value))
    compilation.static_forward_context.clear()  # no two models may use the same names of layers
    compilation.static_all_moe_layers.clear()
    compilation.mode = type(compilation.mode)(0) if compilation.mode is not None else None  # nothing is compiled
    twin.quant_config = copy.deepcopy(vllm_config.quant_config)
    return twin


def rotary_tables() -> dict[Any, Any]:
    """Return the rotary tables that all models of a process share."""
    tables: dict[Any, Any] = pkgutil.resolve_name(ROTARY_TABLES)
    return tables


def keep_weights_on_cpu() -> None:
    """Make vLLM keep the weights of linear layers as tensors in this process, instead of packing them.

    On a CPU, vLLM passes them to oneDNN and empties the parameters, so there would be nothing to serve or to
    fill. torch computes the same results from them, except for the last bits.
    """
    import vllm._custom_ops as custom_ops
    from vllm.model_executor.layers import utils as layer_utils

    if getattr(custom_ops, "_supports_onednn", False):
        log.info("vLLM's oneDNN weight packing disabled in this process")
    # Where these names do not exist, packed weights are found in the built model: it is then not forked.
    custom_ops._supports_onednn = False
    layer_utils.check_cpu_sgl_kernel = _no_packing


def unsupported_model(module: nn.Module) -> str | None:
    """Return why a built model cannot be forked: a kernel keeps its weights elsewhere.

    A layer without a weight that computes with torch is never called: MLA on a CPU empties `kv_b_proj` and computes
    with two tensors that it derived from it.
    """
    for name, submodule in module.named_modules():
        weight, kernel = getattr(submodule, "weight", None), getattr(submodule, "cpu_linear", None)
        packed = kernel is not None and kernel is not torch.nn.functional.linear
        if packed and weight is not None and not weight.numel():
            return f"the weight of {name} was packed into a kernel handle"
    return None


def _no_packing(n: int, k: int, dtype: torch.dtype) -> bool:
    return False


def weights_already_processed() -> AbstractContextManager[None]:
    """Return the context in which vLLM's kernels are rebuilt from processed weights. Raises EngineMismatch."""
    try:
        from vllm.model_executor.utils import weights_already_processed as vllm_context
    except ImportError as error:
        raise EngineMismatch(f"vLLM cannot rebuild kernels from processed weights: {error}") from None
    context: AbstractContextManager[None] = vllm_context()
    return context


def model_name(model: str, setting: str | None, draft: bool) -> str:
    """Return the configured name (`setting`), else the model's own name.

    A draft appends its own name to the configured one, because two servers may have different drafts.
    """
    name = canonical_model_name(model)
    if setting is not None:
        return f"{setting}/{name}" if draft else setting
    return name


log = logger(__name__)


def settings_of(load_config: LoadConfig) -> InstanceSettings:
    """Return the environment's settings, overridden by those of the load configuration.

    Raises SettingsError with one line.
    """
    extra = load_config.model_loader_extra_config or {}
    if not isinstance(extra, dict):
        raise SettingsError(
            "--model-loader-extra-config must be a JSON object of rfork settings",
            hint="""e.g. '{"planner": "http://planner:8700"}'""",
        )
    if unknown := sorted(extra.keys() - InstanceSettings.model_fields.keys()):
        near = get_close_matches(unknown[0], InstanceSettings.model_fields, 1)
        raise SettingsError(
            f"--model-loader-extra-config: unknown rfork setting {', '.join(map(repr, unknown))}",
            hint=f"did you mean {near[0]!r}?"
            if near
            else "the settings are the RFORK_* variables in lower case, without the prefix",
        )
    return options.load(InstanceSettings, **extra)


def attach_log_handler(level: str) -> None:
    """Send rfork's log lines to vLLM's handlers, unless rfork's logger is already configured."""
    own, vllm = logging.getLogger("rfork"), logging.getLogger("vllm")
    if not own.hasHandlers() and vllm.handlers:
        own.handlers = list(vllm.handlers)
        own.setLevel(level.upper())
        own.propagate = False


NON_WEIGHT_PATTERNS: Final = (
    # KV caches, and rotary tables, which each server computes itself and widens or casts while serving.
    *("*.kv_cache", "*.kv_cache.*", "*.cos_sin_cache", "*.cos_sin_cache_bf16"),
    # Batch-sized scratch tensors, overwritten by each forward pass.
    *("*deepstack_input_embeds.*", "*per_layer_embeddings", "*.per_layer_inputs", "*_ds_buffers.*"),
    *("*.positions", "*.hidden_states"),
    *("*topk_indices_buffer", "*candidate_block_buffer", "*mtp_hidden_buffer"),
    # Scratch of kernels, and communication buffers.
    *("*.workspace", "*workspace_buffer", "*.prepare_finalize.*", "*.dispatcher.*", "*.all2all_manager.*"),
)
"""`fnmatch` name patterns of tensors that belong to vLLM's models but are not served."""

HELPER_ATTRIBUTES: Final = (
    # Linear layers; method, kernel, implementation, experts and scales of MoE layers.
    *("fp8_linear", "fp8_kernel", "linear_kernel", "moe_kernel", "moe_quant_config"),
    *("fused_experts", "_fused_experts", "fallback_experts", "_prepared_experts", "fused_moe_impl"),
    *("_a1", "_a2", "_w1", "_w2"),
)
"""Attributes of vLLM's layers that refer to the code computing with the weights."""

PATH_FIELDS: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version", "auto_map", "_commit_hash"})
"""Configuration keys that state where a configuration came from or what wrote it."""
PATHS: Final = ("_path", "_dir", "_file")
"""Suffixes of configuration keys that contain paths."""

LAYOUT_CHOICES: Final = (
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
    "VLLM_USE_FLASHINFER_MOE_INT4",
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD",
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD",
    "VLLM_DISABLED_KERNELS",
    "VLLM_ROCM_FP8_PADDING",
    "VLLM_ROCM_MOE_PADDING",
    "VLLM_ROCM_USE_AITER",
    "VLLM_ROCM_USE_AITER_LINEAR",
    "VLLM_ROCM_USE_AITER_MOE",
)
"""Options of `vllm.envs` that select kernels, which shuffle, pad or requantise weights."""
BACKENDS: Final = ("moe_backend", "linear_backend", "linear_backend_per_quant")
"""The same in vLLM's kernel configuration."""


def loads_from(model_config: ModelConfig) -> tuple[str, str | None]:
    """Return the folder, URI or hub id that vLLM loads a model's weights from, and the hub revision.

    If vLLM has resolved the revision, this is the commit, because a branch may have moved since. For a model
    in an object store, vLLM's `model` is a local folder without weights.
    """
    if stored := getattr(model_config, "model_weights", None):
        return str(stored), None
    revision: str | None = model_config.revision
    return str(model_config.model), getattr(revision, "resolved", revision)


def configuration(model_config: ModelConfig) -> str:
    """Return a digest of the model's effective configuration, including ``--hf-overrides``."""
    return digest(_without_ignored(model_config.hf_config.to_dict()))


def kernels(vllm_config: VllmConfig, environment: object) -> str:
    """Return a digest of the options that select kernels with different weight layouts.

    `environment` is the module `vllm.envs`, or an object with its names; unknown names are skipped.
    """
    chosen = vllm_config.kernel_config
    choices = {name: getattr(environment, name, None) for name in LAYOUT_CHOICES}
    return digest({**choices, **{name: getattr(chosen, name, None) for name in BACKENDS}})


def digest(value: object) -> str:
    """Return twelve hexadecimal digits, equal in every process. Values unknown to JSON are reduced to their type."""
    written = json.dumps(value, sort_keys=True, default=_named)
    return sha256(written.encode()).hexdigest()[:12]


def _without_ignored(node: object) -> object:
    """Return the configuration without source locations, and with string keys, because JSON cannot sort mixed keys."""
    if isinstance(node, Mapping):
        return {
            str(key): _without_ignored(value)
            for key, value in node.items()
            if str(key) not in PATH_FIELDS and not str(key).endswith(PATHS)
        }
    if isinstance(node, list | tuple):
        return [_without_ignored(item) for item in node]
    return node


def _named(value: object) -> str:
    return str(value) if isinstance(value, torch.dtype) else type(value).__name__
