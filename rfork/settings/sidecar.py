"""What `rfork sidecar` is told."""

from __future__ import annotations

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class SidecarSettings(BaseSettings):
    """What `rfork sidecar` is told beside `InstanceSettings`."""

    model_config = SettingsConfigDict(
        env_prefix="RFORK_SIDECAR_", env_ignore_empty=True, extra="ignore", frozen=True, populate_by_name=True
    )

    engine_url: str | None = Field(None, description="URL of the SGLang server beside it")
    engine_api_key: SecretStr | None = Field(None, description="the server's --api-key, if it has one")
    model: str | None = Field(None, description="name that its weights are given under; none: the name it serves")
    source_model: str | None = Field(None, description="name of the model whose seeds it gives to clients; none: it answers no clients")
    bind: str = Field("127.0.0.1", description="address that clients ask at; they show no token")
    port: int = Field(8710, ge=0, le=65535, description="port that clients ask at; 0 picks one")
    seed_port: int = Field(0, ge=0, le=65535, description="port, at `RFORK_BIND`, that other sidecars ask at, who show a lease; 0 picks one")
    poll_interval_s: float = Field(5.0, gt=0, description="seconds between two looks at the server's health")
    seed_wait_timeout_s: float = Field(60.0, ge=0, description="most seconds that a client waits for a seed with a free slot")
    lease_hold_s: float = Field(600.0, gt=0, description="most seconds that a client's lease is held for while its server is not yet healthy")
    mooncake_protocol: str = Field("rdma", validation_alias="MOONCAKE_PROTOCOL", description="what the server's TransferEngine runs over")
