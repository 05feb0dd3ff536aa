"""Both sides of a fork of a million tensors, each in its own process, without any weight bytes.

``python -m tests.integration.large_layout source`` seeds an image whose memory is reserved but never touched.
With ``target ADDRESS TOKEN`` it reads everything that the seed's peer service serves. Each prints lines of
JSON; the last line contains the process's peak memory.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from planner.policy.group_plan import plan
from planner.policy.types import ForkDemand
from rfork.image.chunks import ChunkState
from rfork.image.layout import Layout, Manifest, TensorSpec
from rfork.image.memory import Image
from rfork.peer.client import PeerClient
from rfork.planner_client.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.receiver.chunk_scheduler import ChunkScheduler
from rfork.schema import ForkProgress
from rfork.settings import InstanceSettings, TlsSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.transport.http import HttpTransport
from tests.unit.planner.builders import NOW, group, loading, seed

TENSORS = 1_000_000
PARTS = (("gate_proj", (256, 256)), ("up_proj", (256, 256)), ("down_proj", (256, 256)), ("scale", (128, 16)))
EXPERTS = 256
LAST_TENSOR = f"model.layers.{(TENSORS - 1) // (EXPERTS * len(PARTS))}.mlp.experts.{(TENSORS - 1) // 4 % EXPERTS}.scale"
WAIT_S = 60.0
MAP_NORESERVE = 0x4000
"""Linux only; `mmap` defines it from Python 3.13."""


def layout_of(last_dtype: str = "bfloat16") -> Layout:
    """Return a 100 GB mixture-of-experts layout of a million tensors; the last tensor has `last_dtype` (two
    bytes wide).
    """
    end = 0

    def specs() -> Iterator[TensorSpec]:
        nonlocal end
        for number in range(TENSORS):
            expert, part = divmod(number, len(PARTS))
            layer, expert = divmod(expert, EXPERTS)
            name, shape = PARTS[part]
            dtype = last_dtype if number == TENSORS - 1 else "bfloat16"
            name = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
            yield TensorSpec(name, dtype, shape, (shape[1], 1), end)
            end += 2 * shape[0] * shape[1]

    found = Layout(specs(), 0)
    return Layout(found.tensors, end)


def manifest_of(layout: Layout) -> Manifest:
    """Return a manifest of bytes that do not exist."""
    numbers = range(len(layout.chunks))
    return Manifest(layout, tuple(hashlib.blake2b(b"%d" % number, digest_size=16).digest() for number in numbers))


def reserve_memory(size: int) -> torch.Tensor:
    """Reserve address space that uses no memory until it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)


def print_json(**fields: str | int | None) -> None:
    """Print one line of JSON."""
    print(json.dumps(fields), flush=True)


def print_cost() -> None:
    """Print this process's peak memory and its CPU time."""
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"VmHWM:\s+([0-9]+) kB", status)
    print_json(peak_bytes=int(peak.group(1)) * 1024 if peak else None, cpu_ms=round(time.process_time() * 1000))


def source() -> None:
    """Serve the image until standard input is closed."""
    layout = layout_of()
    image = Image(layout, [reserve_memory(layout.image_bytes)])
    settings = InstanceSettings(drain_timeout_s=0)
    identity = InstanceIdentity("moe")
    served_seed = Seed(image, identity, settings, Connections([HttpTransport(settings)]), manifest=manifest_of(layout))
    key = derive_key(b"s" * 32, identity.instance_id)
    served_seed.set_lease_keys([key])
    claims = LeaseClaims("fork-1", identity.instance_id, layout.layout_id, None, 0, time.time() + WAIT_S)
    with served_seed:
        report = served_seed.report()
        print_json(
            address=report.address,
            token=sign(claims, decode_key(key)),
            report_bytes=len(report.model_dump_json()),
            chunks=report.chunk_count,
            segments=len(image.segments(0, layout.image_bytes)),
        )
        sys.stdin.read()
    print_cost()


def target(address: str, token: str) -> None:
    """Compare layouts, plan, open a channel and run a fork's bookkeeping chunk by chunk."""
    built = layout_of("float16")
    peer = PeerClient(address, lambda: token, TlsSettings())
    until = time.monotonic() + WAIT_S
    other = peer.full_manifest(until).layout
    difference = built.first_difference(other)
    differs = built.layout_id != other.layout_id

    own = other  # from here on as if built with the source's dtype
    manifest = peer.manifest(own, until)
    count = len(own.chunks)
    target_instance = loading("target", layout_id=own.layout_id, chunk_count=count)
    source_instance = seed("seed", layout_id=own.layout_id, chunk_count=count, verified=((0, count),))
    decision = plan(group(source_instance, target_instance), [ForkDemand("fork-1", target_instance)], NOW)["fork-1"]
    schedule, board = ChunkScheduler(count), ChunkState(own.chunks)
    schedule.assign({each.source_id: each.chunks for each in decision.assignments})
    channel_id, _ = peer.open(own.layout_id, ("http",), until)
    first_update = next(iter(peer.watch(channel_id, WAIT_S)))
    schedule.mark_available("seed", first_update.chunks)
    progress_bytes = 0
    while (read := schedule.next_read()) is not None:
        board.mark_verified(read.chunk, manifest.digests[read.chunk])
        schedule.verified(read)
        progress = ForkProgress(verified=board.verified, bytes_read=0, bytes_per_s=0.0, sources={})
        progress_bytes = max(progress_bytes, len(progress.model_dump_json()))
    peer.close()
    print_json(
        difference=difference,
        differs=str(differs),
        verified=len(board),
        progress_bytes=progress_bytes,
    )
    print_cost()


if __name__ == "__main__":
    if sys.argv[1] == "source":
        source()
    else:
        target(*sys.argv[2:])
