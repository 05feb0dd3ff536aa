"""Lease tokens, signed by the planner and verified by the source that they name.

A token is a JWT (RFC 7519) under HMAC-SHA256 with a key that belongs to *one* source: the planner derives it
from its secret (the expand step of HKDF, RFC 5869, with one block) and sends it to the source in each
heartbeat response. A source can therefore verify its tokens, and a compromised source cannot create tokens
for others.

`derive_key` and `sign` run in the planner, `verify` in the source. Both are written for the one form of token that
there is: importing PyJWT takes 50 ms, since it imports cryptography.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import time
from collections.abc import Iterable
from typing import Final, NamedTuple

from rfork.errors import LeaseRejected

INFO: Final = b"rfork/lease/v1:"
HEADER: Final = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').rstrip(b"=") + b"."
MAX_LEASE_S: Final = 86_400.0
"""Maximum remaining lifetime of a lease: limits the damage of a leaked key."""

KEYS_TIMEOUT_S: Final = 4.0
"""Maximum time for which a source that has not received keys yet waits for them before it rejects a lease: a target may
be sent to it before the source has the response to its own first report.
"""
MAX_TIME: Final = 2**53
"""Largest integer that a float represents exactly; JSON also allows larger numbers, infinity and NaN."""

URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")
_quoted: Final = json.encoder.encode_basestring_ascii


class LeaseClaims(NamedTuple):
    """The content of a token: `fork_id` may read this image from `source_id` until `expires_at`."""

    fork_id: str
    source_id: str
    layout_id: str
    weights_id: str | None
    """None if the source, a relay, did not know it yet when the lease was created."""
    generation: int
    expires_at: float
    """Unix time in seconds."""


def derive_key(secret: bytes, instance_id: str, owner: str = "") -> str:
    """Return the key of an instance, base64url, as sent in `InstanceAck.lease_keys`.

    `owner`: owner of the record (`rfork.planner_client.ownership`), or empty. Different owners get different keys.
    """
    # Ids contain no zero byte, so different pairs of id and owner have different encodings.
    info = INFO + instance_id.encode() + (b"\0" + owner.encode() if owner else b"")
    # The trailing 1 is HKDF's block counter.
    block = hmac.digest(secret, info + b"\x01", hashlib.sha256)
    return base64.urlsafe_b64encode(block).decode()


def decode_key(lease_key: str) -> bytes:
    """Decode one of `InstanceAck.lease_keys`. Raises LeaseRejected if it is not base64url."""
    try:
        return base64.b64decode(lease_key, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise LeaseRejected(f"the planner's lease key is not base64url: {error}") from None


def sign(claims: LeaseClaims, key: bytes) -> str:
    """Return a token with these claims, signed with the key of its source.

    Returns the same bytes as PyJWT's `jwt.encode` in a fraction of the time: a planner signs thousands per second.
    """
    weights = "null" if claims.weights_id is None else _quoted(claims.weights_id)
    payload = (
        f'{{"sub":{_quoted(claims.fork_id)},"aud":{_quoted(claims.source_id)},"exp":{claims.expires_at!r},'
        f'"layout":{_quoted(claims.layout_id)},"weights":{weights},"generation":{claims.generation}}}'
    )
    signed = HEADER + _base64url(payload.encode())
    return (signed + b"." + _base64url(hmac.digest(key, signed, "sha256"))).decode()


def verify(
    token: str,
    keys: bytes | Iterable[bytes],
    *,
    source_id: str,
    leeway_s: float = 0.0,
    now: float | None = None,
) -> LeaseClaims:
    """Return the claims of a token for `source_id` that one of `keys` signed and that has not expired.

    There are several keys while a restarted planner distributes a new one. `leeway_s` allows for clock
    differences; `now` is Unix time in seconds, by default of this machine.

    Raises LeaseRejected with the reason: malformed, forged, for another source, expired, or too long.
    """
    claims = _claims(_signed_payload(token, (keys,) if isinstance(keys, bytes) else keys))
    if not hmac.compare_digest(claims.source_id.encode(), source_id.encode()):
        raise LeaseRejected(f"the lease is for another source: {claims.source_id}, this is {source_id}")
    late = (time.time() if now is None else now) - claims.expires_at
    if late < -MAX_LEASE_S:
        raise LeaseRejected(f"the lease would be valid for longer than {MAX_LEASE_S:g} s")
    if late >= leeway_s:
        raise LeaseRejected(f"the lease expired {late:.1f} s ago", hint="request a new plan from the planner")
    return claims


def _base64url(data: bytes) -> bytes:
    """Encode without padding, as in a JWT (RFC 7515, section 2)."""
    return binascii.b2a_base64(data, newline=False).translate(URL_SAFE).rstrip(b"=")


def _signed_payload(token: str, keys: Iterable[bytes]) -> object:
    """Return the content of a token that one of the keys signed. Raises LeaseRejected."""
    signed, _, signature = token.encode(errors="replace").rpartition(b".")
    if not signed.startswith(HEADER):
        raise LeaseRejected("the lease is malformed: it is not a JWT signed with HS256")
    signatures = (_base64url(hmac.digest(key, signed, hashlib.sha256)) for key in keys)
    if not any(hmac.compare_digest(signature, expected) for expected in signatures):
        raise LeaseRejected("the lease is forged, or older than the planner: no known key signed it")
    payload = signed.removeprefix(HEADER)
    try:
        return json.loads(base64.urlsafe_b64decode(payload + b"=" * (-len(payload) % 4)))
    except (RecursionError, ValueError) as error:
        raise LeaseRejected(f"the lease is malformed: {type(error).__name__}") from None


def _claims(payload: object) -> LeaseClaims:
    """Check the type of each claim: a signature proves the author, not the format."""
    match payload:
        case {
            "sub": str(fork_id),
            "aud": str(source_id),
            "exp": float() | int() as expires_at,
            "layout": str(layout_id),
            "generation": int(generation),
            **others,
        } if isinstance(weights_id := others.get("weights"), str | None) and abs(expires_at) < MAX_TIME:
            pass
        case _:
            raise LeaseRejected("the lease is malformed: a claim has the wrong type, or is out of range")
    return LeaseClaims(
        fork_id=fork_id,
        source_id=source_id,
        layout_id=layout_id,
        weights_id=weights_id,
        generation=generation,
        expires_at=float(expires_at),
    )
