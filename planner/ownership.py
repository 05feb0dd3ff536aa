"""Ownership of records: decides which caller may change an instance's record and its forks.

A record belongs to the holder of the secret that its first report showed (`rfork.planner_client.ownership`). Pure:
knows a caller by what it showed, and a record by the owner in it.

| call | without any token set | role instance | role operator |
|---|---|---|---|
| report, ask for a plan | the owner, or anyone while the record has none | the owner | the owner |
| progress, finish | the same | the owner | the owner, or this role where there is none |
| drain, remove | anyone | the owner | anyone of this role |

An id that the planner does not know (yet, or again after a restart) belongs to the first that reports under
it. The lease keys of its former owner stay out of reach: they are derived from that owner's secret too.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Any, Final, Self

from starlette.types import Scope

from planner.accusations import address_of
from planner.auth import CALLER, Caller
from planner.http_errors import ProblemError, invalid_field
from planner.middleware import header
from planner.store.records import ForkRecord, InstanceRecord
from rfork.planner_client.ownership import OWNER_HEADER, SECRET, owner_id

NOT_OWNER: Final = "not-owner"
"""Slug of the problem."""
PARAMETER: Final[dict[str, Any]] = {
    "parameters": [
        {
            "name": OWNER_HEADER,
            "in": "header",
            "required": False,
            "description": "secret of the instance's server; required where the planner has tokens",
            "schema": {"type": "string", "minLength": 32, "maxLength": 256},
        }
    ]
}
"""`openapi_extra` of routes that ask for the owner."""


@dataclass(frozen=True)
class Claimant:
    """A caller that wants to change a record."""

    owner: str = ""
    """Digest of the secret that it showed; empty: it showed none."""
    owner_required: bool = False
    """It has to show a secret to register."""
    is_operator: bool = True
    """It may drain and remove what others own: an operator, or anyone where no token is set."""
    address: str = ""
    """Network address that it calls from, where that tells callers apart."""

    @classmethod
    def of(cls, scope: Scope) -> Self:
        """The caller of a request that was let in. Raises ProblemError where its secret is malformed."""
        owner_header = header(scope, OWNER_HEADER.lower().encode())
        secret = "" if owner_header is None else owner_header.decode("latin-1")
        if owner_header is not None and not SECRET.fullmatch(secret):
            raise invalid_field(OWNER_HEADER, "a secret is 32 to 256 visible ASCII characters")
        caller: Caller | None = scope.get(CALLER)
        client = scope.get("client")
        return cls(
            owner=owner_id(secret) if secret else "",
            owner_required=caller is not None,
            is_operator=caller is None or caller.has_role("operator"),
            address=address_of(client[0] if client else None),
        )

    def owner_of(self, instance_id: str, record: InstanceRecord | None) -> str:
        """The owner that a report of this caller gives the record; ProblemError where it may not report."""
        if record is not None and record.owner:
            self._check(f"instance {instance_id}", record.owner)
        elif self.owner_required and not self.owner:
            raise ProblemError(403, NOT_OWNER, f"instance {instance_id} needs an owner: send {OWNER_HEADER}")
        return self.owner

    def check_can_remove(self, record: InstanceRecord) -> None:
        """Raises ProblemError where the caller may neither drain nor remove the instance."""
        if not self.is_operator:
            self._check(f"instance {record.report.instance_id}", record.owner)

    def check_can_change_fork(self, fork: ForkRecord) -> None:
        """Raises ProblemError where the caller may not report on the fork, or ask for it again."""
        if fork.owner or not self.is_operator:
            self._check(f"fork {fork.fork_id}", fork.owner)

    def _check(self, what: str, owner: str) -> None:
        if not owner or not hmac.compare_digest(owner, self.owner):
            raise ProblemError(403, NOT_OWNER, f"{what} belongs to another caller: {OWNER_HEADER} does not match")


@dataclass(frozen=True)
class _Trusted(Claimant):
    """Code of the planner itself, which passes on what it has checked, under names of its own."""

    def owner_of(self, instance_id: str, record: InstanceRecord | None) -> str:
        return record.owner if record is not None else ""

    def check_can_remove(self, record: InstanceRecord) -> None:
        pass

    def check_can_change_fork(self, fork: ForkRecord) -> None:
        pass


PLANNER: Final[Claimant] = _Trusted()
