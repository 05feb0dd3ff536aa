"""What a model is told beside its weights, as facts of its image: equal on both sides of a fork."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

PATH_FIELDS: Final = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"})
"""Keys that tell where a configuration comes from, not what it is."""
RESOLVED: Final = (
    "kv_cache_dtype",
    "speculative_draft_kv_cache_dtype",
    "fp8_gemm_runner_backend",
    "fp4_gemm_runner_backend",
)
"""Options that decide on the meaning of bytes: scales, and layouts that a kernel wants."""


def facts(model_config: ModelConfig) -> Iterator[str]:
    """Of the effective configuration, with the user's overrides in it."""
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
    """12 hexadecimal digits of a configuration: of its values, where they lie at `path` left aside."""
    config_json = json.dumps(_normalise(config, path), sort_keys=True, default=lambda value: type(value).__name__)
    return sha256(config_json.encode()).hexdigest()[:12]


def _normalise(value: object, path: str) -> object:
    """With nothing in it that differs between two processes: addresses, and paths of folders."""
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
