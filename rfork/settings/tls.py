"""Files for TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class TlsSettings(BaseSettings):
    """Files for TLS; with `ca` on a server, clients must show a certificate (mTLS)."""

    model_config = SettingsConfigDict(
        env_prefix="RFORK_TLS_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    certificate: Path | None = Field(None, description="PEM certificate chain this process shows")
    key: Path | None = Field(None, description="PEM private key of `certificate`")
    ca: Path | None = Field(None, description="PEM authorities this process trusts")

    @model_validator(mode="after")
    def _require_pair(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together: set both or neither")
        return self

    @property
    def serves(self) -> bool:
        """Whether servers of this process speak TLS."""
        return self.certificate is not None

    @property
    def enabled(self) -> bool:
        """Whether any side of this process speaks TLS."""
        return self.serves or self.ca is not None
