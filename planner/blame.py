"""Who is to blame when a fork fails to read: weighs what a target says of its sources.

A word from one target keeps a source from *that fork*. It keeps a source from others only where the
source itself did wrong and the target had a plan to read from it, so that a cut network or a stalled
seed further up cannot put a fleet into quarantine. Nor can a target whose own memory is bad: to one that
says it of a second source nobody listens any more, and what it said of the first is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from planner.store.records import Blame, ForkRecord, InstanceRecord
from rfork.wire import SourceFault

AVOIDED: Final = frozenset({"source", "network", "storage"})
"""Faults after which the fork is not sent to the same source again for a while."""
BUSY: Final = "SourceBusy"
CHANGED: Final = "SourceChanged"
GONE: Final = "SourceGone"
STALLED: Final = "SourceStalled"


@dataclass(frozen=True)
class Verdict:
    """What follows from the faults that a fork has reported so far."""

    blames: Mapping[str, Blame]
    """By instance_id: sources this fork avoids from now on."""
    once: Mapping[str, str]
    """By instance_id, why: sources this fork avoids in the plan that is being made."""
    marked: tuple[InstanceRecord, ...]
    """Records that changed: quarantined, or found gone."""

    def without(self, instance_id: str) -> Verdict:
        """The same, but for what was said of one instance."""
        blames = {name: blame for name, blame in self.blames.items() if name != instance_id}
        once = {name: why for name, why in self.once.items() if name != instance_id}
        return replace(self, blames=blames, once=once)


def judge(
    faults: Iterable[SourceFault],
    fork: ForkRecord | None,
    instance: Callable[[str], InstanceRecord | None],
    now: float,
    quarantine_s: float,
) -> Verdict:
    """Weigh new faults on top of those that `fork` (None: not known until now) reported before."""
    blames = {accused: blame for accused, blame in fork.blames.items() if now < blame.until} if fork else {}
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
        blames[fault.instance_id] = Blame(why, now + quarantine_s, generation, wrong)
        if generation is None or generation == accused.report.generation:
            once[fault.instance_id] = why
        if fork is None or fault.instance_id not in fork.read_from - {fork.instance_id}:
            continue
        if fault.error == GONE:
            accused = replace(accused, missing=True)
        # Bytes torn while the weights changed are no wrong either.
        if wrong and _generation_read(fork, accused) == accused.report.generation:
            others = [name for name, blame in blames.items() if blame.wrong and name != fault.instance_id]
            if not others:
                accused = replace(accused, quarantined_until=now + quarantine_s, quarantine=why)
            for name in others:
                other = marked.get(name) or instance(name)
                if other is not None and other.quarantine == blames[name].why:
                    marked[name] = replace(other, quarantined_until=0.0, quarantine="")
        marked[fault.instance_id] = accused
    return Verdict(blames, once, tuple(marked.values()))


def _generation_read(fork: ForkRecord | None, accused: InstanceRecord) -> int:
    """The generation that the fork was sent to read; what the source reports now where that is not known."""
    reads = fork.reads if fork else ()
    read = (read.generation for read in reads if read.source_id == accused.report.instance_id)
    return next(read, accused.report.generation)


def _did_wrong(fault: SourceFault, accused: InstanceRecord) -> bool:
    """Whether others should be kept from the source.

    New weights are no wrong, and a relay that stalls may only be waiting for its own source.
    """
    if fault.fault != "source" or fault.error == CHANGED:
        return False
    return accused.source.complete or fault.error != STALLED
