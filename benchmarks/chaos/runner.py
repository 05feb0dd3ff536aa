"""Runs the rounds of `benchmarks.chaos` one at a time and collects the observations."""

from __future__ import annotations

import heapq
import itertools
import shutil
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import Final

from benchmarks.chaos import disk
from benchmarks.chaos.checks import Finding, ForkEnding, InjectedFault, RoundObservation
from benchmarks.chaos.cluster import DEADLINE_S, PLANNER, PORTS, RATE, WINDOW, ChaosCluster
from benchmarks.chaos.messages import ChaosCommand, ChaosResponse, PlannerForkInfo
from benchmarks.chaos.node import CHECKPOINT, SNAPSHOT, Inspector
from benchmarks.chaos.scenarios import ChaosFault, ChaosRound

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
        left = {path.name for path in self._cluster.disk(host, inside=False).iterdir()} - {disk.FILLER}
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
                disk.truncate(self._files[host])
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
        folder = self._cluster.disk(host, inside=False)
        disk.fill(folder)
        self._schedule(None, lambda: disk.clear(folder))
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


GRACE_S: Final = 10.0
"""Seconds after its deadline that a fork may use to fall back or to report that it cannot."""
RELEASE_TIMEOUT_S: Final = 10.0
DUMP_S: Final = 0.5
POLL_INTERVAL_S: Final = 0.2
POLL_TIMEOUT_S: Final = 2.0
"""Seconds until a planner that did not respond is queried again for the graph."""
TICK_S: Final = 0.05
DISK_RATE: Final = 16 << 20
"""Bytes per second of a disk: less than a link."""


