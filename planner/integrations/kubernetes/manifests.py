"""What of a Pod's document has to be well-formed: all that `pods` reads, and all that `mutate` changes.

A webhook sees documents before the API server has checked them, and it changes only those that fit in here.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Document = dict[str, Any]
"""A JSON object as the API server sends it, or is to get it."""


class ManifestPart(BaseModel):
    """Part of a document; what it says beside these fields may be anything."""

    # Strict: a number is no text, and what the API server would refuse is not to be mended here.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class _Named(ManifestPart):
    name: str


class _Gate(ManifestPart):
    conditionType: str


class _Mount(_Named):
    mountPath: str


class _Variable(_Named):
    value: str | None = None
    valueFrom: dict[str, Any] | None = None


class _Lifecycle(ManifestPart):
    preStop: dict[str, Any] | None = None


class ContainerManifest(_Named):
    """A container."""

    image: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[_Variable] | None = None
    volumeMounts: list[_Mount] | None = None
    lifecycle: _Lifecycle | None = None


class _System(ManifestPart):
    name: str | None = None


class _Security(ManifestPart):
    runAsUser: int | None = None


class _Spec(ManifestPart):
    containers: list[ContainerManifest] = Field(min_length=1)
    initContainers: list[_Named] | None = None
    volumes: list[_Named] | None = None
    readinessGates: list[_Gate] | None = None
    terminationGracePeriodSeconds: int | None = Field(None, ge=0, le=1 << 31)
    securityContext: _Security | None = None
    hostIPC: bool | None = None
    hostPID: bool | None = None
    hostUsers: bool | None = None
    shareProcessNamespace: bool | None = None
    os: _System | None = None


class _Metadata(ManifestPart):
    labels: dict[str, str]
    annotations: dict[str, str] | None = None


class PodManifest(ManifestPart):
    """A Pod."""

    metadata: _Metadata
    spec: _Spec
