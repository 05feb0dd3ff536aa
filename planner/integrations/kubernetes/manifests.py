"""Schema of the parts of a Pod's document that `pod_request` reads and `inject` changes.

A webhook gets documents before the API server has validated them, and changes only those that match this
schema.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Document = dict[str, Any]
"""A JSON object of the Kubernetes API."""


class ManifestPart(BaseModel):
    """Part of a document. Other fields are not validated."""

    # Strict: no conversions, because a document that the API server would reject must not be repaired here.
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
