"""Working state of one planning call: the group with the decisions made so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

from planner.policy.background import (
    accepted_forks,
    free_slots,
    is_waiting,
    reserved_slots,
    targets_waited_for,
    uses_busy_link,
)
from planner.policy.transports import is_same_host_read
from planner.policy.types import SLOW_FRACTION, ChunkShare, ForkDemand, GroupView, PlanDecision, Source
from planner.policy.weights import weights_compatible, with_storage_weights, with_weights
from rfork.image.ranges import Range, count, intersect, normalise, subtract

MAX_UPSTREAM_SOURCES: Final = 64
"""Number of upstream sources after which a target without readers is assumed not to close a cycle."""
IDLE_LOAD: Final = 0.01
"""Load below which a source counts as idle."""
NO_READERS: Final[Mapping[str, float]] = {}
NO_NAMES: Final[AbstractSet[str]] = frozenset()


class PlanState:
    """Sources, readers and shares of the group, overlaid with the decisions made so far."""

    def __init__(self, group: GroupView, demands: Iterable[ForkDemand], now: float) -> None:
        self.group = group
        self.now = now
        self.decisions: dict[str, PlanDecision] = {}
        self._demands = {demand.target.instance_id: demand for demand in demands}
        self._fork_ids = {demand.fork_id for demand in self._demands.values()}
        self.plans_background = False
        """True while background forks are planned: they also count the load of one another, and leave slots free."""
        self._background_forks = {
            **group.background_forks,
            **{demand.fork_id: name for name, demand in self._demands.items() if demand.target.background},
        }
        self._waited_for: frozenset[str] | None = None
        self._waiting_engines: list[Source] | None = None
        self._shares: dict[str, tuple[ChunkShare, ...]] = {}
        self._readers: dict[str, dict[str, float]] = {}
        self._changed_same_host_readers: dict[str, set[str]] = {}
        for demand in self._demands.values():
            # Until it is planned, each target is assumed to keep its current reads.
            self._set_shares(demand, tuple(share for share in demand.current_shares if self._is_valid(share, demand)))
        self._relied_on = self._targets_waited_for
        """Holders' images that engines' forks depended on before this call."""

    def source(self, instance_id: str) -> Source | None:
        """Return the instance, if it is known and alive; a target as described by its demand or decision."""
        demand = self._demands.get(instance_id)
        found = demand.target if demand is not None else self.group.sources.get(instance_id)
        if found is None or self.now >= found.expires_at:
            return None
        if found.weights_id or found.provisional_id or not found.storage:
            return found
        # It has reported no chunks yet, but the storage it was elected to read is known.
        elected = any(share.source_id == instance_id for share in self.shares(instance_id))
        return replace(with_storage_weights(found, found.storage[0]), verified=()) if elected else found

    def shares(self, instance_id: str) -> tuple[ChunkShare, ...]:
        """Return what a target reads, by source."""
        if instance_id in self._shares:
            return self._shares[instance_id]
        return self.group.shares.get(instance_id, ())

    def readers(self, instance_id: str) -> Mapping[str, float]:
        """Return the forks that read from an instance, with the fraction of its reads that each makes there."""
        if (readers := self._readers.get(instance_id)) is not None:
            return readers
        readers_of_group = self.group.readers.get(instance_id, NO_READERS)
        # Nearly always no reader is planned in this call, so that no copy is needed.
        if self._fork_ids.isdisjoint(readers_of_group):
            return readers_of_group
        return self._readers_of(instance_id)

    def load(self, source: Source, target: Source | None = None) -> float:
        """Return the load of the source in targets at full speed, relative to its egress share.

        Reads within its host do not load its network link: they count only for a `target` that would also
        stay on the host. Background forks count only for one another: they yield to others. A holder's image and an
        engine on one host share its link.
        """
        if not self.readers(source.instance_id) and not self.group.shared_hosts:
            return 0.0  # nearly every source of a large group
        if target is not None and is_same_host_read(source, target):
            return self._load(source.instance_id, same_host=True) / source.egress_share
        names = self.group.shared_hosts.get(source.location.host)
        if names is None:
            return self._load(source.instance_id, same_host=False) / source.egress_share
        return sum(self._load(name, same_host=False) for name in names) / source.egress_share

    def _load(self, instance_id: str, *, same_host: bool) -> float:
        readers = self.readers(instance_id)
        if not readers:
            return 0.0
        excluded = self._same_host_readers(instance_id)
        if not self._background_forks or self.plans_background:
            if same_host or not excluded:
                return sum(readers.values())
            return sum(share for fork_id, share in readers.items() if fork_id not in excluded)
        return sum(
            share
            for fork_id, share in readers.items()
            if self._waits(fork_id) and (same_host or fork_id not in excluded)
        )

    def spare_egress(self, source: Source, target: Source | None = None) -> float:
        """Return the fraction of a target's full speed that the source can serve without slowing its readers."""
        return max(0.0, 1.0 - self.load(source, target))

    def free_slots(self, source: Source, target: Source | None = None) -> int:
        """Return how many more forks may read from the source; `target`: the next of them, if it is known."""
        instance_id = source.instance_id
        same_host = target is not None and is_same_host_read(source, target)
        has_own_engine = source.background and any(map(self._waits, self._same_host_readers(instance_id)))
        readers = len(self.readers(instance_id))
        free = free_slots(source, readers, same_host=same_host, has_own_engine=has_own_engine)
        if self.plans_background and free > 0:
            engine_waits = accepted_forks(source) == 1 and bool(self.waiting_engines)
            free -= reserved_slots(source, same_host=same_host, engine_waits=engine_waits)
        return free

    # -- background forks, see `planner.policy.background` ----------------------------------------------

    def is_background(self, target: Source) -> bool:
        """Return True if no engine waits for the target's fork."""
        return target.background and target.instance_id not in self._targets_waited_for

    def must_yield(self, source: Source, target: Source) -> bool:
        """Return True if the target must not read from the source now, because engines' forks use the link."""
        if not self.is_background(target) or is_same_host_read(source, target):
            return False
        if uses_busy_link(source, target, self.group.receiving_hosts, self.group.sending_hosts):
            return True
        names = self.group.shared_hosts.get(source.location.host, (source.instance_id,))
        if any(self._serves_engines(name) for name in names):
            return True
        return any(self._reads_network(demand.target, target.location.host) for demand in self._demands.values())

    def leaves_storage(self, target: Source) -> bool:
        """Return True if the target must not read its storage, because an engine that waits can read its own."""
        return (
            self.is_background(target) and bool(target.storage) and any(each.storage for each in self.waiting_engines)
        )

    @property
    def waiting_engines(self) -> list[Source]:
        """Targets of engines that miss chunks for which their plan has no source."""
        if self._waiting_engines is None:
            names = dict.fromkeys((*self.group.shares, *self._demands))
            targets = [target for name in names if (target := self.source(name)) is not None]
            self._waiting_engines = [each for each in targets if is_waiting(each, self.shares(each.instance_id))]
        return self._waiting_engines

    @property
    def _targets_waited_for(self) -> frozenset[str]:
        if self._waited_for is None:
            names = dict.fromkeys((*self.group.shares, *self._demands)) if self._background_forks else ()
            self._waited_for = targets_waited_for(names, self.source, self.shares)
        return self._waited_for

    def _changed_reads(self, demand: ForkDemand, shares: Iterable[ChunkShare]) -> None:
        """Record that these reads of the demand's target begin or end."""
        self._waiting_engines = None
        if self._background_forks and self._waited_for is not None:
            sources = (self.source(share.source_id) for share in shares)
            if demand.target.background or any(source is not None and source.background for source in sources):
                self._waited_for = None

    def _waits(self, fork_id: str) -> bool:
        """Return True for a fork that an engine waits for: not for a background fork."""
        target = self._background_forks.get(fork_id)
        return target is None or target in self._targets_waited_for

    def _serves_engines(self, instance_id: str) -> bool:
        same_host = self._same_host_readers(instance_id)
        return any(name not in same_host and self._waits(name) for name in self.readers(instance_id))

    def _reads_network(self, target: Source, host: str) -> bool:
        """Return True if a target on this host, which an engine waits for, reads over the network."""
        if target.location.host != host or self.is_background(target):
            return False
        sources = (self.source(share.source_id) for share in self._shares[target.instance_id])
        return any(
            source is not None and source.instance_id != target.instance_id and not is_same_host_read(source, target)
            for source in sources
        )

    def _will_receive(self, relay: Source) -> tuple[ChunkShare, ...]:
        """Return the reads of an instance that its readers can rely on: not those of a fork that is about to pause."""
        shares = self.shares(relay.instance_id)
        if relay.instance_id in self._relied_on or not self.is_background(relay):
            return shares
        sources = {share.source_id: self.source(share.source_id) for share in shares}
        return tuple(
            share
            for share in shares
            if (source := sources[share.source_id]) is None
            or source.instance_id == relay.instance_id
            or not self.must_yield(source, relay)
        )

    def is_known(self, source: Source) -> bool:
        """Return True if the source's own reads are known. After a restart they are not, until it replans."""
        name = source.instance_id
        return source.complete or name in self._demands or name in self.group.shares

    def planned(self) -> list[str]:
        """Return the targets of this batch that have reads by now, or are complete."""
        return [name for name, each in self._demands.items() if self._shares[name] or each.target.complete]

    def unplanned(self) -> list[ForkDemand]:
        """Return the demands without reads, or whose sources will not have the chunks after all."""
        relied_on = any(demand.current_shares for demand in self._demands.values())
        return [
            demand
            for name, demand in self._demands.items()
            if not self._shares[name] or (relied_on and self._lacks_chunks(demand.target))
        ]

    def _lacks_chunks(self, target: Source) -> bool:
        """Return True if a known source of the target will not have all chunks that the target reads from it."""
        for share in self._shares[target.instance_id]:
            source = self.source(share.source_id)
            if share.source_id == target.instance_id or source is None or not self.is_known(source):
                continue
            if self.available_chunks(source, share.chunks, target) != normalise(share.chunks):
                return True
        return False

    def is_unplanned(self, instance_id: str) -> bool:
        """Return True if the instance is a target of this batch without a decision."""
        demand = self._demands.get(instance_id)
        return demand is not None and demand.fork_id not in self.decisions

    def decide(self, demand: ForkDemand, decision: PlanDecision) -> None:
        """Store the decision, and make it visible to later ones of the batch."""
        target = demand.target
        storage_shares = tuple(
            ChunkShare(target.instance_id, chunks, all_or_nothing=storage.kind == "loader")
            for storage, chunks in decision.storage
        )
        self.decisions[demand.fork_id] = decision
        if len(self._demands) == 1:
            return  # there is no later one
        if decision.assignments or storage_shares:
            demand = with_weights(demand, decision.weights_id, decision.provisional_id)
        self._demands[target.instance_id] = demand
        self.release(demand)
        self._set_shares(demand, decision.shares + storage_shares)

    def release(self, demand: ForkDemand) -> None:
        """Discard the reads of the demand's target before it is planned again."""
        self._changed_reads(demand, self._shares[demand.target.instance_id])
        for share in self._shares[demand.target.instance_id]:
            self._readers_of(share.source_id).pop(demand.fork_id, None)
            self._same_host_readers_of(share.source_id).discard(demand.fork_id)
        self._shares[demand.target.instance_id] = ()

    def available_chunks(self, source: Source, wanted: tuple[Range, ...], target: Source) -> tuple[Range, ...]:
        """Return the `wanted` chunks that the source has or will receive.

        It receives them through live sources with the same weights that do not read these chunks from the target: the
        last of them has the chunks, or reads them from storage.
        """
        if source.complete and weights_compatible(source, target):
            return wanted  # the most frequent case by far
        found: list[Range] = []
        visited: dict[str, tuple[Range, ...]] = {}
        pending = [(source.instance_id, wanted)]
        target_is_read = bool(self.readers(target.instance_id))
        while pending:
            instance_id, chunks = pending.pop()
            if instance_id == target.instance_id:
                continue
            upstream = self.source(instance_id)
            if upstream is None or not weights_compatible(upstream, target):
                continue
            chunks = subtract(chunks, visited.get(instance_id, ()))
            visited[instance_id] = normalise((*visited.get(instance_id, ()), *chunks))
            # Chunks of unknown weights cannot be matched.
            available = intersect(chunks, upstream.verified) if upstream.weights_id or upstream.provisional_id else ()
            found.extend(available)
            chunks = subtract(chunks, available)
            if not chunks:
                continue
            if len(visited) > MAX_UPSTREAM_SOURCES and not target_is_read:
                found.extend(chunks)
                continue
            for share in self._will_receive(upstream):
                part = intersect(chunks, share.chunks)
                if part and share.source_id == instance_id:
                    found.extend(() if share.all_or_nothing and self.group.loader_only else part)
                elif part:
                    pending.append((share.source_id, part))
        return normalise(found)

    def links(self, source: Source, chunk: int) -> int:
        """Return the number of links that a chunk passes until the source has it, as far as they are known."""
        links, visited = 0, {source.instance_id}
        upstream: Source | None = source
        while upstream is not None and not _contains(upstream.verified, chunk):
            links += 1
            parents = (each.source_id for each in self.shares(upstream.instance_id) if _contains(each.chunks, chunk))
            parent = next(parents, None)
            if parent is None or parent in visited:
                break
            visited.add(parent)
            upstream = self.source(parent)
        return links

    def _is_valid(self, share: ChunkShare, demand: ForkDemand) -> bool:
        """Return True if a target can keep a read: its source is alive and not excluded, or it has storage."""
        if share.source_id in demand.excluded:
            return False
        if share.source_id == demand.target.instance_id:
            return bool(demand.target.storage)
        return self.source(share.source_id) is not None

    def _set_shares(self, demand: ForkDemand, shares: tuple[ChunkShare, ...]) -> None:
        """Record what the demand's target reads, and count it as a reader of its sources."""
        target_id = demand.target.instance_id
        self._changed_reads(demand, shares)
        self._shares[target_id] = shares
        total = sum(count(share.chunks) for share in shares)
        speed = SLOW_FRACTION if demand.target.slow else 1.0
        for share in shares:
            if share.source_id != target_id and share.chunks:
                self._readers_of(share.source_id)[demand.fork_id] = speed * count(share.chunks) / total
                source = self.source(share.source_id)
                if source is not None and is_same_host_read(source, demand.target):
                    self._same_host_readers_of(share.source_id).add(demand.fork_id)

    def _readers_of(self, instance_id: str) -> dict[str, float]:
        """Return the table of the instance's readers in which this call records its changes."""
        if instance_id not in self._readers:
            group_readers = self.group.readers.get(instance_id, {})
            self._readers[instance_id] = {
                fork_id: share for fork_id, share in group_readers.items() if fork_id not in self._fork_ids
            }
        return self._readers[instance_id]

    def _same_host_readers(self, instance_id: str) -> AbstractSet[str]:
        """Return the instance's readers that stay within its host."""
        if (changed := self._changed_same_host_readers.get(instance_id)) is not None:
            return changed
        readers = self.group.same_host_readers.get(instance_id)
        return readers - self._fork_ids if readers else NO_NAMES

    def _same_host_readers_of(self, instance_id: str) -> set[str]:
        """Return the set of these readers in which this call records its changes."""
        if instance_id not in self._changed_same_host_readers:
            self._changed_same_host_readers[instance_id] = set(self._same_host_readers(instance_id))
        return self._changed_same_host_readers[instance_id]


def _contains(ranges: Iterable[Range], chunk: int) -> bool:
    return any(begin <= chunk < end for begin, end in ranges)
