"""One certificate for several replicas: created once, renewed once, and trusted before it is used."""

from __future__ import annotations

import asyncio
import logging

import pytest

from planner.integrations.kubernetes import certificates
from planner.integrations.kubernetes.certificates import PROPAGATION_S
from tests.unit.planner.integrations.kubernetes.certificates.webhook_replicas import (
    HOST,
    LIFE_S,
    NOW,
    FakeUnixTime,
    WebhookReplica,
    stored_bundle,
    trusted_cas,
)
from tests.unit.planner.integrations.kubernetes.memory_certificate_store import MemoryCertStore


async def test_the_first_replica_creates_a_certificate(store: MemoryCertStore, time: FakeUnixTime) -> None:
    """It is stored in the Secret, its CA is in every webhook's caBundle, and it is in use."""
    replica = WebhookReplica(store, time, HOST, "10.0.0.7", "0:0:0:0:0:0:0:1")
    await replica.refresh()
    stored = stored_bundle(store)
    assert stored.pair == replica.serving.current
    assert {stored.ca} == trusted_cas(store)
    assert {HOST, "10.0.0.7", "::1"} == set(stored.pair.hosts)
    assert replica.status.not_ready_reason is None
    assert NOW + LIFE_S == replica.metric("not_after_seconds")
    assert 1.0 == replica.metric("valid")


async def test_an_empty_secret_is_filled(
    store: MemoryCertStore, time: FakeUnixTime, caplog: pytest.LogCaptureFixture
) -> None:
    """A Helm chart creates the Secret empty, so that it is deleted with the release. No warning is logged."""
    store.break_secret({"tls.crt": b"", "tls.key": b""})
    replica = WebhookReplica(store, time)
    with caplog.at_level(logging.WARNING):
        await replica.refresh()
    assert stored_bundle(store).pair == replica.serving.current
    assert [] == caplog.records


async def test_replicas_that_start_together_share_one_certificate(store: MemoryCertStore, time: FakeUnixTime) -> None:
    """One creates the Secret; the other gets a conflict, reads it, and uses the same certificate."""
    first, second = WebhookReplica(store, time), WebhookReplica(store, time)
    await asyncio.gather(first.refresh(), second.refresh())
    assert stored_bundle(store).pair == first.serving.current
    assert stored_bundle(store).pair == second.serving.current
    assert 2 == store.calls.count("write_secret")


async def test_nothing_is_written_before_the_renewal(store: MemoryCertStore, time: FakeUnixTime) -> None:
    """Refreshes only read until two thirds of the lifetime have passed."""
    replica = WebhookReplica(store, time)
    await replica.refresh()
    store.calls.clear()
    for _ in range(3):
        time.now += LIFE_S * 0.2
        await replica.refresh()
    assert ["read_bundles", "read_secret"] * 3 == store.calls


async def test_a_new_ca_is_trusted_before_its_certificate_is_used(store: MemoryCertStore, time: FakeUnixTime) -> None:
    """Both CAs are trusted immediately; the old certificate stays in use until API servers have the new CA."""
    first, second = WebhookReplica(store, time), WebhookReplica(store, time)
    await first.refresh()
    await second.refresh()
    old = stored_bundle(store)
    time.now += LIFE_S * 0.67
    await second.refresh()
    new = stored_bundle(store)
    assert {old.ca, new.ca} == trusted_cas(store)
    assert old.pair == second.serving.current
    await first.refresh()
    time.now += PROPAGATION_S
    await first.refresh()
    await second.refresh()
    assert (old.ca,) == new.previous_cas
    assert new.pair == first.serving.current
    assert new.pair == second.serving.current


async def test_previous_cas_stay_trusted(store: MemoryCertStore, time: FakeUnixTime) -> None:
    """The last three CAs are trusted, because a replica that was cut off may use an old certificate."""
    replica = WebhookReplica(store, time)
    made = []
    for _ in range(5):
        await replica.refresh()
        made.append(stored_bundle(store).ca)
        time.now += LIFE_S * 0.67
    assert 5 == len(set(made))
    assert set(made[-3:]) == trusted_cas(store)


