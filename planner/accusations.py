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
    why: str
    at: float
    until: float
    """When it counts no more."""
    generation: int
    """Of the source's weights that were read."""
    weight: float = 1.0
    contradicted_by: tuple[str, ...] = ()
    """Keys of witnesses that read well from the source since."""


def address_of(client: str | None) -> str:
    """The network address of a caller, where it tells callers apart; else empty."""
    try:
        found = ipaddress.ip_address(client or "")
    except ValueError:
        return ""
    return "" if found.is_loopback else str(found)


def weight_of(doubted: int, accused: int) -> float:
    """The weight of one whose accuser was contradicted so often, and accuses so many sources."""
    return 0.5 ** min(doubted, MAX_DOUBT) / max(1, accused)


def added(known: Sequence[Accusation], new: Accusation) -> tuple[Accusation, ...]:
    """The accusations with a new one; one fork accuses a source once."""
    others = [each for each in known if each.fork_id != new.fork_id]
    return (*others, new)[-MAX_KEPT:]


def reweighed(known: Sequence[Accusation], fork_id: str, weight: float) -> tuple[Accusation, ...]:
    """The accusations, that of one fork with no more than this weight."""
    return tuple(
        replace(each, weight=min(each.weight, weight)) if each.fork_id == fork_id else each for each in known
    )


def standing(known: Iterable[Accusation], generation: int, now: float) -> tuple[Accusation, ...]:
    """Those that still count: not too old, and about the weights that the source has now."""
    return tuple(each for each in known if each.generation == generation and now < each.until)


def total(known: Iterable[Accusation]) -> float:
    """The weight of all together; of readers that are not apart the heaviest counts."""
    chosen: list[Accusation] = []
    for each in sorted(known, key=lambda accusation: -accusation.weight):
        if all(each.accuser.is_apart_from(other.accuser) for other in chosen):
            chosen.append(each)
    return sum(each.weight for each in chosen)


def contradicted(
    known: Sequence[Accusation], witness: Witness, since: float
) -> tuple[tuple[Accusation, ...], tuple[str, ...]]:
    """The accusations once `witness` has verified bytes of the source that it read after `since`.

    Also the instance_ids of accusers that are contradicted for the first time.
    """
    after: list[Accusation] = []
    doubted: list[str] = []
    for each in known:
        again = witness.key in each.contradicted_by
        if each.at > since or again or not witness.is_apart_from(each.accuser):
            after.append(each)
            continue
        if not each.contradicted_by:
            doubted.append(each.accuser.instance_id)
        after.append(
            replace(
                each, weight=each.weight / 2, contradicted_by=(*each.contradicted_by, witness.key)[-MAX_KEPT:]
            )
        )
    return tuple(after), tuple(doubted)
