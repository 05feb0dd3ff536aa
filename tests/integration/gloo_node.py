"""A process that gives or reads over gloo, for tests: ``python -m tests.integration.gloo_node seed|read …``.

Each event is one line on standard output. A seed lives until its standard input ends; so does a reader that
is to leave. Both then close what they have opened, or leave in another way: see `leave`.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time

from rfork.control.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.image.memory import Image
from rfork.peer.client import PeerClient
from rfork.seed.holding import seal
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings, TlsSettings
from rfork.transport.base import Reader
from rfork.transport.collective import GlooTransport
from tests.transport_contract import content, image_of

KEY = derive_key(b"s" * 32, "seed-1")
SIZES = (24 << 20, 5, 4096, *(1000 + index for index in range(300)), 9 << 20)
SLOW = 16 << 20
"""Bytes a second: the image takes two seconds."""


def a_seed(rate: int | None = None, stall_s: float = 10.0) -> Seed:
    """A started seed of an image of `SIZES`."""
    image = image_of(SIZES, seed=1)
    settings = Settings(egress_rate=rate, stall_s=stall_s)
    identity = Identity("model", instance_id="seed-1")
    seed = Seed(image, identity, settings, [GlooTransport(settings)], manifest=seal(image))
    seed.learn_keys([KEY])
    return seed.start()


def a_token(image: Image, fork_id: str) -> str:
    """A lease on the seed for a minute."""
    claims = LeaseClaims(fork_id, "seed-1", image.layout.layout_id, None, 0, time.time() + 60)
    return sign(claims, decode_key(KEY))


def a_reader(
    address: str, image: Image, fork_id: str, stall_s: float = 10.0
) -> tuple[PeerClient, str, Reader]:
    """A reader of the seed at `address`, its channel, and the client that holds it."""
    shown = a_token(image, fork_id)
    peer = PeerClient(address, lambda: shown, TlsSettings())
    deadline = time.monotonic() + 30
    channel_id, endpoint = peer.open(image.layout.layout_id, ("gloo",), deadline)
    reader = GlooTransport(Settings(stall_s=stall_s)).connect(
        endpoint, image, lambda: shown, deadline, lambda: peer.talk(channel_id)
    )
    return peer, channel_id, reader


def say(word: str) -> None:
    """One event."""
    print(word, flush=True)


def leave(how: str) -> None:
    """End this process without closing anything; `return` is for the caller to do."""
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise RuntimeError("a bug in the engine")


def give(rate: str, how: str = "") -> None:
    """Seed until standard input ends."""
    seed = a_seed(int(rate) or None)
    say(seed.report().address)
    sys.stdin.read()
    if how:
        leave(how)
    else:
        seed.close()


def take(address: str, fork_id: str, how: str = "") -> None:
    """Read the first chunk, then the image; with `how`, leave in the midst of that."""
    image = image_of(SIZES)
    peer, _, reader = a_reader(address, image, fork_id)
    say("connected")
    reader.read(*image.layout.chunks[0], time.monotonic() + 60)
    say("chunk")
    size = image.layout.image_bytes
    if how:
        threading.Thread(target=reader.read, args=(0, size, time.monotonic() + 60), daemon=True).start()
        sys.stdin.read()
        leave(how)
        return
    reader.read(0, size, time.monotonic() + 60)
    say(hashlib.sha256(content(image)).hexdigest())
    reader.close()
    peer.close()


def main(arguments: list[str]) -> None:
    """Give or read."""
    if arguments[0] == "seed":
        give(*arguments[1:])
    else:
        take(*arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
