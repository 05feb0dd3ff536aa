"""Finds a fork by the id of a fork or an instance, or by a unique prefix."""

from __future__ import annotations

import re
from typing import Final

from rfork.cli import formatters
from rfork.errors import PlannerRejected, UserError
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkInfo

MAX_CANDIDATES_LISTED: Final = 5
"""Maximum number of candidates listed for an ambiguous prefix."""
LISTED: Final = "`rfork status --forks` lists known forks; the planner forgets the oldest finished ones"
_id: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def find_fork(client: PlannerClient, text: str) -> ForkInfo:
    """Return the fork with this id, or the latest fork of an instance; a unique prefix is enough.

    Raises UserError if there is none or several, and the errors of the client.
    """
    if not _id.fullmatch(text):
        raise UserError(f"{text!r} is not an id: ids have only letters, digits and . _ : -", hint=LISTED)
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
            f"{text!r} is ambiguous, {len(names)} ids match: {', '.join(names[:MAX_CANDIDATES_LISTED])}{more}",
            hint="type more of the id",
        )
    return next(iter(found.values()))


def _not_found_error(client: PlannerClient, text: str) -> UserError:
    matching = [view.report for view in client.instances() if view.report.instance_id.startswith(text)]
    if len(matching) == 1:
        reason = "it loaded without forking, or its fork was forgotten"
        return UserError(f"no fork of instance {matching[0].instance_id}: {reason}", hint=LISTED)
    if matching:
        count = formatters.plural(len(matching), "instance")
        return UserError(f"no fork of the {count} whose ids begin with {text!r}", hint=LISTED)
    return UserError(f"no fork or instance id begins with {text!r}", hint=LISTED)
