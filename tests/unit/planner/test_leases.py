from __future__ import annotations

import jwt
import pytest

from planner.leases import Clock, LeaseSigner
from rfork.errors import LeaseRejected, SettingsError
from rfork.planner_client.lease import LeaseClaims, decode_key, verify
from rfork.schema import Lease
from tests.unit.planner.builders import LAYOUT, WEIGHTS

NOW = 1000.0
OLD, NEW = "o" * 32, "n" * 32


def mint(*secrets: str) -> LeaseSigner:
    """A mint at NOW whose leases live for half a minute."""
    return LeaseSigner(secrets, ttl_s=30.0, clock=Clock(unix=lambda: NOW))


def lease_of(minted: LeaseSigner, source_id: str = "s") -> Lease:
    """The lease of `fork-a` on a source."""
    return minted.lease(fork_id="fork-a", source_id=source_id, layout_id=LAYOUT, weights_id=WEIGHTS, generation=3)


def claims(lease: Lease, keys: tuple[str, ...], source_id: str = "s") -> LeaseClaims:
    """What a source that was told `keys` makes of the lease, at NOW."""
    return verify(lease.token, [decode_key(key) for key in keys], source_id=source_id, now=NOW)


def test_a_source_reads_the_claims_with_the_keys_it_was_told() -> None:
    """Fork, source, image, generation, and the end of the time to live."""
    minted = mint(NEW)
    lease = lease_of(minted)
    expected = LeaseClaims("fork-a", "s", LAYOUT, WEIGHTS, 3, NOW + 30)
    assert (30.0, expected) == (lease.expires_in_s, claims(lease, minted.keys_of("s")))


ROTATIONS = [
    # secrets of the planner that signed, secrets of the one that told the keys, accepted
    ((OLD,), (NEW, OLD), True),
    ((NEW, OLD), (NEW, OLD), True),
    ((NEW, OLD), (NEW,), True),
    ((OLD, NEW), (NEW,), False),
    ((OLD,), (NEW,), False),
    ((), (), False),
]


@pytest.mark.parametrize(("signed", "published", "accepted"), ROTATIONS)
def test_the_first_secret_signs_and_all_open(
    signed: tuple[str, ...], published: tuple[str, ...], accepted: bool
) -> None:
    """So a secret is changed without breaking a lease; without one, each start draws its own."""
    lease, keys = lease_of(mint(*signed)), mint(*published).keys_of("s")
    if accepted:
        assert "fork-a" == claims(lease, keys).fork_id
    else:
        with pytest.raises(LeaseRejected, match="forged"):
            claims(lease, keys)


def test_the_newest_key_is_told_first_and_each_once() -> None:
    """What is told under `NEW,OLD,NEW` is the key of NEW, then that of OLD."""
    expected = (*mint(NEW).keys_of("s"), *mint(OLD).keys_of("s"))
    assert (2, expected) == (len(set(expected)), mint(NEW, OLD, NEW).keys_of("s"))


def test_a_source_cannot_mint_for_another() -> None:
    """Each has keys of its own, whoever asked first."""
    minted = mint(NEW)
    mine, other = minted.keys_of("s"), minted.keys_of("t")
    assert set() == {*mine} & {*other}
    with pytest.raises(LeaseRejected, match="forged"):
        claims(lease_of(minted, "t"), mine, "t")


def test_an_empty_secret_is_refused() -> None:
    """A comma too many in the setting must not make keys that anyone can derive."""
    with pytest.raises(SettingsError, match="RFORK_PLANNER_LEASE_KEYS"):
        mint(NEW, "")


@pytest.mark.parametrize("weights_id", [WEIGHTS, None])
def test_a_token_is_what_pyjwt_would_have_made(weights_id: str | None) -> None:
    """Byte for byte, with the characters that JSON escapes."""
    minted = mint(NEW)
    names = {"fork_id": 'fork-"ä"', "source_id": "s\\1", "layout_id": LAYOUT}
    token = minted.lease(**names, weights_id=weights_id, generation=0).token
    payload = {
        "sub": names["fork_id"], "aud": names["source_id"], "exp": NOW + 30, "layout": LAYOUT,
        "weights": weights_id, "generation": 0,
    }  # fmt: skip
    assert jwt.encode(payload, decode_key(minted.keys_of("s\\1")[0]), algorithm="HS256") == token