class ChaosRunner:
    """Runs rounds, one at a time."""

    def __init__(self, cluster: ChaosCluster) -> None:
        self._cluster = cluster
        self._inspector = Inspector(cluster)

    def run(self, round_: ChaosRound) -> RoundObservation:
        """Run one round. Raises ChaosError if it could not begin."""
        cluster, inspector = self._cluster, self._inspector
        cluster.replace()
        cluster.wait_planner(round_.store)
        inspector.record_baseline()
        expected_hash, files = self._prepare(round_)
        commands = {host: self._command(round_, host, files.get(host)) for host in round_.target_hosts}
        responses: dict[str, ChaosResponse] = {}

        def restart_node(host: str) -> None:
            cluster.end(host)  # its end may not have been noticed yet
            responses.pop(host, None)
            cluster.replace([host])
            cluster.nodes[host].send(ChaosCommand("prepare", size=commands[host].size))
            cluster.nodes[host].send(commands[host])

        injector = FaultInjector(cluster, round_, files, restart_node)
        hung = self._fork(round_, injector, commands, responses)
        ended_at = time.monotonic()
        injector.undo_all()
        self._drain_responses(injector)
        self._kill_hung(hung)
        finished_hosts = [host for host, response in responses.items() if response.outcome in ("forked", "fallback")]
        hashes = cluster.request(finished_hosts, ChaosCommand("check"))
        hosts = (*round_.seed_hosts, *round_.target_hosts)
        died = self._died(set(hosts) - injector.killed - hung)
        alive = [host for host in hosts if host in cluster.nodes]
        released = cluster.request(alive, ChaosCommand("release"), RELEASE_TIMEOUT_S)
        stuck = {host for host in alive if host not in released or released[host].error}
        after = inspector.wait_until_settled(set(alive) - stuck)
        self._kill_hung(stuck)
        for host in round_.target_hosts if round_.resumes else ():
            disk.clear(cluster.disk(host, inside=False))
        inspector.end_round(round_.name, round_.store)
        return RoundObservation(
            round=round_,
            window=WINDOW,
            injected=tuple(injector.injected),
            endings=tuple(
                _ending(host, responses.get(host), hashes.get(host), expected_hash, injector.killed, hung)
                for host in round_.target_hosts
            ),
            before={host: inspector.baseline[host] for host in after},
            after=after,
            died=died,
            stuck=tuple(sorted(stuck)),
            tracebacks=inspector.tracebacks(),
            stale_records=inspector.stale_records(),
            recovery_s=ended_at - (injector.first_injected_at or ended_at),
        )

    def final_findings(self) -> tuple[Finding, ...]:
        """Return, after all rounds, the findings about the planners, which outlive the rounds."""
        return self._inspector.final_findings()

    # -- preparation --------------------------------------------------------------------------------

    def _prepare(self, round_: ChaosRound) -> tuple[str, dict[str, Path]]:
        """Return the expected hash, and by host the file that a target can read."""
        cluster, size = self._cluster, round_.size_mib << 20
        seed_hosts = round_.seed_hosts or ("seed0",)
        filled = cluster.request_all(seed_hosts, ChaosCommand("prepare", size=size, weights=round_.number + 1))
        cluster.request_all(round_.target_hosts, ChaosCommand("prepare", size=size))
        files: dict[str, Path] = {}
        if round_.fallback or not round_.seeds:
            files = self._store(round_)
        if round_.seeds:
            cluster.request_all(seed_hosts, ChaosCommand("seed", model=round_.name, planner=cluster.url(round_.store)))
        return filled[seed_hosts[0]].sha256, files

    def _command(self, round_: ChaosRound, host: str, file: Path | None) -> ChaosCommand:
        """Return the fork command of a target."""
        snapshot = file is not None and round_.start == "snapshot"
        return ChaosCommand(
            "fork",
            model=round_.name,
            planner=self._cluster.url(round_.store),
            size=round_.size_mib << 20,
            checkpoint=str(file.parent) if file is not None and not snapshot else "",
            snapshot=file.as_uri() if file is not None and snapshot else "",
            disk_rate=0 if round_.seeds else DISK_RATE,
            resume=str(self._cluster.disk(host, inside=True)) if round_.resumes else "",
        )

    def _store(self, round_: ChaosRound) -> dict[str, Path]:
        """Return each target's file; if one is to be torn, each target has its own copy."""
        folder = self._cluster.folder / "files"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._cluster.request_all(["seed0"], ChaosCommand("store", folder=str(folder)))
        name = SNAPSHOT if round_.start == "snapshot" else CHECKPOINT
        is_truncated = any(fault.fault_type == "torn" for fault in round_.faults)
        if not is_truncated:
            return dict.fromkeys(round_.target_hosts, folder / name)
        for host in round_.target_hosts:
            shutil.copytree(folder, folder / host, ignore=shutil.ignore_patterns("t*"))
        return {host: folder / host / name for host in round_.target_hosts}

    # -- forks --------------------------------------------------------------------------------------

    def _fork(
        self,
        round_: ChaosRound,
        injector: FaultInjector,
        commands: Mapping[str, ChaosCommand],
        responses: dict[str, ChaosResponse],
    ) -> set[str]:
        """Start all forks and collect their responses; returns the hosts that hang."""
        cluster, progress = self._cluster, dict.fromkeys(round_.target_hosts, 0.0)
        for host, command in commands.items():
            cluster.nodes[host].send(command)
        deadline = time.monotonic() + DEADLINE_S + GRACE_S
        query = ChaosCommand("query", model=round_.name, planner=cluster.url(round_.store))
        next_poll_at = 0.0
        while True:
            now = time.monotonic()
            injector.run_due(progress, responses)
            left = {host for host in round_.target_hosts if host in cluster.nodes} - responses.keys() - injector.killed
            if now >= deadline + injector.max_duration_s or not (left or injector.has_pending_restarts):
                return left
            if injector.needs_graph and now >= next_poll_at:
                cluster.nodes[PLANNER].send(query)
                next_poll_at = now + POLL_TIMEOUT_S
            for host, response in cluster.receive(TICK_S):
                if response.verb == "progress":
                    progress[host] = response.verified
                elif response.verb == "fork" and host not in injector.killed:
                    responses[host] = response
                elif response.verb == "query":
                    next_poll_at = now + POLL_INTERVAL_S
                    if not response.error:
                        injector.set_graph(response.forks)
                else:
                    injector.on_response(host, response)

    def _drain_responses(self, injector: FaultInjector) -> None:
        until = time.monotonic() + RELEASE_TIMEOUT_S
        while injector.has_pending_snapshots and (left := until - time.monotonic()) > 0:
            for host, response in self._cluster.receive(left):
                if response.verb == "snapshot":
                    injector.on_response(host, response)

    # -- after the round ----------------------------------------------------------------------------

    def _kill_hung(self, hosts: set[str]) -> None:
        """Make these nodes log their stacks, then kill them."""
        for host in hosts & self._cluster.nodes.keys():
            process = self._cluster.nodes[host].process
            process.signal(signal.SIGUSR1)
            process.wait(DUMP_S)
            self._cluster.end(host)

    def _died(self, hosts: set[str]) -> tuple[str, ...]:
        """Return the processes that ended without being killed; restart a planner that did."""
        self._cluster.receive(0.0)
        died = sorted(hosts - self._cluster.nodes.keys())
        for store in PORTS:
            if self._cluster.planners[store].wait(0.0):
                died.append(f"{PLANNER} ({store})")
                self._cluster.start_planner(store)
        return tuple(died)


def _ending(
    host: str,
    response: ChaosResponse | None,
    checked: ChaosResponse | None,
    expected_hash: str,
    killed: set[str],
    hung: set[str],
) -> ForkEnding:
    if host in killed:  # maybe after it finished: its bytes cannot be checked any more
        return ForkEnding(host, "killed")
    if response is None or host in hung:
        return ForkEnding(host, "hung")
    return ForkEnding(
        host,
        response.outcome,
        is_correct=checked is not None and checked.sha256 == expected_hash if response.outcome != "failed" else None,
        repeated_bytes=response.repeated,
        chunk_bytes=response.chunk_bytes,
        seconds=response.seconds,
        reasons=response.reasons,
    )
