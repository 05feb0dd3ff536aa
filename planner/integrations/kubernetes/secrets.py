"""Store of the webhook's certificate: interface, and implementation with an API server.

It needs these permissions: create, get and update of one Secret; get and patch of one
MutatingWebhookConfiguration.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import quote

from planner.integrations.kubernetes.api_client import STRATEGIC, ApiServer, open_server
from planner.integrations.kubernetes.cluster import NotFound, ResourceConflict
from planner.integrations.kubernetes.manifests import Document
from rfork.settings import KubernetesSettings

FIELD_MANAGER: Final = {"fieldManager": "rfork-webhook"}
"""Field manager of the fields written here."""
WEBHOOK_CONFIGURATIONS_PATH: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


@dataclass(frozen=True)
class SecretData:
    """A Secret's data and version. Empty version: the Secret does not exist."""

    data: Mapping[str, bytes]
    version: str

    def __repr__(self) -> str:  # otherwise a log could contain a key
        return f"SecretSeen({sorted(self.data)}, version={self.version!r})"


@dataclass(frozen=True)
class CaBundles:
    """The PEM caBundle of each webhook in a configuration, by the webhook's name, and the version."""

    bundles: Mapping[str, bytes]
    version: str


class SecretStore(Protocol):
    """Shared storage of the webhook's replicas. Every call raises ClusterUnavailable."""

    async def read_secret(self, name: str, namespace: str) -> SecretData:
        """Return the Secret, or one without data and version if it does not exist."""

    async def write_secret(self, name: str, namespace: str, data: Mapping[str, bytes], version: str) -> SecretData:
        """Replace the data of a Secret that still has `version`, or create it (empty version).

        Raises ResourceConflict.
        """

    async def read_bundles(self, configuration: str) -> CaBundles:
        """Return the caBundles of a configuration. Raises NotFound if it does not exist."""

    async def write_bundles(self, configuration: str, bundles: Mapping[str, bytes], version: str) -> None:
        """Set the caBundles of a configuration that still has `version`. Raises ResourceConflict, NotFound."""

    async def close(self) -> None:
        """Close all connections."""


class ClusterSecretStore:
    """`SecretStore` on an API server."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server

    async def read_secret(self, name: str, namespace: str) -> SecretData:
        """See SecretStore."""
        try:
            return _parse_secret(await self._server.call("GET", _path(namespace, name)))
        except NotFound:
            return SecretData({}, "")

    async def write_secret(self, name: str, namespace: str, data: Mapping[str, bytes], version: str) -> SecretData:
        """See SecretStore. Labels, annotations and the type of an existing Secret stay as they are."""
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        if not version:
            secret: Document = {
                "apiVersion": "v1",
                "kind": "Secret",
                "type": "kubernetes.io/tls",
                "metadata": {"name": name, "namespace": namespace},
                "data": encoded,
            }
            return _parse_secret(
                await self._server.call("POST", _path(namespace), body=secret, parameters=FIELD_MANAGER)
            )
        path = _path(namespace, name)
        try:
            secret = await self._server.call("GET", path)
            if _version(secret) != version:
                raise ResourceConflict(f"PUT {path}: it changed since it was read")
            changed = {**secret, "data": encoded}
            return _parse_secret(await self._server.call("PUT", path, body=changed, parameters=FIELD_MANAGER))
        except NotFound as error:  # deleted since it was read: same as a change
            raise ResourceConflict(str(error)) from error

    async def read_bundles(self, configuration: str) -> CaBundles:
        """See SecretStore."""
        document = await self._server.call("GET", f"{WEBHOOK_CONFIGURATIONS_PATH}/{quote(configuration)}")
        return CaBundles(
            {
                webhook["name"]: _decoded(webhook["clientConfig"].get("caBundle"))
                for webhook in document.get("webhooks") or ()
            },
            _version(document),
        )

    async def write_bundles(self, configuration: str, bundles: Mapping[str, bytes], version: str) -> None:
        """See SecretStore."""
        webhooks = [
            {"name": name, "clientConfig": {"caBundle": base64.b64encode(bundle).decode()}}
            for name, bundle in bundles.items()
        ]
        await self._server.call(
            "PATCH",
            f"{WEBHOOK_CONFIGURATIONS_PATH}/{quote(configuration)}",
            # Strategic merge: webhooks are merged by name, so their other fields stay as they are.
            body={"metadata": {"resourceVersion": version}, "webhooks": webhooks},
            content_type=STRATEGIC,
            parameters=FIELD_MANAGER,
        )

    async def close(self) -> None:
        """See SecretStore."""
        await self._server.close()


def connect_secrets(settings: KubernetesSettings) -> ClusterSecretStore:
    """Return a store on the configured cluster. Does not connect yet. Raises SettingsError."""
    return ClusterSecretStore(open_server(settings))


def _path(namespace: str, *name: str) -> str:
    return "/".join(("/api/v1/namespaces", quote(namespace), "secrets", *map(quote, name)))


def _parse_secret(secret: Document) -> SecretData:
    data = {key: _decoded(value) for key, value in (secret.get("data") or {}).items()}
    return SecretData(data, _version(secret))


def _version(document: Document) -> str:
    return str(document["metadata"]["resourceVersion"])


def _decoded(value: str | None) -> bytes:
    try:
        return base64.b64decode(value or "", validate=True)
    except binascii.Error:
        return b""
