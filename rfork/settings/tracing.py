"""Settings of tracing."""

from __future__ import annotations

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from rfork.settings.env import ADVANCED, Settings


class TracingSettings(Settings):
    """Settings of the export of spans (OpenTelemetry, OTLP over HTTP), for every process of rfork.

    OpenTelemetry's own variables (``OTEL_*``) configure the engine, so rfork does not read them.
    """

    model_config = SettingsConfigDict(env_prefix="RFORK_TRACING_", env_ignore_empty=True, extra="forbid", frozen=True)

    endpoint: str | None = Field(None, description="URL of an OTLP collector, http://HOST:4318; unset: no tracing")
    sample_ratio: float = Field(1.0, ge=0, le=1, json_schema_extra=ADVANCED, description="ratio of the traces started here that are exported; a trace started by a caller is exported if the caller exports it")
    headers: SecretStr | None = Field(None, json_schema_extra=ADVANCED, description="headers sent to the collector, NAME=VALUE, comma separated")
