"""Invalid and expired tokens, over both access paths."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest

from rfork.peer.v1 import peer_pb2
from rfork.planner_client.lease import derive_key
from tests.integration.bad_peer.attacked_seed import (
    AttackedSeed,
    bearer,
    http_get,
    open_connection,
    receive_all,
)
from tests.integration.bad_peer_node import SEED_ID, ForgedLease


def jwt(header: str, payload: str) -> str:
    """Return a token of these two parts with an empty signature."""
    parts = (base64.urlsafe_b64encode(part.encode()).rstrip(b"=").decode() for part in (header, payload))
    return ".".join([*parts, ""])


def with_other_fork(token: str) -> str:
    """Return the token with another fork id under the old signature."""
    header, payload, signature = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    changed = base64.urlsafe_b64encode(json.dumps({**claims, "sub": "good"}).encode()).rstrip(b"=").decode()
    return ".".join([header, changed, signature])


def claims_of(lease: ForgedLease) -> str:
    payload = lease.token.split(".")[1]
    return base64.urlsafe_b64decode(payload + "==").decode()


TOKENS: dict[str, Callable[[ForgedLease], str]] = {
    "none": lambda lease: "",
    "expired": lambda lease: replace(lease, lifetime_s=-1.0).token,
    "for another source": lambda lease: replace(lease, source_id="seed-2").token,
    "of another layout": lambda lease: replace(lease, layout_id="f" * 32).token,
    "for longer than a day": lambda lease: replace(lease, lifetime_s=10 * 365 * 86_400.0).token,
    "for other weights": lambda lease: replace(lease, weights_id="f" * 32).token,
    "of another generation": lambda lease: replace(lease, generation=7).token,
    "signed by another key": lambda lease: replace(lease, key=derive_key(b"x" * 32, SEED_ID)).token,
    "signed for another source's key": lambda lease: replace(lease, key=derive_key(b"s" * 32, "x")).token,
    "edited": lambda lease: with_other_fork(lease.token),
    "cut": lambda lease: lease.token[:-1],
    "without a signature": lambda lease: jwt('{"alg":"none","typ":"JWT"}', claims_of(lease)),
    "with an empty signature": lambda lease: jwt('{"alg":"HS256","typ":"JWT"}', claims_of(lease)),
    "nested": lambda lease: jwt("[" * 5000, claims_of(lease)),
    "a null payload": lambda lease: jwt("null", "null"),
    "not base64": lambda lease: "!!.??.!!",
    "only dots": lambda lease: "." * 5000,
}


@pytest.mark.parametrize("token", TOKENS)
def test_invalid_tokens(attacked_seed: AttackedSeed, token: str) -> None:
    """An invalid token gets no byte, manifest or channel over either access path."""
    token_text = TOKENS[token](attacked_seed.lease)
    with contextlib.ExitStack() as stack, open_connection(attacked_seed.http_port) as connection:
        connection.sendall(http_get(token_text, "Connection: close\r\n"))
        status = receive_all(connection)[9:12]
        request = peer_pb2.OpenChannelRequest(layout_id=attacked_seed.layout_id, transports=["http"])
        with pytest.raises(grpc.RpcError) as refused:
            attacked_seed.stub(stack).OpenChannel(request, metadata=bearer(token_text), timeout=30)
    changed = token in ("of another generation", "for other weights")
    expected = (b"410", grpc.StatusCode.ABORTED) if changed else None
    expected = expected or (b"401" if not token_text else b"403", grpc.StatusCode.PERMISSION_DENIED)
    assert expected == (status, refused.value.code())


@pytest.mark.slow  # logic: tests/unit/source/test_leases.py
def test_an_expired_token_is_refused(attacked_seed: AttackedSeed) -> None:
    """A token that has expired is refused when it is used again, and its channel is closed."""
    lease = replace(attacked_seed.lease, fork_id="brief", lifetime_s=6.0)
    token_text = lease.token
    request = peer_pb2.OpenChannelRequest(layout_id=attacked_seed.layout_id, transports=["http"])
    with contextlib.ExitStack() as stack:
        stub = attacked_seed.stub(stack)
        channel = stub.OpenChannel(request, metadata=bearer(token_text), timeout=30).channel_id
        watch = peer_pb2.WatchProgressRequest(channel_id=channel, keep_alive_ms=60_000)
        progress = list(stub.WatchProgress(watch, metadata=bearer(token_text), timeout=60))
        with pytest.raises(grpc.RpcError) as refused:
            stub.OpenChannel(request, metadata=bearer(token_text), timeout=30)
    assert 1 == len(progress)
    assert grpc.StatusCode.PERMISSION_DENIED == refused.value.code()
