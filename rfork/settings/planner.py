"""Settings of the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from rfork.settings.env import ADVANCED, Settings, load
from rfork.settings.tls import TlsSettings

IntegrationName = Literal["webhook", "controller", "scaler"]


class PlannerSettings(Settings):
    """Settings of the planner. Its logs are configured by ``RFORK_LOG_JSON`` and ``RFORK_LOG_LEVEL``."""

    model_config = SettingsConfigDict(env_prefix="RFORK_PLANNER_", env_ignore_empty=True, extra="forbid", frozen=True)

    bind: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8700, ge=0, le=65535, description="port to listen on; 0: any free port")
    token: SecretStr | None = Field(None, description="bearer token with full access; without this and `tokens_file`, the planner is open to everyone")
    tokens_file: Path | None = Field(None, description="file with one `ROLE TOKEN` per line (roles: instance, operator, reader); read again when it changes")
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field((), description="host names, besides its own and IP addresses, that are accepted while no token is set, comma separated; `*`: any")
    lease_keys: Annotated[tuple[SecretStr, ...], NoDecode] = Field((), description="keys for signing leases, comma separated: the first signs, all verify; unset: a new key at each start. Required with a shared store")
    store: str = Field("memory", description="`memory`, or the URL of a Redis (redis://HOST:PORT/DB) shared by several planner replicas")
    store_timeout_s: float = Field(2.0, gt=0, json_schema_extra=ADVANCED, description="timeout of one store operation")
    batch_window_s: float = Field(0.01, ge=0, json_schema_extra=ADVANCED, description="time that the first of several simultaneous arrivals waits, so that they share one plan")
    # At most 8: a fork retries its first request once after `InstanceSettings.planner_timeout_s` (5).
    scaleup_wait_s: float = Field(2.0, ge=0, le=8, description="time that the first fork of an announced scale-up waits for the others, so that they share one plan; must be less than twice RFORK_PLANNER_TIMEOUT_S of the instances")
    integrations: Annotated[tuple[IntegrationName, ...], NoDecode] = Field((), description="integrations that run inside the planner process, comma separated; `rfork k8s` runs them in their own")
    max_requests_per_s: float = Field(0.0, ge=0, description="maximum requests per second of one caller (token and address); 0: unlimited")
    lease_ttl_s: float = Field(30.0, gt=0, le=3600, description="lifetime of a lease unless renewed")
    heartbeat_interval_s: float = Field(5.0, gt=0, description="interval of the instances' heartbeats")
    instance_ttl_s: float = Field(20.0, gt=0, description="time without a heartbeat after which an instance is removed")

    @field_validator("lease_keys", mode="before")
    @classmethod
    def _keys(cls, value: object) -> object:
        return tuple(key.strip() for key in value.split(",")) if isinstance(value, str) else value

    @field_validator("integrations", "allowed_hosts", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _require_shared_keys(self) -> Self:
        if self.store != "memory" and not self.store.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("RFORK_PLANNER_STORE must be `memory` or a redis:// URL")
        if self.store != "memory" and not self.lease_keys:
            raise ValueError(
                "RFORK_PLANNER_LEASE_KEYS is not set, but planner replicas that share a store (RFORK_PLANNER_STORE) "
                "need the same keys"
            )
        return self

    @property
    def tls(self) -> TlsSettings:
        """TLS settings (``RFORK_TLS_*``)."""
        return load(TlsSettings)
