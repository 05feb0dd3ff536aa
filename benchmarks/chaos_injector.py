"""Injects the faults of a round of `benchmarks.chaos` when they are due, and undoes them in time."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import Final

from benchmarks import chaos_disk
from benchmarks.chaos_checks import InjectedFault
from benchmarks.chaos_cluster import PLANNER, RATE, ChaosCluster
from benchmarks.chaos_messages import ChaosCommand, ChaosResponse, PlannerForkInfo
from benchmarks.chaos_scenarios import ChaosFault, ChaosRound

LOSS: Final = 0.05


class FaultInjector:
    """Injects the faults of one round. Single-threaded; call `run_due` often."""

    def __init__(
        self,
        cluster: ChaosCluster,
        round_: ChaosRound,
        files: Mapping[str, Path],
        restart_node: Callable[[str], None],
    ) -> None:
        """`files` maps each host to the file that it reads if no instance has the image.

        `restart_node` makes a host that was killed fork again.
        """
        self.injected: list[InjectedFault] = []
        self.first_injected_at: float | None = None
        """When the last fault was injected (`time.monotonic`)."""
        self.killed: set[str] = set()
        self._cluster = cluster
        self._round = round_
        self._files = files
        self._restart_node = restart_node
        self._waiting = list(round_.faults)
        self._graph: tuple[PlannerForkInfo, ...] = ()
        self._undo: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._hit_hosts: set[str] = set()
        self._pending_restarts: set[str] = set()
        self._writing: dict[str, int] = {}

    @property
    def needs_graph(self) -> bool:
        """True if the graph of sources and targets is needed."""
        return any(fault.role == "relay" or fault.fault_type == "torn" for fault in self._waiting)

    @property
    def has_pending_restarts(self) -> bool:
        """True if a killed host is still to be restarted."""
        return bool(self._pending_restarts)

    @property
    def has_pending_snapshots(self) -> bool:
        """True if a seed has not reported its snapshot yet."""
        return any(host in self._cluster.nodes for host in self._writing)

    def set_graph(self, graph: Sequence[PlannerForkInfo]) -> None:
        """Set the graph of which target reads from which source."""
        self._graph = tuple(graph)

    def on_response(self, host: str, response: ChaosResponse) -> None:
        """Handle the result of a seed's attempt to write a snapshot.

        The seed must report the error, leave no temporary file, and continue to serve.
        """
        if (index := self._writing.pop(host, None)) is None:
            return
        left = {path.name for path in self._cluster.disk(host, inside=False).iterdir()} - {chaos_disk.FILLER}
        if not response.error.startswith(f"{host}: StorageFull") or left:
            error = f"a snapshot onto a full disk: {response.error or 'written'}, left {left}"
            self.injected[index] = replace(self.injected[index], error=error)

    @property
    def max_duration_s(self) -> float:
        """Longest time for which a killed host is down."""
        return max((each.duration_s or 0.0 for each in self._round.faults if each.fault_type == "kill"), default=0.0)

    def run_due(self, progress: Mapping[str, float], ended: Collection[str]) -> None:
        """Inject due faults. `progress` is each target's share of the image, `ended` are the finished
        targets.
        """
        now = time.monotonic()
        while self._undo and self._undo[0][0] <= now:
            heapq.heappop(self._undo)[2]()
        for fault in list(self._waiting):
            watched = f"t{fault.trigger_target}"
            if progress.get(watched, 0.0) >= fault.trigger_fraction or watched in ended or watched in self.killed:
                self._waiting.remove(fault)
                self._inject(fault, ended)

    def undo_all(self) -> None:
        """Undo all remaining faults; nothing is injected or restarted afterwards."""
        self._waiting.clear()
        self._pending_restarts.clear()
        while self._undo:
            heapq.heappop(self._undo)[2]()

    # -- hosts --------------------------------------------------------------------------------------

    def _inject(self, fault: ChaosFault, ended: Collection[str]) -> None:
        role, candidates = fault_candidates(self._round, fault, self._graph, ended, self._hit_hosts)
        if not candidates:
            return
        host = candidates[min(int(fault.choice * len(candidates)), len(candidates) - 1)]
        self._hit_hosts.add(host)
        self.first_injected_at = time.monotonic()
        self.injected.append(InjectedFault(fault.fault_type, role, host))
        self._apply(fault, host)

    # -- faults -------------------------------------------------------------------------------------

    def _apply(self, fault: ChaosFault, host: str) -> None:
        lab = self._cluster.lab
        match fault.fault_type:
            case "kill":
                self._kill(fault, host)
            case "stop":
                self._stop(fault, host)
            case "cut":
                lab.cut(host)
                self._schedule(fault.duration_s, lambda: lab.heal(host))
            case "loss":
                lab.shape(host, rate=RATE, loss=LOSS)
                self._schedule(None, lambda: lab.shape(host, rate=RATE))
            case "torn":
                chaos_disk.truncate(self._files[host])
            case "full":
                self._fill(fault, host)

    def _kill(self, fault: ChaosFault, host: str) -> None:
        cluster, store = self._cluster, self._round.store
        match fault.role:
            case "planner":
                cluster.planners[store].kill()
                self._schedule(fault.duration_s, lambda: cluster.start_planner(store))
            case "redis":
                cluster.signal_redis(SIGKILL)
                self._schedule(fault.duration_s, cluster.start_redis)
            case _:
                cluster.nodes[host].process.kill()
                self.killed.add(host)
                if fault.duration_s is not None:
                    self._pending_restarts.add(host)
                    self._schedule(fault.duration_s, lambda: self._revive_later(host))

    def _revive_later(self, host: str) -> None:
        if host in self._pending_restarts:
            self._pending_restarts.discard(host)
            self.killed.discard(host)
            self._restart_node(host)

    def _stop(self, fault: ChaosFault, host: str) -> None:
        cluster = self._cluster
        send: Callable[[Signals], None]
        match fault.role:
            case "planner":
                send = cluster.planners[self._round.store].signal
            case "redis":
                send = cluster.signal_redis
            case _:
                send = cluster.nodes[host].process.signal
        send(SIGSTOP)
        self._schedule(fault.duration_s, lambda: send(SIGCONT))

    def _fill(self, fault: ChaosFault, host: str) -> None:
        disk = self._cluster.disk(host, inside=False)
        chaos_disk.fill(disk)
        self._schedule(None, lambda: chaos_disk.clear(disk))
        if fault.role == "seed":  # a seed writes only snapshots to disk
            self._writing[host] = len(self.injected) - 1
            inside = str(self._cluster.disk(host, inside=True))
            self._cluster.nodes[host].send(ChaosCommand("snapshot", folder=inside))

    def _schedule(self, seconds: float | None, undo: Callable[[], None]) -> None:
        at = time.monotonic() + seconds if seconds is not None else float("inf")
        heapq.heappush(self._undo, (at, next(self._order), undo))


def fault_candidates(
    round_: ChaosRound,
    fault: ChaosFault,
    graph: Sequence[PlannerForkInfo],
    ended: Collection[str],
    hit_hosts: Collection[str],
) -> tuple[str, list[str]]:
    """Return the role, and the hosts that have it and are not in `hit_hosts`.

    If no target has readers, any target stands in for a relay; if none reads storage, any target stands in
    for a reader. Targets that are still forking (not in `ended`) come first.
    """
    if fault.role in ("planner", "redis"):
        return fault.role, [PLANNER]
    if fault.role == "seed":
        return "seed", [host for host in round_.seed_hosts if host not in hit_hosts]
    free = [host for host in round_.target_hosts if host not in hit_hosts]
    forking = [host for host in free if host not in ended] or free
    if fault.fault_type == "torn":
        readers = {fork_info.host for fork_info in graph if fork_info.host in fork_info.sources}
        return "target", [host for host in forking if host in readers] or forking
    if fault.role == "relay":
        serving = {source for fork_info in graph for source in fork_info.sources if source != fork_info.host}
        relays = [host for host in free if host in serving]
        return ("relay", relays) if relays else ("target", forking)
    return "target", forking
