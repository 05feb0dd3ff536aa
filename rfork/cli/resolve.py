"""Finds a fork by what a user types: an id of a fork or of an instance, or the beginning of one."""

from __future__ import annotations

import re
from typing import Final

from rfork.cli import format
from rfork.errors import PlannerRejected, UserError
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkInfo

MAX_CANDIDATES_LISTED: Final = 5
"""Of several that it could be, so many are named."""
LISTED: Final = "`rfork forks` lists those that are known; the planner forgets the oldest that have ended"
_id: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def find_fork(client: PlannerClient, text: str) -> ForkInfo:
    """The fork of this id; else the latest fork of the one instance, or the one fork, that begins with it.

    Raises UserError where there is none, or where it could be several; else as the client's methods.
    """
    if not _id.fullmatch(text):
        raise UserError(f"{text!r} is no id: those have letters, digits and . _ : - only", hint=LISTED)
    try:
        return client.fork(text)
    except PlannerRejected as error:
        if error.problem != "unknown-fork":
            raise
    forks = client.forks()
    by_instance: dict[str, ForkInfo] = {}
    for fork in sorted(forks, key=lambda each: -each.age_s):
        by_instance[fork.instance_id] = fork
    if text in by_instance:
        return by_instance[text]
    found = {fork.fork_id: fork for fork in forks if fork.fork_id.startswith(text)}
    found |= {name: fork for name, fork in by_instance.items() if name.startswith(text)}
    if not found:
        raise _not_found_error(client, text)
    if len({fork.fork_id for fork in found.values()}) > 1:
        names = sorted(found)
        more = f" and {len(names) - MAX_CANDIDATES_LISTED} more" if len(names) > MAX_CANDIDATES_LISTED else ""
        raise UserError(
            f"{text!r} could be any of {len(names)}: {', '.join(names[:MAX_CANDIDATES_LISTED])}{more}",
            hint="give more of the id",
        )
    return next(iter(found.values()))


def _not_found_error(client: PlannerClient, text: str) -> UserError:
    same = [view.report for view in client.instances() if view.report.instance_id.startswith(text)]
    if len(same) == 1:
        why = "it loaded by itself, or its fork is forgotten"
        return UserError(f"no fork of instance {same[0].instance_id} is known: {why}", hint=LISTED)
    if same:
        what = format.plural(len(same), "instance")
        return UserError(f"{text!r} begins the ids of {what}, of which no fork is known", hint=LISTED)
    return UserError(f"no fork and no instance begins with {text!r}", hint=LISTED)
