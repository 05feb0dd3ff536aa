"""Facts about a model's configuration that must be equal on both sides of a fork."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

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
