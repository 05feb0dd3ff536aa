"""Locations of the JIT caches of engines and libraries, from their own variables."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from rfork.settings.env import Settings


def _home() -> Path:
    """Return the user's home, or ``~`` without one: an error only for a cache below it."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("~")


def _inductor_dir() -> Path:
    """Return torch.compile's default: a directory with the user's name below the temporary one."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


class CacheDirs(Settings):
    """Directories of JIT caches, as the variables of engines and libraries set them."""

    model_config = SettingsConfigDict(env_ignore_empty=True, extra="forbid", frozen=True)

    home: Path = Field(default_factory=_home, validation_alias="HOME", description="parent of the caches that no other variable moves")
    xdg_cache_home: Path | None = Field(None, validation_alias="XDG_CACHE_HOME", description="parent of vLLM's cache, without VLLM_CACHE_ROOT")
    triton_cache_dir: Path | None = Field(None, validation_alias="TRITON_CACHE_DIR", description="cache of Triton")
    triton_home: Path | None = Field(None, validation_alias="TRITON_HOME", description="parent of Triton's cache, without TRITON_CACHE_DIR")
    torchinductor_cache_dir: Path = Field(default_factory=_inductor_dir, validation_alias="TORCHINDUCTOR_CACHE_DIR", description="cache of torch.compile")
    flashinfer_workspace_base: Path | None = Field(None, validation_alias="FLASHINFER_WORKSPACE_BASE", description="parent of FlashInfer's cache")
    dg_jit_cache_dir: Path | None = Field(None, validation_alias="DG_JIT_CACHE_DIR", description="cache of DeepGEMM")
    sglang_dg_cache_dir: Path | None = Field(None, validation_alias="SGLANG_DG_CACHE_DIR", description="cache of DeepGEMM under SGLang")
    sglang_cache_dir: Path | None = Field(None, validation_alias="SGLANG_CACHE_DIR", description="cache of SGLang, with that of torch.compile")
    vllm_cache_root: Path | None = Field(None, validation_alias="VLLM_CACHE_ROOT", description="cache of vLLM")
    tvm_ffi_cache_dir: Path | None = Field(None, validation_alias="TVM_FFI_CACHE_DIR", description="cache of tvm-ffi (SGLang's kernels)")
