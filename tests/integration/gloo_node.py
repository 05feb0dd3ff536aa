"""A process that serves or reads over gloo, for tests: ``python -m tests.integration.gloo_node seed|read …``.

Each event is one line on standard output. A seed lives until its standard input ends, and so does a reader
with an exit mode. Both then close what they opened, or exit in another way: see `exit_abruptly`.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time

from rfork.image.memory import Image, compute_manifest
from rfork.peer.client import PeerClient
from rfork.planner_client.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.settings import InstanceSettings, TlsSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.transport.base import Reader
from rfork.transport.collective import gloo_transport
from tests.transport_contract import content, image_of

KEY = derive_key(b"s" * 32, "seed-1")
SIZES = (24 << 20, 5, 4096, *(1000 + index for index in range(300)), 9 << 20)
SLOW = 16 << 20
"""Bytes per second: the image needs two seconds."""


def start_seed(rate: int | None = None, stall_s: float = 10.0) -> Seed:
    """Return a started seed of an image of `SIZES`."""
    image = image_of(SIZES, seed=1)
    settings = InstanceSettings(max_egress_bytes_per_s=rate, source_idle_timeout_s=stall_s)
    identity = InstanceIdentity("model", instance_id="seed-1")
    connections = Connections([gloo_transport(settings)])
    seed = Seed(image, identity, settings, connections, manifest=compute_manifest(image))
    seed.set_lease_keys([KEY])
    return seed.start()


def create_token(image: Image, fork_id: str) -> str:
    """Return a lease on the seed for a minute."""
    claims = LeaseClaims(fork_id, "seed-1", image.layout.layout_id, None, 0, time.time() + 60)
    return sign(claims, decode_key(KEY))


def open_reader(address: str, image: Image, fork_id: str, stall_s: float = 10.0) -> tuple[PeerClient, str, Reader]:
    """Return a reader of the seed at `address`, its channel, and the client that owns it."""
    token = create_token(image, fork_id)
    peer = PeerClient(address, lambda: token, TlsSettings())
    deadline = time.monotonic() + 30
    channel_id, endpoint = peer.open(image.layout.layout_id, ("gloo",), deadline)
    reader = gloo_transport(InstanceSettings(source_idle_timeout_s=stall_s)).connect(
        endpoint, image, lambda: token, deadline, lambda: peer.open_control_stream(channel_id)
    )
    return peer, channel_id, reader


def print_event(word: str) -> None:
    """Print an event."""
    print(word, flush=True)


def exit_abruptly(exit_mode: str) -> None:
    """End this process without closing anything; for `return` the caller returns."""
    if exit_mode == "exit":
        sys.exit(3)
    if exit_mode == "raise":
        raise RuntimeError("a bug in the engine")


def run_seed(rate: str, exit_mode: str = "") -> None:
    """Serve until standard input ends."""
    seed = start_seed(int(rate) or None)
    print_event(seed.report().address)
    sys.stdin.read()
    if exit_mode:
        exit_abruptly(exit_mode)
    else:
        seed.close()


def run_reader(address: str, fork_id: str, exit_mode: str = "") -> None:
    """Read the first chunk, then the image; with `exit_mode`, exit in the middle of it."""
    image = image_of(SIZES)
    peer, _, reader = open_reader(address, image, fork_id)
    print_event("connected")
    reader.read(*image.layout.chunks[0], time.monotonic() + 60)
    print_event("chunk")
    size = image.layout.image_bytes
    if exit_mode:
        threading.Thread(target=reader.read, args=(0, size, time.monotonic() + 60), daemon=True).start()
        sys.stdin.read()
        exit_abruptly(exit_mode)
        return
    reader.read(0, size, time.monotonic() + 60)
    print_event(hashlib.sha256(content(image)).hexdigest())
    reader.close()
    peer.close()


def main(arguments: list[str]) -> None:
    """Serve or read."""
    if arguments[0] == "seed":
        run_seed(*arguments[1:])
    else:
        run_reader(*arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
