"""Tokens and clients of a real seed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rfork.image.ranges import Range
from rfork.peer.base import Progress
from rfork.peer.client import PeerClient
from rfork.planner_client.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.settings import TlsSettings
from rfork.source.seed import Seed

KEY = derive_key(b"s" * 32, "seed-1")
SOON_S = 30.0
StartSeed = Callable[..., Seed]


def token(seed: Seed, fork_id: str = "fork-1", *, lifetime_s: float = 60.0, key: str = KEY) -> str:
    claims = LeaseClaims(
        fork_id, "seed-1", seed.image.layout.layout_id, None, seed.generation, time.time() + lifetime_s
    )
    return sign(claims, decode_key(key))


def client(seed: Seed, token_text: str | None = None, tls: TlsSettings | None = None) -> PeerClient:
    token_text = token(seed) if token_text is None else token_text
    return PeerClient(seed.report().address, lambda: token_text, tls or TlsSettings())


def soon() -> float:
    return time.monotonic() + SOON_S


def request_channel(seed: Seed, peer: PeerClient) -> str:
    return peer.open(seed.image.layout.layout_id, ("memory",), soon())[0]


def next_chunks(updates: Iterator[Progress]) -> tuple[Range, ...]:
    """Return the next chunks, skipping keep-alives."""
    return next(progress.chunks for progress in updates if progress.chunks)
