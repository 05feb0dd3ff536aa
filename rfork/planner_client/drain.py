"""Drains instances through the planner, and waits until they can exit.

Runs wherever an instance or a replica is about to be stopped: on its host, or on an operator's machine.
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
"""Maximum wait for an unreachable planner before a replica exits: longer than a restart of the planner."""
LAST_SEED = "last-seed"
"""The planner's problem when draining the last instance with its weights."""
FORBIDDEN = "forbidden"
"""Problem of a token without the required role: only an operator may force."""
NOT_OWNER = "not-owner"
"""Problem of an instance that another owner registered."""
NOT_DRAINED = "this token may not drain it: another server's instance or a last seed requires an operator's token"
"""Reason of an instance that exits without being drained."""

OnWait = Callable[[str], None]
"""Called at each check with the reason why an instance cannot exit yet."""


@dataclass(frozen=True, slots=True)
class DrainResult:
    """Result for one instance of a replica: `reason` explains why it can or cannot exit."""

    instance_id: str
    can_exit: bool
    reason: str


def drain_instance(
    client: PlannerClient,
    instance_id: str,
    *,
    force: bool,
    wait_s: float,
    exits_anyway: bool = False,
    on_wait: OnWait | None = None,
    stop: threading.Event | None = None,
) -> ExitCheck:
    """Drain the instance and wait until it can exit, even if the planner restarts.

    `exits_anyway`: the server exits in any case. If this token may not drain it, wait for all its readers,
    including those assigned in the meantime. `stop` ends the wait early.

    Raises SourceBusy if it cannot exit within `wait_s` seconds, PlannerRejected if it is the last seed or,
    unless it `exits_anyway`, if the token may not drain it, and PlannerUnreachable if the planner was
    unreachable until the end.
    """
    deadline = time.monotonic() + wait_s
    stop = stop or threading.Event()
    drain_requested, may_force = False, force
    while True:
        try:
            if not drain_requested:
                try:
                    _request_drain(client, instance_id, force=may_force)
                    drain_requested = True
                except PlannerRejected as error:
                    if not exits_anyway or error.problem not in (FORBIDDEN, LAST_SEED, NOT_OWNER):
                        raise
                    may_force = False  # once another instance has its weights, no force is needed
            exit_check = client.can_exit(instance_id)
        except PlannerUnreachable as error:
            if time.monotonic() >= deadline or stop.is_set():
                raise
            # A restarted planner has forgotten the drain request.
            drain_requested, reason = False, str(error)
        else:
            if exit_check.can_exit:
                return exit_check if drain_requested else _not_drained_result(exit_check)
            reason = exit_check.reason
        left_s = deadline - time.monotonic()
        if left_s <= 0 or stop.is_set():
            state = "drained" if drain_requested else f"not drained ({NOT_DRAINED})"
            raise SourceBusy(
                f"instance {instance_id} is {state} and cannot exit after {wait_s:g} s: {reason}",
                hint="wait longer (--wait), or stop it anyway: its readers continue from other sources",
            )
        if on_wait is not None:
            on_wait(reason)
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
    """Drain all instances of a replica and wait for all of them, even if the planner restarts.

    The instances are those whose ids begin with ``REPLICA-main-`` or ``REPLICA-speculative-``. All are
    drained before waiting for the first, at most `wait_s` seconds in total. `force`: even if some are the
    last with their weights; if this token may not force that, their readers are waited for anyway. `stop`
    ends the wait early. Returns a result for each instance; empty if the planner knows none.

    Raises PlannerRejected, without `force`, if one is a last seed, and PlannerUnreachable if the planner
    could not list the instances for `MAX_PLANNER_OUTAGE_S`.
    """
    deadline = time.monotonic() + wait_s
    stop = stop or threading.Event()
    list_deadline = min(deadline, time.monotonic() + MAX_PLANNER_OUTAGE_S)
    instance_ids = _list_instances(client, replica, list_deadline, on_wait, stop)
    for instance_id in instance_ids:
        try:
            _request_drain(client, instance_id, force=force)
        except PlannerUnreachable:
            continue  # requested again below
        except PlannerRejected:
            if not force:
                raise
    results: list[DrainResult] = []
    for instance_id in instance_ids:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            exit_check = drain_instance(
                client, instance_id, force=force, exits_anyway=force, wait_s=left_s, on_wait=on_wait, stop=stop
            )
        except (SourceBusy, PlannerUnreachable) as error:
            results.append(DrainResult(instance_id, False, str(error)))
        except PlannerRejected as error:
            if not force:
                raise
            results.append(DrainResult(instance_id, False, str(error)))
        else:
            results.append(DrainResult(instance_id, True, exit_check.reason))
    return results


def _list_instances(
    client: PlannerClient, replica: str, deadline: float, on_wait: OnWait | None, stop: threading.Event
) -> list[str]:
    """Return the instances of a replica. Raises PlannerUnreachable at the deadline."""
    while True:
        try:
            views = client.instances(replica=replica)
        except PlannerUnreachable as error:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or stop.is_set():
                raise
            reason = str(error)
        else:
            instance_ids = (view.report.instance_id for view in views)
            # A planner without this filter lists the entire fleet.
            return sorted(name for name in instance_ids if _belongs_to_replica(name, replica))
        if on_wait is not None:
            on_wait(reason)
        stop.wait(min(POLL_INTERVAL_S, left_s))


def _belongs_to_replica(instance_id: str, replica: str) -> bool:
    """Return whether the instance is a rank of this replica, not of one with a longer name."""
    return instance_id.startswith((f"{replica}-main-", f"{replica}-speculative-"))


def _not_drained_result(exit_check: ExitCheck) -> ExitCheck:
    """Return the result for an instance that could not be drained and has no reader now."""
    return exit_check.model_copy(update={"reason": f"no readers; {NOT_DRAINED}"})


def _request_drain(client: PlannerClient, instance_id: str, *, force: bool) -> None:
    """Drain an instance, by force only if that is necessary. An unknown instance needs no draining."""
    try:
        # Try without force first: only an operator may force.
        client.drain(instance_id, force=False)
    except PlannerRejected as error:
        if error.problem == "unknown-instance":
            return
        if error.problem == LAST_SEED and force:
            client.drain(instance_id, force=True)
            return
        if error.problem == LAST_SEED:
            error.hint = (
                "wait until another instance has the weights, or pass --force as an operator (the next start is cold)"
            )
        raise
