"""Forks from end to end of a module, with a planner that tells who reads storage."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial

import torch
from torch import nn

from rfork.fields import StorageKind
from rfork.fork.fallback import Fallback
from rfork.fork.report import ForkReport
from rfork.fork.session import ForkSession
from rfork.image.chunks import MIB
from rfork.seed.seed import Identity
from rfork.transport.memory import MemoryTransport
from rfork.wire import Plan, StorageRead
from tests.unit.fork.fleet import Fleet, Script, plan, settings
from tests.unit.fork.planner import FakePlanner

CHUNKS = 5
NOBODY = plan(reason="nobody holds it")
ALL = (0, CHUNKS)


class Model(nn.Module):
    """Four chunks of weights and a table that the model computes for itself."""

    def __init__(self, value: float, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        weight = (torch.arange(MIB * 1.0) + value).to(dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("table", torch.arange(8.0), persistent=False)


def load_twos(module: nn.Module) -> None:
    with torch.no_grad():
        module.get_parameter("weight").fill_(2.0)


def elected(kind: StorageKind, uri: str = "") -> Plan:
    return plan(storage=[StorageRead(kind=kind, uri=uri, chunks=(ALL,))])


def forked(
    fleet: Fleet, module: nn.Module, planner: FakePlanner, ways: Sequence[Fallback], **changed: str | float
) -> ForkReport:
    chosen = settings().model_copy(update=changed)
    report = ForkSession(
        module,
        Identity("model", instance_id="target"),
        chosen,
        [MemoryTransport(fleet.network)],
        planner=planner.client(),
        dial=fleet.peers.dial,
        fallbacks=ways,
        serve_peer=fleet.peers.service,
    ).run()
    assert report.seed is not None
    report.seed.close()
    return report


def planning(*plans: Plan) -> FakePlanner:
    return FakePlanner(Script([partial(copy, each) for each in plans]))


def offers(planner: FakePlanner) -> list[tuple[str, str]]:
    return [(offer.kind, offer.uri) for offer in planner.requests[-1].instance.storage]
