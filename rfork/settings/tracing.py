"""Where spans go."""

from __future__ import annotations

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class TracingSettings(BaseSettings):
    """Where spans go (OpenTelemetry, OTLP over HTTP); the same for instances and the planner."""

    model_config = SettingsConfigDict(
        env_prefix="RFORK_TRACING_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    endpoint: str | None = Field(None, description="URL of an OTLP collector, http://HOST:4318; none: nothing is traced")
    share: float = Field(1.0, ge=0, le=1, description="part of the traces that begin here which is sent; one that came with a call is sent if its caller sends it")
    headers: SecretStr | None = Field(None, description="NAME=VALUE, comma separated: headers shown to the collector")
