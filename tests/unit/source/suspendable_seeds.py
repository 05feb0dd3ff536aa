"""Seeds whose weights are suspended and resumed, and helpers that summarize what they report."""

from __future__ import annotations

import time

import torch

from rfork.image.capture import image_from_tensors
from rfork.image.chunks import MIB
from rfork.image.memory import Image, compute_manifest
from rfork.planner_client.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.settings import InstanceSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.testing.peers import InMemoryPeers
from rfork.testing.transport import InMemoryNetwork, InMemoryTransport
from rfork.transport.base import Transport

KEY = derive_key(b"s" * 32, "seed-1")
SIZE = 3 * MIB


def image_with(value: int) -> Image:
    """Return an image with memory that no other image shares; every byte is `value`."""
    return image_from_tensors({"a": torch.full((SIZE,), value, dtype=torch.uint8)})


LAYOUT_ID = image_with(0).layout.layout_id


def build_seed(*transports: Transport, seed_image: Image | None = None) -> Seed:
    image = seed_image or image_with(1)
    seed = Seed(
        image,
        InstanceIdentity("model", instance_id="seed-1"),
        InstanceSettings(node_name="node", drain_timeout_s=0),
        Connections(list(transports) or [InMemoryTransport(InMemoryNetwork())], serve_peer=InMemoryPeers().service),
        manifest=compute_manifest(image),
    )
    seed.set_lease_keys([KEY])
    return seed


def token(generation: int = 0, fork_id: str = "fork-1") -> str:
    claims = LeaseClaims(fork_id, "seed-1", LAYOUT_ID, None, generation, time.time() + 60)
    return sign(claims, decode_key(KEY))


ReportSummary = tuple[str, int, tuple[tuple[int, int], ...], str | None, tuple[str, ...]]


def report_summary(seed: Seed) -> ReportSummary:
    """Return the fields of the seed's report to the planner that suspending changes."""
    report = seed.report()
    return report.state, report.generation, report.verified, report.weights_id, report.transports


def serving_summary(generation: int, image: Image) -> ReportSummary:
    return "serving", generation, ((0, 3),), compute_manifest(image).weights_id, ("memory",)


def suspended_summary(generation: int, state: str = "loading") -> ReportSummary:
    return state, generation, (), None, ()


def open_channel(seed: Seed, generation: int, *transports: str) -> str:
    requested = list(transports) or ["memory"]
    fork_id = seed.check(token(generation))
    return seed.open_channel(fork_id, LAYOUT_ID, requested, "127.0.0.1")[1].transport
