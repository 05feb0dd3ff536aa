"""Settings of TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from rfork.settings.env import Settings


class TlsSettings(Settings):
    """Certificate files of this process. With `ca`, a server requires client certificates (mTLS)."""

    model_config = SettingsConfigDict(env_prefix="RFORK_TLS_", env_ignore_empty=True, extra="forbid", frozen=True)

    certificate: Path | None = Field(None, description="PEM certificate chain that this process presents")
    key: Path | None = Field(None, description="PEM private key of `certificate`")
    ca: Path | None = Field(None, description="PEM certificate authorities that this process trusts; on a server: clients must present a certificate (mTLS)")

    @model_validator(mode="after")
    def _require_pair(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("RFORK_TLS_CERTIFICATE and RFORK_TLS_KEY go together: set both or neither")
        return self

    @property
    def serves(self) -> bool:
        """True if the servers of this process use TLS."""
        return self.certificate is not None

    @property
    def enabled(self) -> bool:
        """True if servers or clients of this process use TLS."""
        return self.serves or self.ca is not None