async def test_concurrent_renewals_create_one_certificate(store: MemoryCertStore, time: FakeUnixTime) -> None:
    """Three replicas renew at the same time: one is first, and none overwrites its result."""
    replicas = [WebhookReplica(store, time) for _ in range(3)]
    await asyncio.gather(*(replica.refresh() for replica in replicas))
    old = stored_bundle(store)
    time.now += LIFE_S * 0.67
    await asyncio.gather(*(replica.refresh() for replica in replicas))
    new = stored_bundle(store)
    time.now += PROPAGATION_S
    await asyncio.gather(*(replica.refresh() for replica in replicas))
    assert (old.ca,) == new.previous_cas
    assert [new.pair] * 3 == [replica.serving.current for replica in replicas]
    assert {old.ca, new.ca} == trusted_cas(store)


async def test_an_emptied_ca_bundle_is_restored(store: MemoryCertStore, time: FakeUnixTime) -> None:
    """After a helm upgrade that empties it, the next refresh sets the caBundle and creates nothing."""
    replica = WebhookReplica(store, time)
    await replica.refresh()
    stored = stored_bundle(store)
    store.empty_bundles()
    await replica.refresh()
    assert {stored.ca} == trusted_cas(store)
    assert stored == stored_bundle(store)


async def test_a_replica_with_stale_data_overwrites_nothing(store: MemoryCertStore, time: FakeUnixTime) -> None:
    """A replica that read the Secret before a renewal does not write its caBundle after it."""
    late = WebhookReplica(store, time)
    await late.refresh()
    old = stored_bundle(store)
    store.empty_bundles()
    seen_late = await store.read_bundles("rfork")
    time.now += LIFE_S * 0.67
    await WebhookReplica(store, time).refresh()
    wrote = await asyncio.gather(
        store.write_bundles("rfork", dict.fromkeys(seen_late.data, old.ca), seen_late.version),
        return_exceptions=True,
    )
    assert ["ResourceConflict"] == [type(error).__name__ for error in wrote]
    assert {old.ca, stored_bundle(store).ca} == trusted_cas(store)


async def test_without_a_configuration_the_certificate_is_used_immediately(
    store: MemoryCertStore, time: FakeUnixTime
) -> None:
    """There are no callers before the configuration exists. Then its caBundle is set."""
    bundles, store.bundles = store.bundles, None
    replica = WebhookReplica(store, time)
    await replica.refresh()
    current_pair, store.bundles = replica.serving.current, bundles
    await replica.refresh()
    assert stored_bundle(store).pair == current_pair
    assert {stored_bundle(store).ca} == trusted_cas(store)


async def test_two_releases_share_a_certificate(store: MemoryCertStore, time: FakeUnixTime) -> None:
    """A release with other hosts renews for its own and the existing ones; the other does not renew back."""
    old, new = WebhookReplica(store, time), WebhookReplica(store, time, "new.rfork.svc")
    await old.refresh()
    await new.refresh()
    made = stored_bundle(store)
    await old.refresh()
    await new.refresh()
    assert {HOST, "new.rfork.svc"} == set(made.pair.hosts)
    assert made == stored_bundle(store)


@pytest.mark.parametrize("days", [0.01, 1.0, 90.0, 3650.0])
def test_a_new_certificate_is_valid_and_not_due_for_renewal(days: float) -> None:
    """For any lifetime, it is backdated and renewed well before it expires."""
    current_pair = certificates.generate_bundle([HOST], days, NOW).pair
    life_s = days * 86_400
    assert current_pair.valid(NOW - life_s / 20 if life_s < 36_000 else NOW - 1800)
    assert NOW + life_s * 0.6 < current_pair.renew_at < NOW + life_s * 0.7
    assert current_pair.valid(current_pair.renew_at)
