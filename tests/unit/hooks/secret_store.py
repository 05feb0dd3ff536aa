"""A Secret and a MutatingWebhookConfiguration in memory, as the API server guards them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from planner.hooks.kubernetes.cluster import ClusterUnavailable, Conflict, Gone
from planner.hooks.kubernetes.secrets import BundlesSeen, SecretSeen


class MemorySecretStore:
    """`SecretStore`; every call lets other tasks run first, so that two replicas come between one another."""

    def __init__(self, *webhooks: str) -> None:
        self.secret: dict[str, bytes] | None = None
        self.bundles: dict[str, bytes] | None = dict.fromkeys(webhooks, b"")
        self.away = False
        self.denied: set[str] = set()
        self.calls: list[str] = []
        self._versions = {"secret": 1, "bundles": 1}

    def break_secret(self, data: dict[str, bytes] | None) -> None:
        """Somebody else writes the Secret; None: deletes it."""
        self.secret = data
        self._versions["secret"] += 1

    def empty_bundles(self) -> None:
        """A helm upgrade writes the configuration anew."""
        self.bundles = dict.fromkeys(self.bundles or {}, b"")
        self._versions["bundles"] += 1

    async def read_secret(self, name: str, namespace: str) -> SecretSeen:
        """As in SecretStore."""
        await self._asked("read_secret")
        if self.secret is None:
            return SecretSeen({}, "")
        return SecretSeen(dict(self.secret), str(self._versions["secret"]))

    async def write_secret(
        self, name: str, namespace: str, data: Mapping[str, bytes], version: str
    ) -> SecretSeen:
        """As in SecretStore."""
        await self._asked("write_secret")
        if version != ("" if self.secret is None else str(self._versions["secret"])):
            raise Conflict(name)
        self.break_secret(dict(data))
        return SecretSeen(data, str(self._versions["secret"]))

    async def read_bundles(self, configuration: str) -> BundlesSeen:
        """As in SecretStore."""
        await self._asked("read_bundles")
        if self.bundles is None:
            raise Gone(configuration)
        return BundlesSeen(dict(self.bundles), str(self._versions["bundles"]))

    async def write_bundles(self, configuration: str, bundles: Mapping[str, bytes], version: str) -> None:
        """As in SecretStore."""
        await self._asked("write_bundles")
        if self.bundles is None:
            raise Gone(configuration)
        if version != str(self._versions["bundles"]):
            raise Conflict(configuration)
        self.bundles |= bundles
        self._versions["bundles"] += 1

    async def close(self) -> None:
        """As in SecretStore."""

    async def _asked(self, call: str) -> None:
        await asyncio.sleep(0)
        if self.away or call in self.denied:
            raise ClusterUnavailable(f"{call}: {'it is away' if self.away else 'forbidden'}")
        self.calls.append(call)
