"""Tokens and clients of a real seed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rfork.control.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.image.ranges import Range
from rfork.peer.base import Progress
from rfork.peer.client import PeerClient
from rfork.seed.seed import Seed
from rfork.settings import TlsSettings

KEY = derive_key(b"s" * 32, "seed-1")
SOON_S = 30.0
StartSeed = Callable[..., Seed]


def token(seed: Seed, fork_id: str = "fork-1", *, lives_s: float = 60.0, key: str = KEY) -> str:
    claims = LeaseClaims(
        fork_id, "seed-1", seed.image.layout.layout_id, None, seed.generation, time.time() + lives_s
    )
    return sign(claims, decode_key(key))


def client(seed: Seed, shown: str | None = None, tls: TlsSettings | None = None) -> PeerClient:
    shown = token(seed) if shown is None else shown
    return PeerClient(seed.report().address, lambda: shown, tls or TlsSettings())


def soon() -> float:
    return time.monotonic() + SOON_S


def opened(seed: Seed, peer: PeerClient) -> str:
    return peer.open(seed.image.layout.layout_id, ("memory",), soon())[0]


def chunks_of(news: Iterator[Progress]) -> tuple[Range, ...]:
    """The next chunks, past any keep-alives."""
    return next(progress.chunks for progress in news if progress.chunks)
