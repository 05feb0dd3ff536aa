"""Whole forks in this process: a small model, a fork of it, a planner that follows a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from rfork.fork.fallback import Fallback
from rfork.fork.progress import OnProgress
from rfork.fork.session import ForkSession
from rfork.image.chunks import MIB
from rfork.peer.server import ServePeer
from rfork.seed.seed import Identity
from rfork.settings import Settings
from rfork.tracing import Tracer
from rfork.transport.memory import MemoryTransport
from rfork.wire import Plan
from tests.unit.fork.fleet import Fleet, Script, settings
from tests.unit.fork.planner import FakePlanner

CHUNKS = 5
ALL = (0, CHUNKS)
TARGET = Identity("model", instance_id="target")


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


TWOS = Fallback("twos", load_twos)


def session(
    fleet: Fleet,
    module: nn.Module,
    planner: FakePlanner | None,
    *ways: Fallback,
    chosen: Settings | None = None,
    identity: Identity = TARGET,
    on_progress: OnProgress | None = None,
    exclude: Sequence[str] = (),
    serve_peer: ServePeer | None = None,
    tracer: Tracer | None = None,
    on_filled: Callable[[], None] | None = None,
) -> ForkSession:
    """A fork over the fleet's network, not begun."""
    return ForkSession(
        module,
        identity,
        chosen or settings(),
        [MemoryTransport(fleet.network)],
        planner=planner.client() if planner is not None else None,
        dial=fleet.peers.dial,
        fallbacks=ways,
        on_progress=on_progress,
        exclude=exclude,
        serve_peer=serve_peer or fleet.peers.service,
        tracer=tracer,
        on_filled=on_filled,
    )


def planning(*answers: Callable[[], Plan]) -> FakePlanner:
    """A planner that answers so, one after the other."""
    return FakePlanner(Script(answers))
