"""Spools left by a process that died, and forks that resume from them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.receiver.fallback import Fallback
from rfork.receiver.report import ForkReport
from rfork.receiver.spool import spool_name
from rfork.settings import InstanceSettings
from rfork.source.seed import InstanceIdentity, Seed
from rfork.storage.spool import Spool, acquire_spool
from rfork.testing.transport import FaultInjection
from tests.unit.receiver.fake_planner import FakePlanner
from tests.unit.receiver.fleet import Fleet, plan, route, settings
from tests.unit.receiver.sessions import scripted_planner, session

CHUNKS = 6
ALL = (0, CHUNKS)
IDENTITY = InstanceIdentity("org/model", instance_id="target")


class Model(torch.nn.Module):
    """A model with six chunks of weights."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        weights = torch.zeros(CHUNKS * MIB, dtype=torch.uint8)
        if seed is not None:
            weights.random_(generator=torch.Generator().manual_seed(seed))
        self.register_buffer("weights", weights)

    @property
    def bytes(self) -> bytes:
        return self.get_buffer("weights").numpy().tobytes()


def settings_with_resume_dir(folder: Path, **changed: float | int) -> InstanceSettings:
    return settings(**changed).model_copy(update={"resume_dir": folder})


def write_spool(folder: Path, source_image: Image, chunks: Sequence[int]) -> Path:
    """Write the spool that a process leaves if it dies with these chunks of an image, and return its path."""
    spool = acquire_spool(folder, spool_name(IDENTITY), source_image.layout)
    for chunk in chunks:
        begin, end = source_image.layout.chunks[chunk]
        with source_image.readable(begin, end) as views:
            spool.write(begin, views)
        spool.record(chunk, source_image.digest(chunk))
    spool.close()
    return spool.path


def open_spool(folder: Path, target_image: Image) -> Spool:
    """Open the spool in this folder, as a fork into the image does."""
    return acquire_spool(folder, spool_name(IDENTITY), target_image.layout)


def run_fork(
    fleet: Fleet,
    module: torch.nn.Module,
    planner: FakePlanner,
    chosen: InstanceSettings,
    *fallbacks: Fallback,
) -> ForkReport:
    """Run one fork, close its serving side and return its report."""
    report = session(fleet, module, planner, *fallbacks, chosen=chosen, identity=IDENTITY).run()
    if report.seed is not None:
        report.seed.close()
    return report


def count_records(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Return a semaphore that is released once for each spooled chunk."""
    count, record = threading.Semaphore(0), Spool.record

    def record_and_count(spool: Spool, chunk: int, digest: bytes) -> None:
        record(spool, chunk, digest)
        count.release()

    monkeypatch.setattr(Spool, "record", record_and_count)
    return count


def load_zeros(module: torch.nn.Module) -> None:
    module.get_buffer("weights").zero_()


def seed_and_planner(fleet: Fleet, source: Model, faults: FaultInjection | None = None) -> tuple[Seed, FakePlanner]:
    """Return a seed of this model, and a planner that routes every fork to it."""
    seed = fleet.source("a", capture(source), faults)
    return seed, scripted_planner(lambda: plan(route(seed, ALL)))
