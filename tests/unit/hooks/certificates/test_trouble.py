"""A Secret that somebody broke, an API server that is away, a clock that is wrong, and wrong settings."""

from __future__ import annotations

import logging

import pytest

from planner.hooks.kubernetes import authority
from planner.hooks.kubernetes.authority import BadCertificate
from planner.hooks.kubernetes.certificates import SETTLE_S, SecretKeeper
from planner.hooks.kubernetes.showing import REMIND_S, LiveContext, Watch
from planner.hooks.probes import Status
from planner.leases import Clock
from rfork.errors import SettingsError
from rfork.settings import HookSettings
from tests.unit.hooks.certificates.replicas import (
    DAYS,
    HOST,
    LIFE_S,
    NOW,
    Replica,
    Time,
    errors,
    own_of,
    trusted,
)
from tests.unit.hooks.secret_store import MemorySecretStore


@pytest.mark.parametrize(
    "broken",
    [
        {"tls.crt": b"no certificate", "tls.key": b"no key", "ca.crt": b"no authority"},
        {"tls.crt": b"", "tls.key": b""},
        {},
        None,
    ],
)
async def test_a_secret_that_somebody_broke_is_replaced(
    store: MemorySecretStore, time: Time, caplog: pytest.LogCaptureFixture, broken: dict[str, bytes] | None
) -> None:
    """A new certificate is made, and what is shown meanwhile stays trusted."""
    replica = Replica(store, time)
    await replica.look()
    old = own_of(store)
    store.break_secret(broken)
    with caplog.at_level(logging.INFO):
        await replica.look()
    new = own_of(store)
    during = (trusted(store), replica.live.shown)
    time.now += SETTLE_S
    await replica.look()
    assert (({old.authority, new.authority}, old.shown), new.shown, True) == (
        during,
        replica.live.shown,
        "new certificate made" in caplog.text,
    )


async def test_a_key_of_another_certificate_breaks_the_secret(store: MemorySecretStore, time: Time) -> None:
    """Parts that are each well, but do not belong together, are replaced too."""
    await Replica(store, time).look()
    other = authority.make_own([HOST], DAYS, NOW)
    mixed = (
        own_of(store).data() | {"tls.key": other.shown.key},
        own_of(store).data() | {"ca.crt": other.authority},
    )
    for data in mixed:
        store.break_secret(data)
        await Replica(store, time).look()
        assert own_of(store).data() != data


async def test_without_the_api_server_what_is_there_is_shown(
    store: MemorySecretStore, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """One error an hour, a counter, and all goes on when it is back; the process stays ready."""
    replica = Replica(store, time)
    await replica.look()
    shown = replica.live.shown
    store.away = True
    for _ in range(4):
        time.now += REMIND_S / 2
        await replica.look()
    told = len(errors(caplog))
    store.away = False
    await replica.look()
    assert (2, 4.0, None, shown) == (
        told,
        replica.metric("troubles_total"),
        replica.status.why_not,
        replica.live.shown,
    )


async def test_without_the_api_server_from_the_start_it_is_not_ready(
    store: MemorySecretStore, time: Time
) -> None:
    """It says why, and is ready as soon as the server is there."""
    replica = Replica(store, time)
    store.away = True
    await replica.look()
    before = replica.status.why_not or ""
    store.away = False
    await replica.look()
    assert (True, None) == ("it is away" in before, replica.status.why_not)


@pytest.mark.parametrize("call", ["read_bundles", "write_bundles", "read_secret", "write_secret"])
async def test_what_it_is_not_allowed_is_said(store: MemorySecretStore, time: Time, call: str) -> None:
    """No certificate is shown that the API server does not trust; the reason is in /readyz."""
    replica = Replica(store, time)
    store.denied = {call}
    await replica.look()
    assert (None, True) == (replica.live.shown, f"{call}: forbidden" in (replica.status.why_not or ""))


async def test_a_clock_far_ahead_does_not_take_the_certificate_from_the_others(
    store: MemorySecretStore, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """What such a replica made is not valid yet for the others: they keep showing theirs, and say so."""
    right = Replica(store, time)
    await right.look()
    shown = right.live.shown
    authority_shown = own_of(store).authority
    ahead = Replica(store, time, clock=Clock(monotonic=lambda: time.now, unix=lambda: time.now + 10 * LIFE_S))
    for _ in range(3):
        await ahead.look()
        await right.look()
        time.now += SETTLE_S
    assert (shown, {authority_shown, own_of(store).authority}, 1) == (
        right.live.shown,
        trusted(store),
        sum("the new certificate is not valid" in text for text in errors(caplog)),
    )


async def test_an_expired_certificate_is_an_error_each_hour(
    store: MemorySecretStore, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody could renew it: it is shown all the same, with an error an hour and a metric."""
    replica = Replica(store, time)
    await replica.look()
    store.away = True
    time.now += LIFE_S
    for _ in range(4):
        await replica.look()
        time.now += REMIND_S / 2
    told = sum("HAS EXPIRED" in text for text in errors(caplog))
    assert (2, 0.0, None) == (told, replica.metric("valid"), replica.status.why_not)


@pytest.mark.parametrize("hosts", [(), ("two words",), ("https://a.b",)])
def test_hosts_that_no_certificate_can_be_for_are_refused(
    store: MemorySecretStore, time: Time, hosts: tuple[str, ...]
) -> None:
    """The setting is named."""
    settings = HookSettings(webhook_hosts=hosts)
    with pytest.raises(SettingsError, match="RFORK_HOOK_WEBHOOK_HOSTS"):
        SecretKeeper(settings, store, Watch(LiveContext(), Status("webhook"), time.clock))


def test_no_key_is_shown_in_texts(store: MemorySecretStore) -> None:
    """What is logged or raised by mistake holds no key."""
    own = authority.make_own([HOST], DAYS, NOW)
    assert "PRIVATE" not in repr(own)
    with pytest.raises(BadCertificate) as caught:
        authority.read_shown(own.shown.chain, own.shown.key[:-40])
    assert "PRIVATE" not in str(caught.value)
