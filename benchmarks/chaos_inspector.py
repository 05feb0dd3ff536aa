"""Inspects what remains after a round of `benchmarks.chaos` in processes, logs and planners."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.chaos_checks import TRACE, Finding, ProcessResources, find_leaks
from benchmarks.chaos_cluster import PLANNER, ChaosCluster
from benchmarks.chaos_messages import ChaosCommand
from benchmarks.chaos_scenarios import StoreType

SETTLE_S: Final = 3.0
"""Timeout for a process to become idle."""
RECORD_TTL_S: Final = 12.0
"""A planner must have removed an expired record after this time: the TTL of a lease, that of an instance, and
a margin.
"""
PAUSE_S: Final = 0.05
MAX_LINE_CHARS: Final = 200
MAX_TRACE_CHARS: Final = 4000
"""Maximum characters of a traceback that are shown."""
POOLED_FILES: Final = 8
"""Connections to Redis that a planner may keep: its maximum number of concurrent calls."""


class Inspector:
    """Compares processes with their resources at start, and planners with the records that they should keep."""

    def __init__(self, cluster: ChaosCluster) -> None:
        self.baseline: dict[str, ProcessResources] = {}
        """Resources of nodes by host; memory is responses from the first time that a node is idle."""
        self._cluster = cluster
        self._pids: dict[str, int] = {}
        self._planners: dict[StoreType, tuple[int, ProcessResources]] = {}
        self._log_offsets: dict[Path, int] = {}
        self._finished_rounds: list[tuple[float, str, StoreType]] = []

    def record_baseline(self) -> None:
        """Record the resources of each new process."""
        nodes = self._cluster.nodes
        fresh = [name for name, node in nodes.items() if self._pids.get(name) != node.process.pid]
        for name, resources in self._resource_snapshots(fresh).items():
            self._pids[name] = nodes[name].process.pid
            self.baseline[name] = replace(resources, memory=0)
        for store, planner in self._cluster.planners.items():
            if self._planners.get(store, (0,))[0] != planner.pid:
                # After its first response: its memory at that point is the baseline.
                self._planners[store] = (planner.pid, ProcessResources.of(planner.pid))

    def wait_until_settled(self, hosts: Iterable[str]) -> dict[str, ProcessResources]:
        """Return the resources of idle nodes, measured again while something is still open."""
        left, found, until = set(hosts), dict[str, ProcessResources](), time.monotonic() + SETTLE_S
        while left and time.monotonic() < until:
            found |= self._resource_snapshots(left)
            for host in left & found.keys():
                if not self.baseline[host].memory:
                    self.baseline[host] = replace(self.baseline[host], memory=found[host].memory)
            left = {host for host in left & found.keys() if any(find_leaks(self.baseline[host], found[host]))}
            self._cluster.receive(PAUSE_S if left else 0.0)
        return found

    def tracebacks(self) -> tuple[str, ...]:
        """Return by process name the tracebacks logged since the last call."""
        found: list[str] = []
        for log in sorted(self._cluster.folder.glob("*.log")):
            with log.open(errors="replace") as lines:
                lines.seek(self._log_offsets.get(log, 0))
                before, trace, after = lines.read().partition(TRACE)
                if trace:
                    found.append(f"{log.stem}: {before[-MAX_LINE_CHARS:]}{trace}{after[:MAX_TRACE_CHARS]}")
                self._log_offsets[log] = lines.tell()
        return tuple(found)

    def end_round(self, model: str, store: StoreType) -> None:
        """Record that a round has ended: its planner must remove the model in time."""
        self._finished_rounds.append((time.monotonic() + RECORD_TTL_S, model, store))

    def stale_records(self) -> tuple[str, ...]:
        """Return expired records that planners still keep. Raises ChaosError."""
        now, problems = time.monotonic(), list[str]()
        for _, model, store in [finished_round for finished_round in self._finished_rounds if finished_round[0] <= now]:
            self._cluster.wait_planner(store)  # it may have restarted only just now
            responses = self._cluster.request_all(
                [PLANNER], ChaosCommand("query", model=model, planner=self._cluster.url(store))
            )
            problems += [
                f"{model}: the planner ({store}) still has a fork on {fork_info.host or 'no host'}"
                for fork_info in responses[PLANNER].forks
            ]
            problems += [
                f"{model}: the planner ({store}) still has the instance on {host}"
                for host in responses[PLANNER].instances
            ]
        self._finished_rounds = [finished_round for finished_round in self._finished_rounds if finished_round[0] > now]
        return tuple(problems)

    def final_findings(self) -> tuple[Finding, ...]:
        """Return, after all rounds, the records that planners still keep and the resources that they leaked."""
        while self._finished_rounds and (left := self._finished_rounds[-1][0] - time.monotonic()) > 0:
            self._cluster.receive(left)
        found = [Finding("stale", text) for text in self.stale_records()]
        for store, (pid, before) in self._planners.items():
            if pid == self._cluster.planners[store].pid:
                texts = find_leaks(before, ProcessResources.of(pid), pooled=POOLED_FILES)
                found += [Finding("leak", f"the planner ({store}): {text}") for text in texts]
        return tuple(found)

    def _resource_snapshots(self, hosts: Iterable[str]) -> dict[str, ProcessResources]:
        responses = self._cluster.request(hosts, ChaosCommand("measure"))
        return {
            host: ProcessResources.of(self._cluster.nodes[host].process.pid, response.threads)
            for host, response in responses.items()
            if host in self._cluster.nodes
        }
