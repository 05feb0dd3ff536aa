"""Forks from end to end of a module, with a planner that tells who reads storage."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial

from torch import nn

from rfork.fields import StorageKind
from rfork.fork.fallback import Fallback
from rfork.fork.report import ForkReport
from rfork.wire import Plan, StorageRead
from tests.unit.fork.fleet import Fleet, Script, plan, settings
from tests.unit.fork.planner import FakePlanner
from tests.unit.fork.sessions import ALL, session

NOBODY = plan(reason="nobody holds it")


def elected(kind: StorageKind, uri: str = "") -> Plan:
    return plan(storage=[StorageRead(kind=kind, uri=uri, chunks=(ALL,))])


def forked(
    fleet: Fleet, module: nn.Module, planner: FakePlanner, ways: Sequence[Fallback], **changed: str | float
) -> ForkReport:
    chosen = settings().model_copy(update=changed)
    report = session(fleet, module, planner, *ways, chosen=chosen).run()
    assert report.seed is not None
    report.seed.close()
    return report


def planning(*plans: Plan) -> FakePlanner:
    return FakePlanner(Script([partial(copy, each) for each in plans]))


def offers(planner: FakePlanner) -> list[tuple[str, str]]:
    return [(offer.kind, offer.uri) for offer in planner.requests[-1].instance.storage]
