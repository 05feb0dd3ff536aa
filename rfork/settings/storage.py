"""Settings of storage reads and writes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field, SecretStr
from pydantic_settings import SettingsConfigDict

from rfork.settings.env import ADVANCED, ExternalSettings


class StorageSettings(ExternalSettings):
    """Settings of reads and writes of tensor files, on disk, in object stores and over HTTP.

    Credentials come from the standard configuration of each object store; for S3: AWS's environment variables,
    profiles, web identity (IRSA) and instance metadata.
    """

    model_config = SettingsConfigDict(env_prefix="RFORK_STORAGE_", env_ignore_empty=True, extra="forbid", frozen=True, populate_by_name=True)

    concurrency: int = Field(8, ge=1, le=256, description="maximum number of concurrent reads, or parts of an upload")
    staging_bytes: int = Field(128 << 20, ge=16 << 20, description="maximum staging memory, in addition to the tensors; concurrency is reduced if it is too small")
    direct_io: Literal["auto", "always", "never"] = Field("auto", json_schema_extra=ADVANCED, description="read local files without the page cache; `auto`: if they are not in it and that is faster")
    timeout_s: float = Field(10.0, gt=0, description="time to wait for a response head, or for 16 KiB of its body, before a request is retried")
    max_attempts: int = Field(5, ge=1, le=100, json_schema_extra=ADVANCED, description="attempts per range before a read fails")
    hedge_ratio: float = Field(4.0, ge=0, json_schema_extra=ADVANCED, description="send a request a second time when it takes this multiple of the median; 0: never")
    http_token: SecretStr | None = Field(None, description="bearer token for http(s):// storage; not sent to hosts that it redirects to")
    s3_addressing: Literal["auto", "path", "virtual"] = Field("auto", json_schema_extra=ADVANCED, description="S3 URLs name the bucket in the `path` or in the host (`virtual`); `auto`: as in AWS's configuration files, else by the endpoint")

    # Variables of AWS and OpenSSL.
    ca: Path | None = Field(None, validation_alias="SSL_CERT_FILE", description="PEM authorities that storage servers are verified with; unset: the system's. For S3, AWS_CA_BUNDLE has precedence")
    s3_endpoint: str | None = Field(None, validation_alias=AliasChoices("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), description="URL of the S3 service; unset: that of the profile, or AWS")
    s3_region: str | None = Field(None, validation_alias=AliasChoices("AWS_REGION", "AWS_DEFAULT_REGION"), description="region of S3; unset: that of the profile, or us-east-1")
    s3_anonymous: bool = Field(False, validation_alias="AWS_SKIP_SIGNATURE", description="send no credentials to S3: public buckets")
