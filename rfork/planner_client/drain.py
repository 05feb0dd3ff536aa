"""Having instances end only once nobody needs them: drained, and waited for, by way of the planner.

Runs wherever an instance, or a server of several, is about to be ended: beside it, or on an operator's
machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rfork.errors import PlannerRejected, PlannerUnreachable, SourceBusy
from rfork.planner_client.client import PlannerClient
from rfork.schema import ExitCheck

POLL_INTERVAL_S = 0.5
MAX_PLANNER_OUTAGE_S = 10.0
"""How long a server's end waits for a planner that does not answer: one that restarts is back by then."""
LAST_SEED = "last-seed"
"""The planner's problem with draining the last that holds its weights."""
FORBIDDEN = "forbidden"
"""The problem with a token that may not do what was asked: only an operator's may force."""
NOT_OWNER = "not-owner"
"""The problem with an instance that another server registered."""
NOT_DRAINED = "this token may not drain it: an operator's is needed for another server's instance or a last seed"
"""Said of an instance that ends undrained."""

OnWait = Callable[[str], None]
"""Told, each time it is looked at, why an instance may not end yet."""


@dataclass(frozen=True, slots=True)
class DrainResult:
    """One instance of a server, and what became of it: whether it may end now, and why (not)."""

    instance_id: str
    can_exit: bool
    reason: str


def drain_instance(
    client: PlannerClient,
    instance_id: str,
    *,
    force: bool,
    wait_s: float,
    undrained: bool = False,
    on_wait: OnWait | None = None,
    stop: threading.Event | None = None,
) -> ExitCheck:
    """Drain the instance and wait until it may end, over restarts of the planner.

    `undrained`: of a server that ends whatever is answered. Where this caller's token may not drain it, all
    that read from it are waited for, those too that are sent to it meanwhile. `stop` ends the wait early.
    Raises SourceBusy where it may not end within `seed_wait_timeout_s` seconds, PlannerRejected where it is the last seed,
    or, unless `undrained`, where the token may not drain it, and PlannerUnreachable where the planner was
    away to the end.
    """
    deadline = time.monotonic() + wait_s
    stop = stop or threading.Event()
    drain_requested, may_force = False, force
    while True:
        try:
            if not drain_requested:
                try:
                    _drain(client, instance_id, force=may_force)
                    drain_requested = True
                except PlannerRejected as error:
                    if not undrained or error.problem not in (FORBIDDEN, LAST_SEED, NOT_OWNER):
                        raise
                    may_force = False  # it is drained without, once another holds its weights
            exit_check = client.can_exit(instance_id)
        except PlannerUnreachable as error:
            if time.monotonic() >= deadline or stop.is_set():
                raise
            # A planner that comes back has forgotten that it was asked.
            drain_requested, why = False, str(error)
        else:
            if exit_check.can_exit:
                return exit_check if drain_requested else _not_drained_result(exit_check)
            why = exit_check.reason
        left_s = deadline - time.monotonic()
        if left_s <= 0 or stop.is_set():
            how = "drained" if drain_requested else f"not drained ({NOT_DRAINED})"
            raise SourceBusy(
                f"instance {instance_id} is {how}, and may not end after {wait_s:g} s: {why}",
                hint="wait longer (--wait), or end it all the same: its readers go on from elsewhere",
            )
        if on_wait is not None:
            on_wait(why)
        stop.wait(min(POLL_INTERVAL_S, left_s))


def drain_replica(
    client: PlannerClient,
    replica: str,
    *,
    wait_s: float,
    force: bool,
    on_wait: OnWait | None = None,
    stop: threading.Event | None = None,
) -> list[DrainResult]:
    """Drain all instances of one server, and wait for all, over restarts of the planner.

    They are those whose ids begin with ``REPLICA-target-`` or ``REPLICA-draft-``.

    At most `seed_wait_timeout_s` seconds in all; `force`: though some are the last that hold their weights. Where this
    caller's token may not force that, their readers are waited for all the same. All are drained before one
    is waited for. `stop` ends the wait early. Returns what became of each: none where the planner knows none.
    Raises PlannerRejected, without `force`, where one is a last seed, and PlannerUnreachable where the planner
    could not be asked who they are, for `MAX_PLANNER_OUTAGE_S` at most.
    """
    deadline = time.monotonic() + wait_s
    stop = stop or threading.Event()
    found = _list_instances(client, replica, min(deadline, time.monotonic() + MAX_PLANNER_OUTAGE_S), on_wait, stop)
    for instance_id in found:
        try:
            _drain(client, instance_id, force=force)
        except PlannerUnreachable:
            continue  # it is asked again below
        except PlannerRejected:
            if not force:
                raise
    ended: list[DrainResult] = []
    for instance_id in found:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            drain_result = drain_instance(
                client, instance_id, force=force, undrained=force, wait_s=left_s, on_wait=on_wait, stop=stop
            )
        except (SourceBusy, PlannerUnreachable) as error:
            ended.append(DrainResult(instance_id, False, str(error)))
        except PlannerRejected as error:
            if not force:
                raise
            ended.append(DrainResult(instance_id, False, str(error)))
        else:
            ended.append(DrainResult(instance_id, True, drain_result.reason))
    return ended


def _list_instances(
    client: PlannerClient, replica: str, deadline: float, on_wait: OnWait | None, stop: threading.Event
) -> list[str]:
    """Who they are, asked until the planner answers; raises PlannerUnreachable at the deadline."""
    while True:
        try:
            views = client.instances(replica=replica)
        except PlannerUnreachable as error:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or stop.is_set():
                raise
            why = str(error)
        else:
            # A planner that does not know the filter lists the whole fleet.
            return sorted(
                view.report.instance_id for view in views if _belongs_to_replica(view.report.instance_id, replica)
            )
        if on_wait is not None:
            on_wait(why)
        stop.wait(min(POLL_INTERVAL_S, left_s))


def _belongs_to_replica(instance_id: str, replica: str) -> bool:
    """Whether the instance is a rank of this server, and not of one whose name only begins alike."""
    return instance_id.removeprefix(f"{replica}-").startswith(("target-", "draft-")) and (
        instance_id.startswith(f"{replica}-")
    )


def _not_drained_result(exit_check: ExitCheck) -> ExitCheck:
    """The answer on one that could not be drained, and has no reader just now."""
    return exit_check.model_copy(update={"reason": f"nobody reads from it; {NOT_DRAINED}"})


def _drain(client: PlannerClient, instance_id: str, *, force: bool) -> None:
    try:
        # Only an operator may force it, and mostly there is no need.
        client.drain(instance_id, force=False)
    except PlannerRejected as error:
        if error.problem == "unknown-instance":
            return
        if error.problem == LAST_SEED and force:
            client.drain(instance_id, force=True)
            return
        if error.problem == LAST_SEED:
            error.hint = "wait until another holds them, or pass --force as an operator: the next starts cold"
        raise
