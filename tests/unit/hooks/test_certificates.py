"""The webhook's certificate, of several replicas, with a cluster in memory and a clock that tests move."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from planner.hooks.kubernetes import authority
from planner.hooks.kubernetes.authority import BadCertificate, Own
from planner.hooks.kubernetes.certificates import SETTLE_S, FolderKeeper, SecretKeeper
from planner.hooks.kubernetes.showing import REMIND_S, LiveContext, Watch
from planner.hooks.probes import Status
from planner.leases import Clock
from rfork.errors import SettingsError
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


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def store() -> MemorySecretStore:
    return MemorySecretStore("pods.rfork.dev", "bindings.rfork.dev")


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


class Folder:
    """A folder of certificates that others renew."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, own: Own) -> Own:
        for name, content in own.data().items():
            (self.path / name).write_bytes(content)
        return own


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path)
    folder.write(authority.make_own([HOST], DAYS, NOW))
    return folder


async def test_a_folder_is_read_again_when_it_changes(folder: Folder, time: Time) -> None:
    """The new pair is shown at the next look."""
    live = LiveContext()
    keeper = FolderKeeper(folder.path, Watch(live, Status("webhook"), time.clock))
    new = folder.write(authority.make_own([HOST], DAYS, NOW + 10))
    await keeper.look()
    assert new.shown == live.shown


@pytest.mark.parametrize("name", ["tls.crt", "tls.key"])
@pytest.mark.parametrize("content", [None, b"", b"half of it", "another"])
async def test_a_pair_that_cannot_be_used_leaves_the_one_before(
    folder: Folder, time: Time, caplog: pytest.LogCaptureFixture, name: str, content: bytes | str | None
) -> None:
    """A file that is missing, empty, half written, or not yet the other's: one error, and the old pair."""
    live, status = LiveContext(), Status("webhook")
    keeper = FolderKeeper(folder.path, Watch(live, status, time.clock))
    shown = live.shown
    if content is None:
        (folder.path / name).unlink()
    else:
        other = authority.make_own([HOST], DAYS, NOW).data()[name]
        (folder.path / name).write_bytes(content if isinstance(content, bytes) else other)
    await keeper.look()
    await keeper.look()
    assert (shown, None, 1) == (live.shown, status.why_not, len(errors(caplog)))


def test_a_folder_without_a_pair_does_not_start(tmp_path: Path, time: Time) -> None:
    """One line says which file, and which setting."""
    with pytest.raises(SettingsError) as caught:
        FolderKeeper(tmp_path, Watch(LiveContext(), Status("webhook"), time.clock))
    assert (
        f"the webhook's certificate cannot be used: {tmp_path}/tls.crt: No such file or directory",
        "RFORK_HOOK_CERTIFICATES is a folder with tls.crt and tls.key, both PEM",
    ) == (str(caught.value), caught.value.hint)


def test_no_key_is_shown_in_texts(store: MemorySecretStore) -> None:
    """What is logged or raised by mistake holds no key."""
    own = authority.make_own([HOST], DAYS, NOW)
    assert "PRIVATE" not in repr(own)
    with pytest.raises(BadCertificate) as caught:
        authority.read_shown(own.shown.chain, own.shown.key[:-40])
    assert "PRIVATE" not in str(caught.value)
