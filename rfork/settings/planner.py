"""What the planner is told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from rfork.settings.env import load
from rfork.settings.tls import TlsSettings

IntegrationName = Literal["webhook", "controller", "scaler"]


class PlannerSettings(BaseSettings):
    """What the planner is told."""

    model_config = SettingsConfigDict(
        env_prefix="RFORK_PLANNER_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    bind: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8700, ge=0, le=65535, description="port to listen on; 0 picks one")
    token: SecretStr | None = Field(
        None, description="bearer token that may do everything; none, and no `tokens`: open to all"
    )
    tokens_file: Path | None = Field(
        None,
        description="file of further tokens, one `ROLE TOKEN` a line (roles: instance, operator, reader); read again when it changes",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="host names, beside its own and IP addresses, that callers may use while no token is set, comma separated; `*`: any",
    )
    lease_keys: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (),
        description="keys that lease tokens are derived from, comma separated: the first signs, the others still open; none: a new one at each start",
    )
    store: str = Field("memory", description="`memory`, or redis://HOST:PORT/DB for several replicas")
    store_timeout_s: float = Field(2.0, gt=0, description="most seconds one call to the store may take")
    batch_window_s: float = Field(
        0.01,
        ge=0,
        description="seconds that the first of several arrivals waits, so that they share one plan",
    )
    scaleup_wait_s: float = Field(
        2.0,
        ge=0,
        le=8,  # a fork whose first call is not answered in time (`InstanceSettings.planner_timeout_s`, 5) asks once more
        description="most seconds that the first fork of an announced scale-up waits for the others, to share one plan; less than twice RFORK_PLANNER_TIMEOUT_S of instances",
    )
    integrations: Annotated[tuple[IntegrationName, ...], NoDecode] = Field(
        (), description="hooks that run in the planner's process, comma separated (`rfork hook` runs them in one of their own); none: no hook"
    )
    max_requests_per_s: float = Field(
        0.0, ge=0, description="requests a second that one caller (token and address) may send; 0: no limit"
    )
    max_body_bytes: int = Field(4 << 20, gt=0, description="largest request body, in bytes")
    lease_ttl_s: float = Field(30.0, gt=0, le=3600, description="seconds a lease lives unless renewed")
    heartbeat_interval_s: float = Field(5.0, gt=0, description="seconds between an instance's heartbeats")
    instance_ttl_s: float = Field(20.0, gt=0, description="seconds of silence after which an instance is forgotten")
    quarantine_s: float = Field(
        60.0, ge=0, description="seconds a source that lied or stalled gets no reader"
    )
    max_finished_forks: int = Field(1000, ge=1, description="finished forks kept for the lists")
    log_json: bool = Field(False, description="log as JSON lines instead of text")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged"
    )

    @field_validator("secret", mode="before")
    @classmethod
    def _keys(cls, value: object) -> object:
        return tuple(key.strip() for key in value.split(",")) if isinstance(value, str) else value

    @field_validator("hooks", "allowed_hosts", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _shared(self) -> Self:
        if self.store != "memory" and not self.store.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("store is `memory` or a redis:// URL")
        if self.store != "memory" and not self.lease_keys:
            raise ValueError("replicas that share a store must share the lease key: set RFORK_PLANNER_LEASE_KEYS")
        return self

    @property
    def tls(self) -> TlsSettings:
        """The TLS files (``RFORK_TLS_*``)."""
        return load(TlsSettings)
