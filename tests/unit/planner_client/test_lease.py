"""Lease tokens: keys, claims, and the tokens that are rejected."""

from __future__ import annotations

import base64

import jwt
import pytest

from rfork.errors import LeaseRejected
from rfork.planner_client.lease import LeaseClaims, decode_key, derive_key, sign, verify

SECRET = b"a secret of the planner's own, long enough"
KEY = decode_key(derive_key(SECRET, "s"))
OTHER_KEY = decode_key(derive_key(SECRET, "other"))
CLAIMS = LeaseClaims("f", "s", "a" * 32, None, 4, expires_at=1000.5)
PAYLOAD = {"sub": "f", "aud": "s", "exp": 1000.5, "layout": "a", "weights": None, "generation": 4}


def test_a_token_contains_its_claims() -> None:
    """The verified claims equal the signed ones."""
    claims = [CLAIMS, CLAIMS._replace(weights_id="b" * 32)]
    assert claims == [verify(sign(each, KEY), KEY, source_id="s", now=1000.0) for each in claims]


def test_any_of_several_keys_is_accepted() -> None:
    """A restarted planner distributes a new key while old leases are still in use."""
    assert CLAIMS == verify(sign(CLAIMS, KEY), (OTHER_KEY, KEY), source_id="s", now=0)


def test_leeway_allows_for_clock_differences() -> None:
    """A token is valid until its expiry plus the leeway."""
    assert CLAIMS == verify(sign(CLAIMS, KEY), KEY, source_id="s", leeway_s=2, now=1002.4)


def _part(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()


REFUSALS = [
    (sign(CLAIMS, KEY), 1000.5, "expired"),
    (sign(CLAIMS, OTHER_KEY), 0.0, "forged"),
    (sign(CLAIMS._replace(source_id="other"), KEY), 0.0, "for another source: other, this is s"),
    ("", 0.0, "malformed"),
    ("not.a.token", 0.0, "malformed"),
    (jwt.encode(PAYLOAD, "", algorithm="none"), 0.0, "malformed"),
    (jwt.encode({**PAYLOAD, "generation": "4"}, KEY, algorithm="HS256"), 0.0, "malformed"),
    (jwt.encode({**PAYLOAD, "weights": 1}, KEY, algorithm="HS256"), 0.0, "malformed"),
    (jwt.encode({"sub": "f", "aud": "s"}, KEY, algorithm="HS256"), 0.0, "malformed"),
    (jwt.encode(PAYLOAD, KEY + KEY, algorithm="HS512"), 0.0, "malformed"),
    (jwt.encode({**PAYLOAD, "exp": 10**400}, KEY, algorithm="HS256"), 0.0, "malformed"),
    (jwt.encode({**PAYLOAD, "exp": float("inf")}, KEY, algorithm="HS256"), 0.0, "malformed"),
    (jwt.encode({**PAYLOAD, "exp": float("nan")}, KEY, algorithm="HS256"), 0.0, "malformed"),
    (jwt.encode({**PAYLOAD, "exp": 10 * 365 * 86_400}, KEY, algorithm="HS256"), 0.0, "longer than"),
    (".".join([_part("[" * 5000), _part("{}"), ""]), 0.0, "malformed"),
    (".".join([_part('{"alg":[],"typ":"JWT"}'), _part("{}"), ""]), 0.0, "malformed"),
]


@pytest.mark.parametrize(("token", "now", "reason"), REFUSALS)
def test_an_invalid_token_is_rejected_with_the_reason(token: str, now: float, reason: str) -> None:
    """Expired, forged, misdirected and malformed tokens have different messages."""
    with pytest.raises(LeaseRejected, match=reason):
        verify(token, KEY, source_id="s", now=now)


def test_without_keys_all_tokens_are_rejected() -> None:
    """An instance that has not reached its planner rejects all leases."""
    with pytest.raises(LeaseRejected, match="forged"):
        verify(sign(CLAIMS, KEY), (), source_id="s", now=0)


def test_each_instance_has_its_own_key_of_256_bits() -> None:
    """The key depends only on the secret and the instance."""
    keys = [derive_key(SECRET, "s"), derive_key(SECRET, "t"), derive_key(b"other", "s")]
    assert 3 == len(set(keys))
    assert {32} == {len(decode_key(key)) for key in keys}
    assert keys[0] == derive_key(SECRET, "s")


def test_an_invalid_key_is_rejected() -> None:
    """A key that is not base64url is an error."""
    with pytest.raises(LeaseRejected, match="not base64url"):
        decode_key("!!!")
