"""Failures of the webhook's certificate: a broken Secret, no API server, wrong clocks, invalid settings."""

from __future__ import annotations

import logging

import pytest

from planner.clock import Clock
from planner.integrations.health import IntegrationStatus
from planner.integrations.kubernetes import certificates
from planner.integrations.kubernetes.certificates import (
    CERTIFICATE_DAYS,
    LOG_INTERVAL_S,
    PROPAGATION_S,
    InvalidCertificate,
    SecretCertSource,
    ServingCertificate,
)
from rfork.errors import SettingsError
from rfork.settings import KubernetesSettings
from tests.unit.planner.integrations.kubernetes.certificates.webhook_replicas import (
    HOST,
    LIFE_S,
    NOW,
    FakeUnixTime,
    WebhookReplica,
    errors,
    stored_bundle,
    trusted_cas,
)
from tests.unit.planner.integrations.kubernetes.memory_certificate_store import MemoryCertStore


@pytest.mark.parametrize(
    "broken",
    [
        {"tls.crt": b"no certificate", "tls.key": b"no key", "ca.crt": b"no authority"},
        {"tls.crt": b"", "tls.key": b""},
        {},
        None,
    ],
)
async def test_a_broken_secret_is_replaced(
    store: MemoryCertStore,
    time: FakeUnixTime,
    caplog: pytest.LogCaptureFixture,
    broken: dict[str, bytes] | None,
) -> None:
    """A new certificate is created, and the CA of the previous one stays trusted."""
    replica = WebhookReplica(store, time)
    await replica.refresh()
    old = stored_bundle(store)
    store.break_secret(broken)
    with caplog.at_level(logging.INFO):
        await replica.refresh()
    new = stored_bundle(store)
    assert {old.ca, new.ca} == trusted_cas(store)
    assert old.pair == replica.serving.current
    time.now += PROPAGATION_S
    await replica.refresh()
    assert new.pair == replica.serving.current
    assert "certificate created" in caplog.text


async def test_a_key_of_another_certificate_breaks_the_secret(store: MemoryCertStore, time: FakeUnixTime) -> None:
    """Valid parts that do not belong together are replaced too."""
    await WebhookReplica(store, time).refresh()
    other = certificates.generate_bundle([HOST], CERTIFICATE_DAYS, NOW)
    mixed = (
        stored_bundle(store).data() | {"tls.key": other.pair.key},
        stored_bundle(store).data() | {"ca.crt": other.ca},
    )
    for data in mixed:
        store.break_secret(data)
        await WebhookReplica(store, time).refresh()
        assert stored_bundle(store).data() != data


async def test_without_the_api_server_the_current_certificate_stays(
    store: MemoryCertStore, time: FakeUnixTime, caplog: pytest.LogCaptureFixture
) -> None:
    """It logs one error an hour and counts each, recovers with the server, and stays ready."""
    replica = WebhookReplica(store, time)
    await replica.refresh()
    current_pair = replica.serving.current
    store.unavailable = True
    for _ in range(4):
        time.now += LOG_INTERVAL_S / 2
        await replica.refresh()
    error_count = len(errors(caplog))
    store.unavailable = False
    await replica.refresh()
    assert 2 == error_count
    assert 4.0 == replica.metric("errors_total")
    assert replica.status.not_ready_reason is None
    assert current_pair == replica.serving.current


async def test_without_the_api_server_from_the_start_it_is_not_ready(
    store: MemoryCertStore, time: FakeUnixTime
) -> None:
    """The status has the reason; it becomes ready once the server responds."""
    replica = WebhookReplica(store, time)
    store.unavailable = True
    await replica.refresh()
    before = replica.status.not_ready_reason or ""
    store.unavailable = False
    await replica.refresh()
    assert "unreachable" in before
    assert replica.status.not_ready_reason is None


@pytest.mark.parametrize("call", ["read_bundles", "write_bundles", "read_secret", "write_secret"])
async def test_missing_permissions_are_reported(store: MemoryCertStore, time: FakeUnixTime, call: str) -> None:
    """A certificate that the API server does not trust is not used; /readyz has the reason."""
    replica = WebhookReplica(store, time)
    store.denied = {call}
    await replica.refresh()
    assert replica.serving.current is None
    assert f"{call}: forbidden" in (replica.status.not_ready_reason or "")


async def test_a_replica_with_a_fast_clock_does_not_replace_the_others_certificate(
    store: MemoryCertStore, time: FakeUnixTime, caplog: pytest.LogCaptureFixture
) -> None:
    """Its certificate is not valid yet for the others, which keep theirs and report it."""
    right = WebhookReplica(store, time)
    await right.refresh()
    current_pair = right.serving.current
    stored_authority = stored_bundle(store).ca
    ahead = WebhookReplica(store, time, clock=Clock(monotonic=lambda: time.now, unix=lambda: time.now + 10 * LIFE_S))
    for _ in range(3):
        await ahead.refresh()
        await right.refresh()
        time.now += PROPAGATION_S
    assert current_pair == right.serving.current
    assert {stored_authority, stored_bundle(store).ca} == trusted_cas(store)
    assert 1 == sum("the new webhook certificate is not valid" in text for text in errors(caplog))


async def test_an_expired_certificate_is_an_error_each_hour(
    store: MemoryCertStore, time: FakeUnixTime, caplog: pytest.LogCaptureFixture
) -> None:
    """It could not be renewed: it stays in use, with an error an hour and a metric."""
    replica = WebhookReplica(store, time)
    await replica.refresh()
    store.unavailable = True
    time.now += LIFE_S
    for _ in range(4):
        await replica.refresh()
        time.now += LOG_INTERVAL_S / 2
    error_count = sum("certificate expired" in text for text in errors(caplog))
    assert 2 == error_count
    assert 0.0 == replica.metric("valid")
    assert replica.status.not_ready_reason is None


@pytest.mark.parametrize("hosts", [(), ("two words",), ("https://a.b",)])
def test_invalid_hosts_are_rejected(store: MemoryCertStore, time: FakeUnixTime, hosts: tuple[str, ...]) -> None:
    """The error names the setting."""
    settings = KubernetesSettings(webhook_hosts=hosts)
    with pytest.raises(SettingsError, match="RFORK_K8S_WEBHOOK_HOSTS"):
        SecretCertSource(settings, store, ServingCertificate(IntegrationStatus("webhook"), time.clock))


def test_no_text_contains_a_key(store: MemoryCertStore) -> None:
    """Neither repr nor error messages contain it."""
    stored = certificates.generate_bundle([HOST], CERTIFICATE_DAYS, NOW)
    assert "PRIVATE" not in repr(stored)
    with pytest.raises(InvalidCertificate) as caught:
        certificates.load_pair(stored.pair.chain, stored.pair.key[:-40])
    assert "PRIVATE" not in str(caught.value)
