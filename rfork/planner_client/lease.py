"""Lease tokens: the planner signs them, the source they name checks them.

A token is a JWT (RFC 7519) under HMAC-SHA256 with a key that belongs to *one* source: the planner
derives it from its own secret (the expand step of HKDF, RFC 5869, with one block) and hands it to the
source in each heartbeat's answer. So a source can check the tokens shown to it, and a source that was
broken into can mint none for others.

`derive_key` and `sign` run in the planner, `verify` in the source.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import jwt

from rfork.errors import LeaseRejected

ALGORITHM: Final = "HS256"
INFO: Final = b"rfork/lease/v1:"
HEADER: Final = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').rstrip(b"=") + b"."
REQUIRED: Final = ["sub", "aud", "exp", "layout", "generation"]
MAX_LEASE_S: Final = 86_400.0
"""Longest that a lease may still last: a key that leaked signs nothing for longer."""

MAX_TIME: Final = 2**53
"""Seconds: what a float holds exactly; JSON spells larger numbers, infinity and NaN, too."""

_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True)
class LeaseClaims:
    """What one token grants: `fork_id` may read this image from `source_id` until `certificate_expires_at`."""

    fork_id: str
    source_id: str
    layout_id: str
    weights_id: str | None
    """None where the source, a relay, had not yet learnt it when the lease was given."""
    generation: int
    expires_at: float
    """Unix time in seconds."""


def derive_key(secret: bytes, instance_id: str, owner: str = "") -> str:
    """The key of one instance, base64url: one of those that `InstanceAck.lease_keys` carries.

    `owner`: of its record (`rfork.planner_client.ownership`); empty: it has none. Another owner gets another key.
    """
    # An id has no zero byte, so no two pairs of id and owner are spelt alike.
    info = INFO + instance_id.encode() + (b"\0" + owner.encode() if owner else b"")
    # The trailing 1 is HKDF's block counter.
    block = hmac.digest(secret, info + b"\x01", hashlib.sha256)
    return base64.urlsafe_b64encode(block).decode()


def decode_key(lease_key: str) -> bytes:
    """The bytes of one of `InstanceAck.lease_keys`. Raises LeaseRejected where it is not base64url."""
    try:
        return base64.b64decode(lease_key, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise LeaseRejected(f"the planner's lease key is not base64url: {error}") from None


def sign(claims: LeaseClaims, key: bytes) -> str:
    """The token that grants `claims`, under the key of the source it names.

    The same bytes as `jwt.encode` gives, in a third of its time: a planner signs thousands a second.
    """
    payload = {
        "sub": claims.fork_id,
        "aud": claims.source_id,
        "exp": claims.expires_at,
        "layout": claims.layout_id,
        "weights": claims.weights_id,
        "generation": claims.generation,
    }
    signed = HEADER + _base64url(_ENCODER.encode(payload).encode())
    return (signed + b"." + _base64url(hmac.digest(key, signed, hashlib.sha256))).decode()


def verify(
    token: str,
    keys: bytes | Iterable[bytes],
    *,
    source_id: str,
    leeway_s: float = 0.0,
    now: float | None = None,
) -> LeaseClaims:
    """The claims of a token that one of `keys` signed for `source_id` and that is not over.

    Several keys are given while a planner that restarted hands out a new one. `leeway_s` allows for
    clocks that differ; `now` is Unix time in seconds, this machine's clock where it is None.

    Raises LeaseRejected, saying which of these it is: malformed, forged, for another source, expired,
    or too long.
    """
    for key in (keys,) if isinstance(keys, bytes) else tuple(keys):
        try:
            payload = jwt.decode(
                token,
                key,
                algorithms=[ALGORITHM],
                # Audience and expiry are checked below, so that each refusal has its own words.
                options={
                    "require": REQUIRED,
                    "verify_aud": False,
                    "verify_exp": False,
                    "verify_iat": False,
                    "verify_nbf": False,
                },
            )
        except jwt.InvalidSignatureError:
            continue
        except jwt.PyJWTError as error:
            raise LeaseRejected(f"the lease is malformed: {error}") from None
        except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
            # What the library's parsers raise of input that was made for that.
            raise LeaseRejected(f"the lease is malformed: {type(error).__name__}") from None
        claims = _claims(payload)
        break
    else:
        raise LeaseRejected("the lease is forged, or older than the planner: no known key signed it")
    if not hmac.compare_digest(claims.source_id.encode(), source_id.encode()):
        raise LeaseRejected(f"the lease is for another source: {claims.source_id}, this is {source_id}")
    late = (time.time() if now is None else now) - claims.expires_at
    if late < -MAX_LEASE_S:
        raise LeaseRejected(f"the lease would last for longer than {MAX_LEASE_S:g} s")
    if late >= leeway_s:
        raise LeaseRejected(f"the lease is expired since {late:.1f} s", hint="ask the planner for a new plan")
    return claims


def _base64url(data: bytes) -> bytes:
    """Without padding, as in a JWT (RFC 7515, section 2)."""
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _claims(payload: dict[str, str | float | int | None]) -> LeaseClaims:
    """Check each claim's type: a signature says who wrote a claim, not that it is well formed."""
    match payload:
        case {
            "sub": str(fork_id),
            "aud": str(source_id),
            "exp": float() | int() as expires_at,
            "layout": str(layout_id),
            "generation": int(generation),
        } if isinstance(payload.get("weights"), str | None) and abs(expires_at) < MAX_TIME:
            weights_id = payload.get("weights")
        case _:
            raise LeaseRejected("the lease is malformed: a claim has another type, or a value out of bounds")
    return LeaseClaims(
        fork_id=fork_id,
        source_id=source_id,
        layout_id=layout_id,
        weights_id=None if weights_id is None else str(weights_id),
        generation=generation,
        expires_at=float(expires_at),
    )
