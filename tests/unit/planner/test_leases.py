"""Signed leases: their claims, keys, and the rotation of secrets."""

from __future__ import annotations

import jwt
import pytest

from planner.core.leases import LeaseSigner
from planner.core.records import InstanceRecord
from rfork.errors import LeaseRejected, SettingsError
from rfork.planner_client.lease import LeaseClaims, decode_key, verify
from rfork.schema import Lease
from tests.unit.planner.builders import LAYOUT, WEIGHTS, FakeTime, make_service, seed_report

NOW = 1000.0
OLD, NEW = "o" * 32, "n" * 32


def mint(*secrets: str) -> LeaseSigner:
    """Return a signer with a TTL of half a minute."""
    return LeaseSigner([secret.encode() for secret in secrets], ttl_s=30.0)


def source(source_id: str, **changes: object) -> InstanceRecord:
    """Return the record of a source."""
    return InstanceRecord(seed_report(source_id, **changes), seen_at=0.0, ttl_s=1.0)


def lease_of(minted: LeaseSigner, source_id: str = "s") -> Lease:
    """Return the lease of `fork-a` for a source."""
    return minted.lease("fork-a", source(source_id, generation=3), NOW)


def claims(lease: Lease, keys: tuple[str, ...], source_id: str = "s") -> LeaseClaims:
    """Return the claims that a source with these keys reads from the lease, at NOW."""
    return verify(lease.token, [decode_key(key) for key in keys], source_id=source_id, now=NOW)


def test_a_source_verifies_a_lease_with_its_keys() -> None:
    """The claims are fork, source, image, generation and expiry."""
    minted = mint(NEW)
    lease = lease_of(minted)
    expected = LeaseClaims("fork-a", "s", LAYOUT, WEIGHTS, 3, NOW + 30)
    assert 30.0 == lease.expires_in_s
    assert expected == claims(lease, minted.keys_of("s"))


ROTATIONS = [
    # secrets of the signer, secrets of the planner that published the keys, whether accepted
    ((OLD,), (NEW, OLD), True),
    ((NEW, OLD), (NEW, OLD), True),
    ((NEW, OLD), (NEW,), True),
    ((OLD, NEW), (NEW,), False),
    ((OLD,), (NEW,), False),
]


@pytest.mark.parametrize(("signed", "published", "accepted"), ROTATIONS)
def test_the_first_secret_signs_and_all_verify(
    signed: tuple[str, ...], published: tuple[str, ...], accepted: bool
) -> None:
    """Secrets are rotated without breaking leases."""
    lease, keys = lease_of(mint(*signed)), mint(*published).keys_of("s")
    if accepted:
        assert "fork-a" == claims(lease, keys).fork_id
    else:
        with pytest.raises(LeaseRejected, match="forged"):
            claims(lease, keys)


async def test_each_start_generates_a_secret_if_none_is_set(time: FakeTime) -> None:
    """Leases from before a restart are then rejected."""
    before, after = make_service(time, lease_keys=()), make_service(time, lease_keys=())
    old_keys = (await before.report(seed_report("s"))).lease_keys
    new_keys = (await after.report(seed_report("s"))).lease_keys
    assert set() == {*old_keys} & {*new_keys}


def test_keys_are_published_newest_first_without_duplicates() -> None:
    """`NEW,OLD,NEW` publishes the key of NEW, then that of OLD."""
    expected = (*mint(NEW).keys_of("s"), *mint(OLD).keys_of("s"))
    assert 2 == len(set(expected))
    assert expected == mint(NEW, OLD, NEW).keys_of("s")


def test_a_source_cannot_sign_leases_of_another() -> None:
    """Each source has its own keys, in any order of requests."""
    minted = mint(NEW)
    mine, other = minted.keys_of("s"), minted.keys_of("t")
    assert set() == {*mine} & {*other}
    with pytest.raises(LeaseRejected, match="forged"):
        claims(lease_of(minted, "t"), mine, "t")


def test_an_empty_secret_is_rejected() -> None:
    """An extra comma in the setting must not create keys that anyone can derive."""
    with pytest.raises(SettingsError, match="RFORK_PLANNER_LEASE_KEYS"):
        mint(NEW, "")


@pytest.mark.parametrize("weights_id", [WEIGHTS, None])
def test_a_token_equals_that_of_pyjwt(weights_id: str | None) -> None:
    """They are equal byte for byte, including escaped characters."""
    minted = mint(NEW)
    names = {"fork_id": 'fork-"ä"', "source_id": "s-1", "layout_id": LAYOUT}
    token = minted.lease(names["fork_id"], source(names["source_id"], weights_id=weights_id), NOW).token
    payload = {
        "sub": names["fork_id"], "aud": names["source_id"], "exp": NOW + 30, "layout": LAYOUT,
        "weights": weights_id, "generation": 0,
    }  # fmt: skip
    assert jwt.encode(payload, decode_key(minted.keys_of("s-1")[0]), algorithm="HS256") == token
