"""Which JIT caches travel, and where engines and libraries keep them."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


def _home() -> Path:
    """The user's home; ``~`` where there is none, which is an error only for who needs it."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("~")


def _inductor_folder() -> Path:
    """Where torch.compile keeps its cache when it is told nothing: by the user's name, in the temporary folder."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


class ArtifactSettings(BaseSettings):
    """Which JIT caches travel between instances, where they lie, and how much of them is taken.

    They are programs: off unless `kinds` names some. Where an engine or library was told to keep its cache by a
    variable of its own, that one holds here too.
    """

    model_config = SettingsConfigDict(
        env_prefix="RFORK_ARTIFACTS_", env_ignore_empty=True, extra="ignore", frozen=True, populate_by_name=True
    )

    kinds: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="caches to give and take, comma separated (`rfork artifacts ls` names them), or `all`; none: off"
    )
    dirs: Annotated[tuple[tuple[str, Path], ...], NoDecode] = Field(
        (), description="KIND=PATH, comma separated: where a cache lies instead; also of kinds that rfork does not know"
    )
    max_bytes: int = Field(4 << 30, gt=0, description="most bytes that are given or taken; they are held in memory")
    max_files: int = Field(200_000, ge=1, le=1_000_000, description="most files that are given or taken")
    quiet_period_s: float = Field(
        5.0, ge=0, description="seconds since its last change after which a file counts as whole; younger ones are left out"
    )
    deadline_s: float = Field(120.0, gt=0, description="most seconds that taking them may hold up a start")
    interval_s: float = Field(30.0, gt=0, description="seconds after which `rfork artifacts seed` looks for new files")
    peer_port: int = Field(0, ge=0, le=65535, description="port of the gRPC peer service that gives them; 0 picks one")
    http_port: int = Field(0, ge=0, le=65535, description="port of the http transport that gives them; 0 picks one")

    # What others call their folders.
    home: Path = Field(default_factory=_home, description="where caches lie that nothing moves")
    xdg_cache_home: Path | None = Field(None, validation_alias="XDG_CACHE_HOME", description="vLLM's, without `VLLM_CACHE_ROOT`")
    triton_cache_dir: Path | None = Field(None, validation_alias="TRITON_CACHE_DIR", description="Triton's")
    triton_home: Path | None = Field(None, validation_alias="TRITON_HOME", description="Triton's, without `TRITON_CACHE_DIR`")
    torchinductor_cache_dir: Path = Field(
        default_factory=_inductor_folder, validation_alias="TORCHINDUCTOR_CACHE_DIR", description="torch.compile's"
    )
    flashinfer_workspace_base: Path | None = Field(None, validation_alias="FLASHINFER_WORKSPACE_BASE", description="FlashInfer's")
    dg_jit_cache_dir: Path | None = Field(None, validation_alias="DG_JIT_CACHE_DIR", description="DeepGEMM's")
    sglang_dg_cache_dir: Path | None = Field(None, validation_alias="SGLANG_DG_CACHE_DIR", description="DeepGEMM's, under SGLang")
    sglang_cache_dir: Path | None = Field(None, validation_alias="SGLANG_CACHE_DIR", description="SGLang's torch.compile")
    vllm_cache_root: Path | None = Field(None, validation_alias="VLLM_CACHE_ROOT", description="vLLM's")
    tvm_ffi_cache_dir: Path | None = Field(None, validation_alias="TVM_FFI_CACHE_DIR", description="tvm-ffi's (SGLang's kernels)")

    @field_validator("kinds", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    @field_validator("folders", mode="before")
    @classmethod
    def _parse_folders(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [item.strip().partition("=") for item in value.split(",") if item.strip()]
        if any(not name or not path for name, _, path in pairs):
            raise ValueError("each is KIND=PATH")
        return tuple((name.strip(), Path(path.strip())) for name, _, path in pairs)
