"""Decides what follows from the faults that a target reports of its sources. Pure.

A fault keeps the source from *that fork*, and from later forks of the same host where the source could not be
reached or sent wrong bytes. It counts against the source for everybody (`planner.accusations`) only where the
source itself did wrong and the target had a plan to read from it, so that a cut network, a stalled seed
further up or a target with bad memory cannot put a fleet into quarantine. A source that readers cannot reach
is quarantined only while it misses its own heartbeats as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from planner.accusations import (
    QUORUM,
    Accusation,
    Witness,
    added,
    contradicted,
    reweighed,
    standing,
    total,
    weight_of,
)
from planner.store.records import Blame, ForkRecord, InstanceRecord
from rfork.wire import ForkProgress, SourceFault

AVOIDED: Final = frozenset({"source", "network", "storage"})
"""Faults after which the fork is not sent to the same source again for a while."""
BUSY: Final = "SourceBusy"
CHANGED: Final = "SourceChanged"
GONE: Final = "SourceGone"
STALLED: Final = "SourceStalled"
LATE: Final = 1.5
"""Heartbeat intervals after which a heartbeat is missed; instances send one each 0.8."""
MAX_WITNESSES: Final = 4096

Lookup = Callable[[str], InstanceRecord | None]


@dataclass(frozen=True)
class Verdict:
    """What follows from the faults that a fork has reported so far."""

    blames: Mapping[str, Blame]
    """By instance_id: sources this fork avoids from now on."""
    once: Mapping[str, str]
    """By instance_id, why: sources this fork avoids in the plan that is being made."""
    marked: tuple[InstanceRecord, ...]
    """Records that changed: accused, quarantined, or found gone."""
    shared: Mapping[str, Blame]
    """By instance_id: sources that later forks of this host avoid, too."""

    def without(self, instance_id: str) -> Verdict:
        """The same, but for what was said of one instance."""
        blames = {name: blame for name, blame in self.blames.items() if name != instance_id}
        once = {name: why for name, why in self.once.items() if name != instance_id}
        return replace(self, blames=blames, once=once)


@dataclass(frozen=True)
class Bounds:
    """The settings that verdicts depend on."""

    quarantine_s: float
    heartbeat_s: float

    def is_late(self, record: InstanceRecord, now: float) -> bool:
        """The instance has missed a heartbeat."""
        return now > record.seen_at + LATE * self.heartbeat_s


class AvoidedByHost:
    """Sources that the forks of a host avoid, because one of them could not read from them."""

    def __init__(self) -> None:
        self._blames: OrderedDict[str, dict[str, Blame]] = OrderedDict()

    def of(self, witness: Witness, now: float) -> dict[str, Blame]:
        """By instance_id, what still holds."""
        return {name: blame for name, blame in self._blames.get(witness.key, {}).items() if now < blame.until}

    def set(self, witness: Witness, blames: Mapping[str, Blame]) -> None:
        """Remember these in place of those before."""
        self._blames.pop(witness.key, None)
        if blames:
            self._blames[witness.key] = dict(blames)
        while len(self._blames) > MAX_WITNESSES:
            self._blames.popitem(last=False)


def judge(
    faults: Iterable[SourceFault],
    fork: ForkRecord | None,
    instance: Lookup,
    now: float,
    bounds: Bounds,
    witness: Witness,
    shared: Mapping[str, Blame],
) -> Verdict:
    """Weigh new faults on top of those that `fork` (None: not known until now) reported before.

    `shared`: sources that forks of this host avoid already.
    """
    before = fork.blames if fork else {}
    blames = {**shared, **{accused: blame for accused, blame in before.items() if now < blame.until}}
    avoided = dict(shared)
    once: dict[str, str] = {}
    marked: dict[str, InstanceRecord] = {}
    for fault in faults:
        accused = marked.get(fault.instance_id) or instance(fault.instance_id)
        if accused is None or fault.fault not in AVOIDED:
            continue
        why = f"{fault.error}: {fault.detail}" if fault.detail else fault.error
        if fault.error == BUSY:
            once[fault.instance_id] = why  # it may have room by the next plan
            continue
        generation = _generation_read(fork, accused) if fault.error == CHANGED else None
        wrong = _did_wrong(fault, accused)
        blame = blames[fault.instance_id] = Blame(why, now + bounds.quarantine_s, generation, wrong)
        if generation is None or generation == accused.report.generation:
            once[fault.instance_id] = why
        if fork is None or fault.instance_id not in fork.read_from - {fork.instance_id}:
            continue
        if fault.error == GONE:
            accused = replace(accused, missing=True)
            avoided[fault.instance_id] = blame
            if bounds.is_late(accused, now):
                # Until it is heard of again, or forgotten: a heartbeat more decides that.
                accused = replace(accused, quarantined_until=now + bounds.heartbeat_s, quarantine=why)
        # Bytes torn while the weights changed are no wrong either.
        if wrong and _generation_read(fork, accused) == accused.report.generation:
            others = [name for name, each in blames.items() if each.wrong and name in fork.read_from]
            weight = weight_of(_doubted(instance, witness), len(others))
            for name in others:
                other = marked.get(name) or instance(name)
                if other is not None and name != fault.instance_id:
                    fewer = reweighed(other.accusations, fork.fork_id, weight)
                    marked[name] = _weighed(replace(other, accusations=fewer), now, bounds)
            new = Accusation(witness, fork.fork_id, why, now, blame.until, accused.report.generation, weight)
            accused = replace(accused, accusations=added(accused.accusations, new))
            accused = _weighed(accused, now, bounds)
            # Of a host that accuses several sources its later forks may try each of them again.
            avoided = {name: each for name, each in avoided.items() if not each.wrong}
            if len(others) == 1:
                avoided[fault.instance_id] = blame
        marked[fault.instance_id] = accused
    return Verdict(blames, once, tuple(marked.values()), avoided)


def contradictions(
    before: ForkRecord, progress: ForkProgress, witness: Witness, instance: Lookup, now: float, bounds: Bounds
) -> tuple[InstanceRecord, ...]:
    """Records that change because a fork has verified bytes of sources that others accuse."""
    changed: dict[str, InstanceRecord] = {}
    for read in before.reads:
        accused = instance(read.source_id)
        if accused is None or not accused.accusations or before.progress is None:
            continue
        rose = progress.sources.get(read.source_id, 0) > before.progress.sources.get(read.source_id, 0)
        if not rose or read.generation != accused.report.generation:
            continue
        left, doubted = contradicted(accused.accusations, witness, before.seen_at)
        if left == accused.accusations:
            continue
        changed[read.source_id] = _weighed(replace(accused, accusations=left), now, bounds)
        for name in doubted:
            accuser = changed.get(name) or instance(name)
            if accuser is not None:
                changed[name] = replace(accuser, doubted=accuser.doubted + 1)
    return tuple(changed.values())


def _weighed(record: InstanceRecord, now: float, bounds: Bounds) -> InstanceRecord:
    """The record, quarantined if and only if what is left of its accusations weighs enough."""
    left = standing(record.accusations, record.report.generation, now)
    record = replace(record, accusations=left)
    if not left:
        return record
    if total(left) >= QUORUM or bounds.is_late(record, now):
        return replace(record, quarantined_until=left[-1].until, quarantine=left[-1].why)
    return replace(record, quarantined_until=0.0, quarantine="")


def _doubted(instance: Lookup, witness: Witness) -> int:
    known = instance(witness.instance_id)
    return known.doubted if known is not None else 0


def _generation_read(fork: ForkRecord | None, accused: InstanceRecord) -> int:
    """The generation that the fork was sent to read; what the source reports now where that is not known."""
    reads = fork.reads if fork else ()
    read = (read.generation for read in reads if read.source_id == accused.report.instance_id)
    return next(read, accused.report.generation)


def _did_wrong(fault: SourceFault, accused: InstanceRecord) -> bool:
    """The source itself is at fault.

    New weights are no wrong, a source that cannot be reached may only be out of this target's reach, and a
    relay that stalls may only be waiting for its own source.
    """
    if fault.fault != "source" or fault.error in (CHANGED, GONE):
        return False
    return accused.source.complete or fault.error != STALLED
