"""Replicas of the webhook, with a cluster in memory and a clock that tests move."""

from __future__ import annotations

import logging

import pytest

from planner.clock import Clock
from planner.integrations.health import IntegrationStatus
from planner.integrations.kubernetes import certificates
from planner.integrations.kubernetes.certificates import (
    CERTIFICATE_DAYS,
    CertBundle,
    SecretCertSource,
    ServingCertificate,
)
from rfork.settings import KubernetesSettings
from tests.unit.planner.integrations.kubernetes.memory_certificate_store import MemoryCertStore

HOST = "rfork-webhook.rfork.svc"
LIFE_S = CERTIFICATE_DAYS * 86_400
NOW = 1_800_000_000.0


class FakeUnixTime:
    """Both clocks, moved together."""

    def __init__(self) -> None:
        self.now = NOW
        self.clock = Clock(monotonic=lambda: self.now, unix=lambda: self.now)


class WebhookReplica:
    """One replica of the webhook."""

    def __init__(self, store: MemoryCertStore, time: FakeUnixTime, *hosts: str, clock: Clock | None = None) -> None:
        settings = KubernetesSettings(webhook_hosts=hosts or (HOST,))
        self.status = IntegrationStatus("webhook")
        self.serving = ServingCertificate(self.status, clock or time.clock)
        self.cert_source = SecretCertSource(settings, store, self.serving)

    async def refresh(self) -> None:
        await self.cert_source.refresh()

    def metric(self, name: str) -> float | None:
        return self.status.registry.get_sample_value(f"rfork_webhook_certificate_{name}")


def stored_bundle(store: MemoryCertStore) -> CertBundle:
    """Return the Secret's bundle."""
    return certificates.load_bundle(store.secret or {})


def trusted_cas(store: MemoryCertStore) -> set[bytes]:
    """Return the CAs that are in every webhook's caBundle."""
    bundles = [set(certificates.authorities(bundle)) for bundle in (store.bundles or {}).values()]
    assert bundles[:1] * len(bundles) == bundles
    return bundles[0]


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
