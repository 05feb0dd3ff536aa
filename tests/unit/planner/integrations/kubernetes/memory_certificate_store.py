"""A Secret and a MutatingWebhookConfiguration in memory, with the API server's version checks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from planner.integrations.kubernetes.api_server import ClusterUnavailable, NotFound, ResourceConflict
from planner.integrations.kubernetes.certificates import CertificateStore, VersionedData


class MemoryCertStore(CertificateStore):
    """A store whose calls yield to other tasks first, so that replicas interleave."""

    def __init__(self, *webhooks: str) -> None:
        self.secret: dict[str, bytes] | None = None
        self.bundles: dict[str, bytes] | None = dict.fromkeys(webhooks, b"")
        self.unavailable = False
        self.denied: set[str] = set()
        self.calls: list[str] = []
        self._versions = {"secret": 1, "bundles": 1}

    def break_secret(self, data: dict[str, bytes] | None) -> None:
        """Overwrite the Secret. None: delete it."""
        self.secret = data
        self._versions["secret"] += 1

    def empty_bundles(self) -> None:
        """Empty the caBundles, as a helm upgrade does."""
        self.bundles = dict.fromkeys(self.bundles or {}, b"")
        self._versions["bundles"] += 1

    async def read_secret(self, name: str, namespace: str) -> VersionedData:
        await self._record_call("read_secret")
        if self.secret is None:
            return VersionedData({}, "")
        return VersionedData(dict(self.secret), str(self._versions["secret"]))

    async def write_secret(self, name: str, namespace: str, data: Mapping[str, bytes], version: str) -> None:
        await self._record_call("write_secret")
        if version != ("" if self.secret is None else str(self._versions["secret"])):
            raise ResourceConflict(name)
        self.break_secret(dict(data))

    async def read_bundles(self, configuration: str) -> VersionedData:
        await self._record_call("read_bundles")
        if self.bundles is None:
            raise NotFound(configuration)
        return VersionedData(dict(self.bundles), str(self._versions["bundles"]))

    async def write_bundles(self, configuration: str, bundles: Mapping[str, bytes], version: str) -> None:
        await self._record_call("write_bundles")
        if self.bundles is None:
            raise NotFound(configuration)
        if version != str(self._versions["bundles"]):
            raise ResourceConflict(configuration)
        self.bundles |= bundles
        self._versions["bundles"] += 1

    async def close(self) -> None:
        pass

    async def _record_call(self, call: str) -> None:
        await asyncio.sleep(0)
        if self.unavailable or call in self.denied:
            raise ClusterUnavailable(f"{call}: {'unreachable' if self.unavailable else 'forbidden'}")
        self.calls.append(call)
