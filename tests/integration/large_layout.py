"""Both sides of a fork of a million tensors, each in a process of its own, without a byte of weights.

``python -m tests.integration.large_layout source`` seeds an image whose memory is reserved and never
touched; with ``target ADDRESS TOKEN`` it asks that seed for all that it says. Each prints lines of JSON; the
last has the most memory that the process ever held.
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

from planner.fleet import Demand
from planner.policy import plan
from rfork.control.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.fork.schedule import Schedule
from rfork.image.board import ChunkBoard
from rfork.image.layout import Layout
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.image.specs import TensorSpec
from rfork.peer.client import PeerClient
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings, TlsSettings
from rfork.transport.http import HttpTransport
from rfork.wire import ForkProgress
from tests.unit.planner.builders import NOW, group, loading, seed

TENSORS = 1_000_000
PARTS = (("gate_proj", (256, 256)), ("up_proj", (256, 256)), ("down_proj", (256, 256)), ("scale", (128, 16)))
EXPERTS = 256
LAST = (
    f"model.layers.{(TENSORS - 1) // (EXPERTS * len(PARTS))}.mlp.experts.{(TENSORS - 1) // 4 % EXPERTS}.scale"
)
WAIT_S = 60.0
MAP_NORESERVE = 0x4000
"""Of Linux; `mmap` has it from Python 3.13 on."""


def layout_of(last_dtype: str = "bfloat16") -> Layout:
    """A mixture of experts of 100 GB in a million tensors, the last of this type (of two bytes)."""
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
    """A manifest of bytes that are nowhere."""
    numbers = range(len(layout.chunks))
    return Manifest(
        layout, tuple(hashlib.blake2b(b"%d" % number, digest_size=16).digest() for number in numbers)
    )


def reserved(size: int) -> torch.Tensor:
    """Memory that has addresses, and takes none as long as it is not touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)


def tell(**said: str | int | None) -> None:
    """One line of JSON."""
    print(json.dumps(said), flush=True)


def tell_cost() -> None:
    """The peak of this process's memory, and its processor time."""
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"VmHWM:\s+([0-9]+) kB", status)
    tell(peak_bytes=int(peak.group(1)) * 1024 if peak else None, cpu_ms=round(time.process_time() * 1000))


def source() -> None:
    """Seed it until standard input ends."""
    layout = layout_of()
    image = Image(layout, [reserved(layout.image_bytes)])
    settings = Settings(drain_s=0)
    identity = Identity("moe")
    giving = Seed(image, identity, settings, [HttpTransport(settings)], manifest=manifest_of(layout))
    key = derive_key(b"s" * 32, identity.instance_id)
    giving.learn_keys([key])
    claims = LeaseClaims("fork-1", identity.instance_id, layout.layout_id, None, 0, time.time() + WAIT_S)
    with giving:
        report = giving.report()
        tell(
            address=report.address,
            token=sign(claims, decode_key(key)),
            report_bytes=len(report.model_dump_json()),
            chunks=report.chunk_count,
            segments=len(image.segments(0, layout.image_bytes)),
        )
        sys.stdin.read()
    tell_cost()


def target(address: str, token: str) -> None:
    """Compare layouts, plan, open a channel, and go through the books of a fork chunk by chunk."""
    built = layout_of("float16")
    peer = PeerClient(address, lambda: token, TlsSettings())
    until = time.monotonic() + WAIT_S
    other = peer.full_manifest(until).layout
    difference = built.first_difference(other)
    differs = built.layout_id != other.layout_id

    own = other  # from here on as if it had been built as the source's
    manifest = peer.manifest(own, until)
    count = len(own.chunks)
    wanted = loading("target", layout_id=own.layout_id, chunk_count=count)
    held = seed("seed", layout_id=own.layout_id, chunk_count=count, verified=((0, count),))
    decision = plan(group(held, wanted), [Demand("fork-1", wanted)], NOW)["fork-1"]
    schedule, board = Schedule(count), ChunkBoard(own.chunks)
    schedule.adopt({each.source_id: each.chunks for each in decision.assignments})
    channel_id, _ = peer.open(own.layout_id, ("http",), until)
    news = next(iter(peer.watch(channel_id, WAIT_S)))
    schedule.offer("seed", news.chunks)
    progress_bytes = 0
    while (read := schedule.take()) is not None:
        board.mark(read.chunk, manifest.digests[read.chunk])
        schedule.verified(read)
        progress = ForkProgress(verified=board.verified, bytes_read=0, bytes_per_s=0.0, sources={})
        progress_bytes = max(progress_bytes, len(progress.model_dump_json()))
    peer.close()
    tell(
        difference=difference,
        differs=str(differs),
        verified=len(board),
        progress_bytes=progress_bytes,
    )
    tell_cost()


if __name__ == "__main__":
    if sys.argv[1] == "source":
        source()
    else:
        target(*sys.argv[2:])
