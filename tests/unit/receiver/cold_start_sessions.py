"""Complete cold-start forks of a module, with a planner that elects the instance which reads storage."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial

from torch import nn

from rfork.receiver.fallback import Fallback
from rfork.receiver.report import ForkReport
from rfork.schema import Plan, StorageAssignment, StorageType
from tests.unit.receiver.fake_planner import FakePlanner
from tests.unit.receiver.fleet import Fleet, Script, plan, settings
from tests.unit.receiver.sessions import ALL, session

NO_SOURCE_PLAN = plan(reason="no instance serves it")


def storage_plan(storage_type: StorageType, uri: str = "") -> Plan:
    return plan(storage=[StorageAssignment(kind=storage_type, uri=uri, chunks=(ALL,))])


def run_fork(
    fleet: Fleet,
    module: nn.Module,
    planner: FakePlanner,
    fallbacks: Sequence[Fallback],
    **changed: str | float,
) -> ForkReport:
    chosen = settings().model_copy(update=changed)
    report = session(fleet, module, planner, *fallbacks, chosen=chosen).run()
    assert report.seed is not None
    report.seed.close()
    return report


def scripted_planner(*plans: Plan) -> FakePlanner:
    return FakePlanner(Script([partial(copy, each) for each in plans]))


def storage_candidates(planner: FakePlanner) -> list[tuple[str, str]]:
    return [(offer.kind, offer.uri) for offer in planner.requests[-1].instance.storage]
