"""Decides the consequences of the faults that a target reports against its sources.

After a fault, *that fork* avoids the source, and so do later forks of the same host if the source was
unreachable or sent wrong bytes. The fault counts against the source for every reader, as an accusation, only
if the source itself is at fault and the target had a plan to read from it, so that a cut network, a stalled
seed further upstream or a target with bad memory cannot quarantine a fleet. An unreachable source is
quarantined only while it also misses its own heartbeats. Other readers are kept from an accused source
(quarantine) only when readers on two hosts accuse it.

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
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from planner.core.records import Accusation, ForkRecord, InstanceRecord, SourceFaultRecord, Witness, active_accusations
from planner.core.state import PlannerState
from rfork.schema import ForkProgress, SourceFault

QUORUM: Final = 2.0
"""Credibility at which a source is quarantined: two undoubted readers."""
MAX_KEPT: Final = 16
"""Accusations kept per source; the newest ones win."""
MAX_DOUBT: Final = 8
MAX_WITNESSES: Final = 4096
"""Readers whose addresses, and the sources that they avoid, are kept."""


@lru_cache(MAX_WITNESSES)
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


AVOIDED_FAULTS: Final = frozenset({"source", "network", "storage"})
"""Faults after which the fork avoids the source for some time."""
MISMATCH: Final = "LayoutMismatch"
"""Error of a source that cannot serve this target, although it works; the target avoids it as well."""
BUSY: Final = "SourceBusy"
CHANGED: Final = "SourceWeightsChanged"
UNAVAILABLE: Final = "SourceUnavailable"
STALLED: Final = "SourceTimeout"
QUARANTINE_S: Final = 60.0
"""Time for which a source that sent wrong bytes or stalled is assigned no readers."""
LATE_HEARTBEAT_FACTOR: Final = 1.5
"""Heartbeat intervals after which a heartbeat counts as missed; instances send one every 0.8 intervals."""


@dataclass(frozen=True, slots=True)
class FaultAssessment:
    """Consequences of the faults that a fork has reported so far."""

    faults_by_source: Mapping[str, SourceFaultRecord]
    """By instance_id: sources that this fork avoids from now on."""
    excluded_once: Mapping[str, str]
    """Reason by instance_id: sources that this fork avoids in the plan being made."""
    changed_records: tuple[InstanceRecord, ...]
    """Records that changed: accused, quarantined, or reported missing."""
    shared_faults: Mapping[str, SourceFaultRecord]
    """By instance_id: sources that later forks of this host avoid too."""

    def without_instance(self, instance_id: str) -> FaultAssessment:
        """Return the assessment without the faults of one instance."""
        faults_by_source = {name: record for name, record in self.faults_by_source.items() if name != instance_id}
        excluded_once = {name: reason for name, reason in self.excluded_once.items() if name != instance_id}
        return replace(self, faults_by_source=faults_by_source, excluded_once=excluded_once)


class AvoidedByHost:
    """Sources that the forks of a host avoid because one of them could not read from them."""

    def __init__(self) -> None:
        self._faults_by_host: OrderedDict[str, dict[str, SourceFaultRecord]] = OrderedDict()

    def get(self, witness: Witness, now: float) -> dict[str, SourceFaultRecord]:
        """Return the faults that have not expired, by instance_id."""
        faults = self._faults_by_host.get(witness.key, {})
        return {source_id: record for source_id, record in faults.items() if now < record.until}

    def set(self, witness: Witness, faults_by_source: Mapping[str, SourceFaultRecord]) -> None:
        """Replace the faults stored for this host."""
        self._faults_by_host.pop(witness.key, None)
        if faults_by_source:
            self._faults_by_host[witness.key] = dict(faults_by_source)
        while len(self._faults_by_host) > MAX_WITNESSES:
            self._faults_by_host.popitem(last=False)


def assess_faults(
    faults: Iterable[SourceFault],
    fork: ForkRecord | None,
    state: PlannerState,
    now: float,
    heartbeat_s: float,
    witness: Witness,
    shared_faults: Mapping[str, SourceFaultRecord],
) -> FaultAssessment:
    """Assess new faults in addition to those that `fork` (None if unknown until now) reported before.

    `shared_faults`: sources that forks of this host already avoid.
    """
    reported_before = fork.faults_by_source if fork else {}
    faults_by_source = {
        **shared_faults,
        **{source_id: record for source_id, record in reported_before.items() if now < record.until},
    }
    avoided_by_host = dict(shared_faults)
    excluded_once: dict[str, str] = {}
    changed_records: dict[str, InstanceRecord] = {}
    for fault in faults:
        source_id = fault.instance_id
        source = changed_records.get(source_id) or state.instance(source_id)
        if source is None or (fault.fault not in AVOIDED_FAULTS and fault.error != MISMATCH):
            continue
        reason = f"{fault.error}: {fault.detail}" if fault.detail else fault.error
        if fault.error == BUSY:
            excluded_once[source_id] = reason  # it may have a free slot by the next plan
            continue
        generation = _planned_generation(fork, source) if fault.error == CHANGED else None
        is_source_fault = _is_source_fault(fault, source)
        fault_record = SourceFaultRecord(reason, now + QUARANTINE_S, generation, is_source_fault)
        faults_by_source[source_id] = fault_record
        if generation is None or generation == source.report.generation:
            excluded_once[source_id] = reason
        if fork is None or source_id not in fork.sources_used - {fork.instance_id}:
            continue
        if fault.error == UNAVAILABLE:
            avoided_by_host[source_id] = fault_record
            source = replace(source, reported_missing=True)
            if _is_late(source, now, heartbeat_s):
                # Until it reports again or is forgotten: one more heartbeat decides that.
                source = replace(source, quarantined_until=now + heartbeat_s, quarantine=reason)
        # Bytes torn by a weight update are not a fault of the source either.
        if is_source_fault and _planned_generation(fork, source) == source.report.generation:
            accused_ids = [
                name for name, each in faults_by_source.items() if each.is_source_fault and name in fork.sources_used
            ]
            credibility = accuser_credibility(_contradiction_count(state, witness), len(accused_ids))
            # Each further accusation makes the fork's earlier ones less credible.
            for name in accused_ids:
                other = changed_records.get(name) or state.instance(name)
                if other is not None and name != source_id:
                    reduced = with_reduced_credibility(other.accusations, fork.fork_id, credibility)
                    changed_records[name] = _quarantine_if_due(replace(other, accusations=reduced), now, heartbeat_s)
            accusation = Accusation(
                witness, fork.fork_id, reason, now, fault_record.until, source.report.generation, credibility
            )
            source = replace(source, accusations=with_accusation(source.accusations, accusation))
            source = _quarantine_if_due(source, now, heartbeat_s)
            # If a host accuses several sources, its later forks may try each of them again.
            avoided_by_host = {name: each for name, each in avoided_by_host.items() if not each.is_source_fault}
            if accused_ids == [source_id]:
                avoided_by_host[source_id] = fault_record
        changed_records[source_id] = source
    return FaultAssessment(faults_by_source, excluded_once, tuple(changed_records.values()), avoided_by_host)


def contradictions(
    before: ForkRecord,
    progress: ForkProgress,
    witness: Witness,
    state: PlannerState,
    now: float,
    heartbeat_s: float,
) -> tuple[InstanceRecord, ...]:
    """Return the records that change because a fork verified bytes of sources that others accuse."""
    changed: dict[str, InstanceRecord] = {}
    for read in before.reads:
        source = state.instance(read.source_id)
        if source is None or not source.accusations or before.progress is None:
            continue
        progressed = progress.sources.get(read.source_id, 0) > before.progress.sources.get(read.source_id, 0)
        if not progressed or read.generation != source.report.generation:
            continue
        remaining, contradicted_ids = apply_contradiction(source.accusations, witness, before.seen_at)
        if remaining == source.accusations:
            continue
        changed[read.source_id] = _quarantine_if_due(replace(source, accusations=remaining), now, heartbeat_s)
        for name in contradicted_ids:
            accuser = changed.get(name) or state.instance(name)
            if accuser is not None:
                changed[name] = replace(accuser, contradiction_count=accuser.contradiction_count + 1)
    return tuple(changed.values())


def _quarantine_if_due(record: InstanceRecord, now: float, heartbeat_s: float) -> InstanceRecord:
    """Return the record, quarantined if and only if its remaining accusations are credible enough."""
    active = active_accusations(record.accusations, record.report.generation, now)
    record = replace(record, accusations=active)
    if not active:
        return record
    # Missed heartbeats confirm that a source does not respond, but not that it sent wrong bytes.
    is_silent = any(each.error == STALLED for each in active) and _is_late(record, now, heartbeat_s)
    if total_credibility(active) >= QUORUM or is_silent:
        return replace(record, quarantined_until=active[-1].until, quarantine=active[-1].reason)
    return replace(record, quarantined_until=0.0, quarantine="")


def _contradiction_count(state: PlannerState, witness: Witness) -> int:
    accuser = state.instance(witness.instance_id)
    return accuser.contradiction_count if accuser is not None else 0


def _planned_generation(fork: ForkRecord | None, source: InstanceRecord) -> int:
    """Return the generation that the fork was planned to read, or if unknown, the source's current one."""
    reads = fork.reads if fork else ()
    generations = (read.generation for read in reads if read.source_id == source.report.instance_id)
    return next(generations, source.report.generation)


def _is_source_fault(fault: SourceFault, source: InstanceRecord) -> bool:
    """Return True if the source itself is at fault.

    A weight update is not a fault, an unreachable source may only be unreachable for this target, and a
    stalled relay may only be waiting for its own source.
    """
    if fault.fault != "source" or fault.error in (CHANGED, UNAVAILABLE):
        return False
    return source.source.complete or fault.error != STALLED


def _is_late(record: InstanceRecord, now: float, heartbeat_s: float) -> bool:
    """Return True if the instance has missed a heartbeat."""
    return now > record.seen_at + LATE_HEARTBEAT_FACTOR * heartbeat_s
