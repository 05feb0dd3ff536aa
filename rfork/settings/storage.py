"""How tensor files are read and written."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class StorageSettings(BaseSettings):
    """How tensor files are read and written, on disk, in S3 and its like, or behind HTTP.

    Credentials of object stores are found where their own tools look for them: AWS's environment variables,
    profiles, web identity (IRSA) and instance metadata.
    """

    model_config = SettingsConfigDict(
        env_prefix="RFORK_STORAGE_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    concurrency: int = Field(8, ge=1, le=256, description="reads, or parts of a write, in flight at once")
    staging_bytes: int = Field(
        128 << 20,
        ge=16 << 20,
        description="most bytes of staging memory, beside the tensors themselves; fewer streams are used where it is short",
    )
    direct_io: Literal["auto", "always", "never"] = Field(
        "auto", description="read local files past the page cache: `auto` where they are not in it and it is faster"
    )
    timeout_s: float = Field(10.0, gt=0, description="seconds for an answer's head, and for each 16 KiB of its body, after which a request is sent again; a read fails no sooner than that")
    max_attempts: int = Field(5, ge=1, le=100, description="least times that one range is asked for before the read fails")
    hedge_ratio: float = Field(
        4.0,
        ge=0,
        description="a request that takes so many times as long as most do is sent a second time, and whichever answers first counts; 0: never",
    )
    http_token: SecretStr | None = Field(None, description="bearer token shown to http(s):// storage, not to hosts it redirects to")
    ca: Path | None = Field(None, description="PEM authorities that storage servers are checked by; none: the system's")

    s3_endpoint: str | None = Field(None, description="URL of the S3 service; none: AWS, or what the profile says")
    s3_region: str | None = Field(None, description="region; none: what the profile says, or us-east-1")
    s3_profile: str | None = Field(None, description="profile of AWS's configuration files")
    s3_addressing: Literal["auto", "path", "virtual"] = Field(
        "auto", description="where the bucket is named: in the `path` or in the host (`virtual`); `auto`: path with an endpoint that is not AWS's"
    )
    s3_anonymous: bool = Field(False, description="send no credentials: public buckets")
