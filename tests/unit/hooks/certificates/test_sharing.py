"""One certificate of several replicas: made once, renewed once, and trusted before it is shown."""

from __future__ import annotations

import asyncio
import logging

import pytest

from planner.hooks.kubernetes import authority
from planner.hooks.kubernetes.certificates import SETTLE_S
from tests.unit.hooks.certificates.replicas import HOST, LIFE_S, NOW, Replica, Time, own_of, trusted
from tests.unit.hooks.secret_store import MemorySecretStore


async def test_the_first_replica_makes_a_certificate(store: MemorySecretStore, time: Time) -> None:
    """It lies in the Secret, every webhook's caBundle is its authority, and it is shown."""
    replica = Replica(store, time, HOST, "10.0.0.7", "0:0:0:0:0:0:0:1")
    await replica.look()
    own = own_of(store)
    assert (
        own.shown,
        {own.authority},
        {HOST, "10.0.0.7", "::1"},
        None,
        NOW + LIFE_S,
        1.0,
    ) == (
        replica.live.shown,
        trusted(store),
        set(own.shown.hosts),
        replica.status.why_not,
        replica.metric("not_after_seconds"),
        replica.metric("valid"),
    )


async def test_an_empty_secret_is_as_none(
    store: MemorySecretStore, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """A Helm chart makes the Secret, so that it goes with the release: it is filled, without a warning."""
    store.break_secret({"tls.crt": b"", "tls.key": b""})
    replica = Replica(store, time)
    with caplog.at_level(logging.WARNING):
        await replica.look()
    assert (own_of(store).shown, []) == (replica.live.shown, caplog.records)


async def test_two_replicas_that_start_together_share_one_certificate(
    store: MemorySecretStore, time: Time
) -> None:
    """One creates the Secret; the other meets a conflict, reads, and shows the same."""
    first, second = Replica(store, time), Replica(store, time)
    await asyncio.gather(first.look(), second.look())
    assert (own_of(store).shown, own_of(store).shown, 2) == (
        first.live.shown,
        second.live.shown,
        store.calls.count("write_secret"),
    )


async def test_nothing_is_written_while_all_is_well(store: MemorySecretStore, time: Time) -> None:
    """Later looks only read, until two thirds of the certificate's life are over."""
    replica = Replica(store, time)
    await replica.look()
    store.calls.clear()
    for _ in range(3):
        time.now += LIFE_S * 0.2
        await replica.look()
    assert ["read_bundles", "read_secret"] * 3 == store.calls


async def test_a_new_authority_is_trusted_before_its_certificate_is_shown(
    store: MemorySecretStore, time: Time
) -> None:
    """On renewal both authorities are trusted at once; replicas show the old until API servers have heard."""
    first, second = Replica(store, time), Replica(store, time)
    await first.look()
    await second.look()
    old = own_of(store)
    time.now += LIFE_S * 0.67
    await second.look()
    new = own_of(store)
    assert ({old.authority, new.authority}, old.shown) == (trusted(store), second.live.shown)
    await first.look()
    time.now += SETTLE_S
    await first.look()
    await second.look()
    assert ((old.authority,), new.shown, new.shown) == (new.earlier, first.live.shown, second.live.shown)


async def test_the_authority_before_stays_trusted(store: MemorySecretStore, time: Time) -> None:
    """Of many renewals, the last three authorities are trusted: one that was cut off may show the second."""
    replica = Replica(store, time)
    made = []
    for _ in range(5):
        await replica.look()
        made.append(own_of(store).authority)
        time.now += LIFE_S * 0.67
    assert (5, set(made[-3:])) == (len(set(made)), trusted(store))


async def test_replicas_that_renew_together_make_one_certificate(
    store: MemorySecretStore, time: Time
) -> None:
    """Of three that see it is time, one is first; none throws away what it wrote."""
    replicas = [Replica(store, time) for _ in range(3)]
    await asyncio.gather(*(replica.look() for replica in replicas))
    old = own_of(store)
    time.now += LIFE_S * 0.67
    await asyncio.gather(*(replica.look() for replica in replicas))
    new = own_of(store)
    time.now += SETTLE_S
    await asyncio.gather(*(replica.look() for replica in replicas))
    assert ((old.authority,), [new.shown] * 3, {old.authority, new.authority}) == (
        new.earlier,
        [replica.live.shown for replica in replicas],
        trusted(store),
    )


async def test_a_ca_bundle_that_was_emptied_is_set_again(store: MemorySecretStore, time: Time) -> None:
    """A helm upgrade leaves the caBundle empty: the next look sets it, and makes nothing new."""
    replica = Replica(store, time)
    await replica.look()
    own = own_of(store)
    store.empty_bundles()
    await replica.look()
    assert ({own.authority}, own) == (trusted(store), own_of(store))


async def test_a_replica_that_saw_less_takes_nothing_back(store: MemorySecretStore, time: Time) -> None:
    """One that read the Secret before a renewal, and comes to write the caBundle after it, does not."""
    late = Replica(store, time)
    await late.look()
    old = own_of(store)
    store.empty_bundles()
    seen_late = await store.read_bundles("rfork")
    time.now += LIFE_S * 0.67
    await Replica(store, time).look()
    wrote = await asyncio.gather(
        store.write_bundles("rfork", dict.fromkeys(seen_late.bundles, old.authority), seen_late.version),
        return_exceptions=True,
    )
    assert (["Conflict"], {old.authority, own_of(store).authority}) == (
        [type(error).__name__ for error in wrote],
        trusted(store),
    )


async def test_without_a_configuration_it_is_shown_at_once(store: MemorySecretStore, time: Time) -> None:
    """Nobody calls before there is one; when it comes, its caBundle is set."""
    bundles, store.bundles = store.bundles, None
    replica = Replica(store, time)
    await replica.look()
    shown, store.bundles = replica.live.shown, bundles
    await replica.look()
    assert (own_of(store).shown, {own_of(store).authority}) == (shown, trusted(store))


async def test_hosts_of_two_releases_share_a_certificate(store: MemorySecretStore, time: Time) -> None:
    """One that misses a host renews for its own and those that were there; the others do not renew back."""
    old, new = Replica(store, time), Replica(store, time, "new.rfork.svc")
    await old.look()
    await new.look()
    made = own_of(store)
    await old.look()
    await new.look()
    assert ({HOST, "new.rfork.svc"}, made) == (set(made.shown.hosts), own_of(store))


@pytest.mark.parametrize("days", [0.01, 1.0, 90.0, 3650.0])
def test_a_new_certificate_is_valid_and_not_to_be_renewed_yet(days: float) -> None:
    """However short or long its life: valid a while before it was made, and renewed well before its end."""
    shown = authority.make_own([HOST], days, NOW).shown
    life_s = days * 86_400
    assert (True, True, True) == (
        shown.valid(NOW - life_s / 20 if life_s < 36_000 else NOW - 1800),
        NOW + life_s * 0.6 < shown.renew_at < NOW + life_s * 0.7,
        shown.valid(shown.renew_at),
    )
