"""Settings of shared JIT caches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from rfork.settings.env import ADVANCED, Settings


class ArtifactSettings(Settings):
    """Settings of the JIT caches that instances share. The caches contain programs, so sharing is off by default.

    Their directories are found through the environment variables of the engines and libraries that own them.
    """

    model_config = SettingsConfigDict(env_prefix="RFORK_ARTIFACTS_", env_ignore_empty=True, extra="forbid", frozen=True)

    kinds: Annotated[tuple[str, ...], NoDecode] = Field((), description="JIT caches to share, comma separated (`rfork cache ls` lists them), or `all`; unset: off. They are programs: trust the fleet")
    dirs: Annotated[tuple[tuple[str, Path], ...], NoDecode] = Field((), description="directories of caches, KIND=PATH, comma separated: overrides a detected one, or adds a cache that rfork does not know")
    max_bytes: int = Field(4 << 30, gt=0, json_schema_extra=ADVANCED, description="maximum size of the shared caches; they are kept in memory")
    quiet_period_s: float = Field(5.0, ge=0, json_schema_extra=ADVANCED, description="time since its last change after which a file is considered complete; newer ones are not shared")

    @field_validator("kinds", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    @field_validator("dirs", mode="before")
    @classmethod
    def _parse_dirs(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [item.strip().partition("=") for item in value.split(",") if item.strip()]
        if any(not name or not path for name, _, path in pairs):
            raise ValueError("each entry must be KIND=PATH")
        return tuple((name.strip(), Path(path.strip())) for name, _, path in pairs)
