"""Complete forks in this process: a small model, its fork session and a scripted planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from rfork.image.chunks import MIB
from rfork.peer.server import ServePeer
from rfork.receiver.fallback import Fallback
from rfork.receiver.planner_requests import OnProgress
from rfork.receiver.session import ForkOptions, ForkSession, Network
from rfork.schema import Plan
from rfork.settings import InstanceSettings
from rfork.source.seed import InstanceIdentity
from rfork.testing.transport import InMemoryTransport
from rfork.tracing import Tracer
from tests.unit.receiver.fake_planner import FakePlanner
from tests.unit.receiver.fleet import Fleet, Script, settings

CHUNKS = 5
ALL = (0, CHUNKS)
TARGET = InstanceIdentity("model", instance_id="target")


class Model(nn.Module):
    """Four chunks of weights, and a table that the model computes itself."""

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
    *fallbacks: Fallback,
    chosen: InstanceSettings | None = None,
    identity: InstanceIdentity = TARGET,
    on_progress: OnProgress | None = None,
    exclude: Sequence[str] = (),
    serve_peer: ServePeer | None = None,
    tracer: Tracer | None = None,
    on_filled: Callable[[], None] | None = None,
) -> ForkSession:
    """Return a fork session on the fleet's network that has not been started."""
    return ForkSession(
        module,
        identity,
        chosen or settings(),
        Network(
            planner.client() if planner is not None else None,
            [InMemoryTransport(fleet.network)],
            fleet.peers.dial,
            serve_peer or fleet.peers.service,
        ),
        ForkOptions(fallbacks=fallbacks, exclude=exclude, on_progress=on_progress, on_filled=on_filled, tracer=tracer),
    )


def scripted_planner(*plan_factories: Callable[[], Plan]) -> FakePlanner:
    """Return a planner that sends these responses in turn."""
    return FakePlanner(Script(plan_factories))
