"""Replicas of the webhook, with a cluster in memory and a clock that tests move."""

from __future__ import annotations

import logging

import pytest

from planner.hooks.kubernetes import authority
from planner.hooks.kubernetes.authority import Own
from planner.hooks.kubernetes.certificates import SecretKeeper
from planner.hooks.kubernetes.showing import LiveContext, Watch
from planner.hooks.probes import Status
from planner.leases import Clock
from rfork.settings import HookSettings
from tests.unit.hooks.secret_store import MemorySecretStore

HOST = "rfork-webhook.rfork.svc"
DAYS = 90.0
LIFE_S = DAYS * 86_400
NOW = 1_800_000_000.0


class Time:
    """Both clocks, moved together."""

    def __init__(self) -> None:
        self.now = NOW
        self.clock = Clock(monotonic=lambda: self.now, unix=lambda: self.now)


class Replica:
    """One replica of the webhook."""

    def __init__(self, store: MemorySecretStore, time: Time, *hosts: str, clock: Clock | None = None) -> None:
        settings = HookSettings(webhook_hosts=hosts or (HOST,), certificate_days=DAYS)
        self.status = Status("webhook")
        self.live = LiveContext()
        self.keeper = SecretKeeper(settings, store, Watch(self.live, self.status, clock or time.clock))

    async def look(self) -> None:
        await self.keeper.look()

    def metric(self, name: str) -> float | None:
        return self.status.registry.get_sample_value(f"rfork_webhook_certificate_{name}")


def own_of(store: MemorySecretStore) -> Own:
    """What the Secret holds."""
    return authority.read_own(store.secret or {})


def trusted(store: MemorySecretStore) -> set[bytes]:
    """The authorities that every webhook of the configuration is trusted by."""
    bundles = [set(authority.authorities(bundle)) for bundle in (store.bundles or {}).values()]
    assert bundles[:1] * len(bundles) == bundles
    return bundles[0]


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
