"""Credibility of the accusations that readers make against a source. Pure functions.

A reader that received wrong bytes, or none for too long, accuses its source and avoids it from then on. Other
readers are kept from the source (quarantine) only when readers on two hosts accuse it.

An accusation has a credibility of 1, reduced when there is doubt about the accuser:

* it accuses several sources in one fork: 1 / their number, because its own memory is the more likely cause;
* a reader on another host later verifies bytes from the same source: halved for each such reader;
* its earlier accusations were contradicted in this way: halved for each of them.

Two readers count as being on two hosts if both their host names and their network addresses differ: a reader
chooses its own host name. Addresses count only where they distinguish callers, so not on the loopback
interface.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

QUORUM: Final = 2.0
"""Credibility at which a source is quarantined: two undoubted readers."""
MAX_KEPT: Final = 16
"""Accusations kept per source; the newest ones win."""
MAX_DOUBT: Final = 8


@dataclass(frozen=True)
class Witness:
    """A reader that reports faults, with the attributes that distinguish it from other readers."""

    instance_id: str
    host: str
    address: str = ""
    """Network address that it calls from; empty if unknown."""

    @property
    def key(self) -> str:
        """A key that is equal for readers that cannot be distinguished."""
        return f"{self.host}|{self.address}"

    def is_apart_from(self, other: Witness) -> bool:
        """Return True if the two readers are on different hosts."""
        unknown = not self.address or not other.address
        return self.host != other.host and (unknown or self.address != other.address)


@dataclass(frozen=True)
class Accusation:
    """A reader's statement that a source is at fault."""

    accuser: Witness
    fork_id: str
    reason: str
    at: float
    until: float
    """Time from which it no longer counts."""
    generation: int
    """Generation of the source's weights that were read."""
    credibility: float = 1.0
    contradicted_by: tuple[str, ...] = ()
    """Keys of witnesses that have since read verified bytes from the source."""

    @property
    def error(self) -> str:
        """Name of the error, with which the reason begins."""
        return self.reason.partition(":")[0]


def address_of(client: str | None) -> str:
    """Return the network address of a caller, or an empty string where it does not distinguish callers."""
    try:
        found = ipaddress.ip_address(client or "")
    except ValueError:
        return ""
    return "" if found.is_loopback else str(found)


def accuser_credibility(contradiction_count: int, accused_count: int) -> float:
    """Return the credibility of an accuser that was contradicted this often and accuses this many sources."""
    return 0.5 ** min(contradiction_count, MAX_DOUBT) / max(1, accused_count)


def with_accusation(accusations: Sequence[Accusation], new: Accusation) -> tuple[Accusation, ...]:
    """Return the accusations with a new one added; a fork accuses a source at most once."""
    others = [each for each in accusations if each.fork_id != new.fork_id]
    return (*others, new)[-MAX_KEPT:]


def with_reduced_credibility(
    accusations: Sequence[Accusation], fork_id: str, credibility: float
) -> tuple[Accusation, ...]:
    """Return the accusations with the credibility of this fork's accusation capped at `credibility`."""
    return tuple(
        replace(each, credibility=min(each.credibility, credibility)) if each.fork_id == fork_id else each
        for each in accusations
    )


def active_accusations(accusations: Iterable[Accusation], generation: int, now: float) -> tuple[Accusation, ...]:
    """Return the accusations that still count: not expired, and against the source's current generation."""
    return tuple(each for each in accusations if each.generation == generation and now < each.until)


def total_credibility(accusations: Iterable[Accusation]) -> float:
    """Return the total credibility. Of readers that may share a host, only the most credible one counts."""
    independent: list[Accusation] = []
    for each in sorted(accusations, key=lambda accusation: -accusation.credibility):
        if all(each.accuser.is_apart_from(other.accuser) for other in independent):
            independent.append(each)
    return sum(each.credibility for each in independent)


def apply_contradiction(
    accusations: Sequence[Accusation], witness: Witness, since: float
) -> tuple[tuple[Accusation, ...], tuple[str, ...]]:
    """Return the accusations after `witness` has verified bytes of the source that it read after `since`.

    Also return the instance_ids of accusers that are contradicted for the first time.
    """
    remaining: list[Accusation] = []
    contradicted_ids: list[str] = []
    for each in accusations:
        already_counted = witness.key in each.contradicted_by
        if each.at > since or already_counted or not witness.is_apart_from(each.accuser):
            remaining.append(each)
            continue
        if not each.contradicted_by:
            contradicted_ids.append(each.accuser.instance_id)
        remaining.append(
            replace(
                each,
                credibility=each.credibility / 2,
                contradicted_by=(*each.contradicted_by, witness.key)[-MAX_KEPT:],
            )
        )
    return tuple(remaining), tuple(contradicted_ids)
