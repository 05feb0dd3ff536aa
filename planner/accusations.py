"""Accusations of a source by its readers: how much they weigh together, and what takes their weight away.

A reader that got wrong bytes, or none for too long, accuses its source. It avoids the source itself from then
on; others are kept from the source (quarantine) only where readers on two hosts accuse it. Pure functions.

An accusation weighs 1, and less where there is doubt about the accuser:

* it accuses several sources in one fork: 1 / their number, as its own memory is the more likely cause;
* a reader on another host verifies bytes of the same source afterwards: half, for each such reader;
* accusations that it made before were contradicted so: half, for each of them.

Two readers are on two hosts if both the names of their hosts and their network addresses differ: the name is
the reader's own word. Addresses count only where they tell callers apart, so not on the loopback interface.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

QUORUM: Final = 2.0
"""Weight at which a source is quarantined: that of two readers without doubt."""
MAX_KEPT: Final = 16
"""Accusations of one source that are remembered; the newest count."""
MAX_DOUBT: Final = 8


@dataclass(frozen=True)
class Witness:
    """A reader that reports faults, with what distinguishes it from other readers."""

    instance_id: str
    host: str
    address: str = ""
    """Network address that it calls from; empty: not known."""

    @property
    def key(self) -> str:
        """Return one key for all readers that cannot be distinguished."""
        return f"{self.host}|{self.address}"

    def is_apart_from(self, other: Witness) -> bool:
        """The two are on two hosts."""
        unknown = not self.address or not other.address
        return self.host != other.host and (unknown or self.address != other.address)


@dataclass(frozen=True)
class Accusation:
    """A reader's statement that a source did wrong."""

    accuser: Witness
    fork_id: str
    reason: str
    at: float
    until: float
    """When it counts no more."""
    generation: int
    """Of the source's weights that were read."""
    credibility: float = 1.0
    contradicted_by: tuple[str, ...] = ()
    """Keys of witnesses that read well from the source since."""


def address_of(client: str | None) -> str:
    """The network address of a caller, where it tells callers apart; else empty."""
    try:
        found = ipaddress.ip_address(client or "")
    except ValueError:
        return ""
    return "" if found.is_loopback else str(found)


def accuser_credibility(contradiction_count: int, accused_count: int) -> float:
    """The weight of one whose accuser was contradicted so often, and accuses so many sources."""
    return 0.5 ** min(contradiction_count, MAX_DOUBT) / max(1, accused_count)


def with_accusation(accusations: Sequence[Accusation], new: Accusation) -> tuple[Accusation, ...]:
    """The accusations with a new one; one fork accuses a source once."""
    others = [each for each in accusations if each.fork_id != new.fork_id]
    return (*others, new)[-MAX_KEPT:]


def with_reduced_credibility(
    accusations: Sequence[Accusation], fork_id: str, credibility: float
) -> tuple[Accusation, ...]:
    """The accusations, that of one fork with no more than this weight."""
    return tuple(
        replace(each, credibility=min(each.credibility, credibility)) if each.fork_id == fork_id else each
        for each in accusations
    )


def active_accusations(accusations: Iterable[Accusation], generation: int, now: float) -> tuple[Accusation, ...]:
    """Those that still count: not too old, and about the weights that the source has now."""
    return tuple(each for each in accusations if each.generation == generation and now < each.until)


def total_credibility(accusations: Iterable[Accusation]) -> float:
    """The weight of all together; of readers that are not apart the heaviest counts."""
    independent: list[Accusation] = []
    for each in sorted(accusations, key=lambda accusation: -accusation.credibility):
        if all(each.accuser.is_apart_from(other.accuser) for other in independent):
            independent.append(each)
    return sum(each.credibility for each in independent)


def apply_contradiction(
    accusations: Sequence[Accusation], witness: Witness, since: float
) -> tuple[tuple[Accusation, ...], tuple[str, ...]]:
    """The accusations once `witness` has verified bytes of the source that it read after `since`.

    Also the instance_ids of accusers that are contradicted for the first time.
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
