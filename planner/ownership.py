"""Ownership of records: decides which caller may change an instance's record and its forks.

A record belongs to the owner of the secret that was sent with its first report
(`rfork.planner_client.ownership`). Pure: knows a caller by its secret, and a record by its owner.

| call | no token set | role instance | role operator |
|---|---|---|---|
| report, request a plan | the owner, or anyone while the record has none | the owner | the owner |
| progress, finish | the same | the owner | the owner, or an operator if there is none |
| drain, remove | anyone | the owner | any operator |

Holders report and are removed like instances.

An unknown id (new, or after a restart) belongs to the first caller that reports under it. The lease keys of
its former owner stay out of reach: they are derived from that owner's secret too.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Scope
from typing_extensions import Self

from planner.auth import CALLER, Caller
from planner.core.faults import address_of
from planner.core.problems import ProblemError, invalid_field
from planner.core.records import ForkRecord, HolderRecord, InstanceRecord
from planner.middleware import header
from rfork.planner_client.ownership import OWNER_HEADER, SECRET, owner_id

RAW_OWNER_HEADER: Final = OWNER_HEADER.lower().encode()
NOT_OWNER: Final = "not-owner"
"""Problem slug."""
OWNER_HEADER_DOCS: Final[dict[str, Any]] = {
    "parameters": [
        {
            "name": OWNER_HEADER,
            "in": "header",
            "required": False,
            "description": "secret of the instance's server; required if the planner has tokens",
            "schema": {"type": "string", "minLength": 32, "maxLength": 256},
        }
    ]
}
"""`openapi_extra` of routes that require the owner."""


@dataclass(frozen=True)
class Claimant:
    """A caller that wants to change a record."""

    owner: str = ""
    """Digest of the secret that it sent; empty without one."""
    owner_required: bool = False
    """True if it must send a secret to register."""
    is_operator: bool = True
    """True if it may drain and remove instances of other owners: an operator, or anyone if no token is set."""
    address: str = ""
    """Network address that it calls from, if that distinguishes callers."""

    @classmethod
    def of(cls, scope: Scope) -> Self:
        """Return the caller of an authorized request. Raises ProblemError if its secret is malformed."""
        owner_header = header(scope, RAW_OWNER_HEADER)
        secret = "" if owner_header is None else owner_header.decode("latin-1")
        if owner_header is not None and not SECRET.fullmatch(secret):
            raise invalid_field(OWNER_HEADER, "must be 32 to 256 visible ASCII characters")
        caller: Caller | None = scope.get(CALLER)
        client = scope.get("client")
        return cls(
            owner=owner_id(secret) if secret else "",
            owner_required=caller is not None,
            is_operator=caller is None or caller.has_role("operator"),
            address=address_of(client[0] if client else None),
        )

    def owner_of(self, instance_id: str, record: InstanceRecord | None) -> str:
        """Return the owner that a report of this caller sets; ProblemError if it may not report."""
        return self._owner_of(f"instance {instance_id}", "" if record is None else record.owner)

    def owner_of_holder(self, holder_id: str, record: HolderRecord | None) -> str:
        """Return the owner that a holder's report sets; ProblemError if the caller may not report."""
        return self._owner_of(f"holder {holder_id}", "" if record is None else record.owner)

    def check_can_remove(self, record: InstanceRecord) -> None:
        """Raise ProblemError if the caller may neither drain nor remove the instance."""
        if not self.is_operator:
            self._check(f"instance {record.report.instance_id}", record.owner)

    def check_can_remove_holder(self, record: HolderRecord) -> None:
        """Raise ProblemError if the caller may not remove the holder."""
        if not self.is_operator:
            self._check(f"holder {record.holder_id}", record.owner)

    def check_can_change_fork(self, fork: ForkRecord) -> None:
        """Raise ProblemError if the caller may neither report on the fork nor replan it."""
        if fork.owner or not self.is_operator:
            self._check(f"fork {fork.fork_id}", fork.owner)

    def _owner_of(self, what: str, owner: str) -> str:
        if owner:
            self._check(what, owner)
        elif self.owner_required and not self.owner:
            raise ProblemError(403, NOT_OWNER, f"{what} needs an owner: send {OWNER_HEADER}")
        return self.owner

    def _check(self, what: str, owner: str) -> None:
        if not owner or not hmac.compare_digest(owner, self.owner):
            raise ProblemError(403, NOT_OWNER, f"{what} belongs to another owner: {OWNER_HEADER} does not match")


@dataclass(frozen=True)
class _Trusted(Claimant):
    """The planner's own code, which forwards calls that it has already checked."""

    def owner_of(self, instance_id: str, record: InstanceRecord | None) -> str:
        return record.owner if record is not None else ""

    def owner_of_holder(self, holder_id: str, record: HolderRecord | None) -> str:
        return record.owner if record is not None else ""

    def check_can_remove(self, record: InstanceRecord) -> None:
        pass

    def check_can_remove_holder(self, record: HolderRecord) -> None:
        pass

    def check_can_change_fork(self, fork: ForkRecord) -> None:
        pass


PLANNER: Final[Claimant] = _Trusted()
