"""Settings of `rfork sidecar`."""

from __future__ import annotations

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from rfork.settings.env import ExternalSettings


class SidecarSettings(ExternalSettings):
    """Settings of `rfork sidecar`, in addition to `InstanceSettings`."""

    model_config = SettingsConfigDict(env_prefix="RFORK_SIDECAR_", env_ignore_empty=True, extra="forbid", frozen=True, populate_by_name=True)

    engine_url: str | None = Field(None, description="URL of the SGLang server that this sidecar publishes")
    engine_api_key: SecretStr | None = Field(None, description="the server's `--api-key`, if it has one")
    source_model: str | None = Field(None, description="model whose seeds this sidecar offers to SGLang clients; unset: it serves no clients")
    bind: str = Field("127.0.0.1", description="address on which it serves SGLang clients; they present no token")
    port: int = Field(8710, ge=0, le=65535, description="port on which it serves SGLang clients; 0: any free port")
    mooncake_protocol: str = Field("rdma", validation_alias="MOONCAKE_PROTOCOL", description="protocol of the SGLang server's TransferEngine: rdma or tcp")
