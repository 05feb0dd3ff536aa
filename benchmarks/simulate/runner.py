"""Runs one simulation: arrivals, deaths and heartbeats between the fleet and the planner.

Times are in S/B. Progress costs nothing and reaches the planner with every heartbeat, and twice as often at first, as
the real reports do (`rfork.receiver.planner_requests`); only the readers of a dead node notice its death, after
`detect`, and report it to the planner when they request a new plan.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from benchmarks.simulate.fleet import IMAGE_SECONDS, SimFleet, SimHost, SimNode
from benchmarks.simulate.planner import SimPlanner, SimPlanRequest
from planner.core.batch_queue import replan_window_s, window_s
from rfork.errors import RforkError, SettingsError
from rfork.receiver.planner_requests import PROGRESS_INTERVAL_S, progress_interval_s

PAUSED_RATE: Final = 0.1
MAX_TIME: Final = 100.0
"""A longer run (at the slowest link's rate) is stuck: some target has no path to its chunks."""


DefaultT = TypeVar("DefaultT")


def _option(default: DefaultT, meaning: str) -> DefaultT:
    """Return a field that is also a command-line option."""
    option: DefaultT = field(default=default, metadata={"help": meaning})
    return option


@dataclass(frozen=True)
class SimScenario:
    """Parameters of a simulation; shares are parts of the targets, rates parts of B, times in S/B."""

    targets: int = _option(7, "N")
    seeds: int = _option(1, "M")
    chunks: int = _option(64, "k")
    hosts: int = _option(0, "number of hosts that the targets share, each with one link; 0: one host per target")
    local_rate: float = _option(8.0, "rate between two targets on one host, as a part of B")
    window: int = _option(1, "chunks that a target reads from one source at a time")
    latency: float = _option(0.0, "latency of each chunk before its first byte (S/B)")
    heartbeat: float = _option(0.1, "interval between a target's progress reports (S/B)")
    detect: float = _option(0.01, "time until the readers of a dead node notice (S/B)")
    report_spread: float = _option(
        0.0, "part of the heartbeat over which the responses to the targets' reports are spread"
    )
    batch: float = _option(
        0.0,
        "time that the first request waits for others (S/B); 0: one plan per instant",
    )
    retry: float = _option(0.05, "time until a target requests a plan again for chunks without a source (S/B)")
    deaths: float = _option(0.0, "share of targets that die, each at a random time of its first S/B")
    stragglers: float = _option(0.0, "share of targets on slow links")
    straggler_rate: float = _option(0.25, "rate of those links, as a part of B")
    pauses: float = _option(0.0, "mean number of pauses of each target's link per S/B, at random times")
    pause: float = _option(0.05, "duration of a pause, in which the link has a tenth of its rate (S/B)")
    measured: bool = _option(False, "the planner knows every target's rate in advance")
    late: float = _option(0.0, "share of targets that arrive late")
    late_at: float = _option(0.25, "time of their arrival (S/B)")
    spread: float = _option(0.0, "the others arrive at random times within this period (S/B)")
    draw: int = _option(0, "random seed")

    def __post_init__(self) -> None:
        for name in (
            "targets",
            "seeds",
            "chunks",
            "window",
            "heartbeat",
            "retry",
            "straggler_rate",
            "local_rate",
            "pause",
        ):
            if getattr(self, name) <= 0:
                raise SettingsError(f"--{name.replace('_', '-')} must be greater than 0")
        if self.hosts < 0 or (self.hosts and self.stragglers):
            raise SettingsError("--hosts must be at least 0, and cannot be combined with --stragglers")
        if not 0 <= self.report_spread <= 1:
            raise SettingsError("--report-spread is a part of the heartbeat: it must be between 0 and 1")
        for name in ("deaths", "stragglers", "late"):
            if not 0 <= getattr(self, name) < 1:
                raise SettingsError(f"--{name} is a share of the targets: it must be at least 0 and less than 1")


@dataclass(frozen=True)
class SimOutcome:
    """Outcome of a run; times in S/B, sizes in S."""

    total: float
    """From the first arrival until the last surviving target is complete."""
    healthy: float
    """The same without stragglers."""
    late: float | None
    """Maximum time of a late joiner from its own arrival."""
    own: float
    """Maximum time of a target from its own arrival, without stragglers."""
    max_egress: float
    """Maximum that any host sent over the network."""
    max_ingress: float
    """Maximum that any host read over the network: 1.0 if each byte came once."""
    plans: int
    """Number of plans in the planner's responses."""
    plan_seconds: float
    """Wall time of planning: the policy and its index."""
    watch_seconds: float
    """Wall time of straggler detection, twice per heartbeat."""


@dataclass
class SimBatch:
    """Targets that wait for a plan, with the dead sources that each reports."""

    requests: dict[SimNode, set[str]] = field(default_factory=dict)
    due_at: float = math.inf


@dataclass
class SimReports:
    """Number of a target's progress reports so far, and of those with chunks."""

    count: int = 0
    with_chunks: int = 0

    def add(self, *, has_chunks: bool) -> None:
        """Count one report."""
        self.count += 1
        self.with_chunks += has_chunks


class SimulationStuck(RforkError):
    """A simulated target never received all of its chunks."""


class SimRun:
    """A fleet and a planner, connected for one scenario."""

    def __init__(self, scenario: SimScenario) -> None:
        self.scenario = scenario
        self.fleet = SimFleet(
            scenario.chunks,
            self._finished,
            window=scenario.window,
            latency=scenario.latency,
            local_rate=scenario.local_rate,
        )
        self._hosts = [SimHost(1.0) for _ in range(scenario.hosts)]
        self._planner = SimPlanner(scenario.chunks)
        self._network = self.fleet.network
        self._arrivals = SimBatch()
        self._replans = SimBatch()
        self._response_time: dict[SimNode, float] = {}
        """When the response to a target's next report arrives, as a part of the time until that report."""
        self._reading: dict[SimNode, SimReports] = {}
        self._ticks = 0
        self._waiting = scenario.targets
        self._plans = 0
        self._slow: set[SimNode] = set()
        self._late: set[SimNode] = set()
        self._create_nodes()

    def run(self) -> SimOutcome:
        """Run the scenario; raises SimulationStuck if some target would never be complete."""
        limit = MAX_TIME / min(1.0, self.scenario.straggler_rate)
        self._network.run(lambda: not self._waiting or self._network.now > limit)
        if self._waiting:
            lost = [node.name for node in self._reading if node.alive][:5]
            raise SimulationStuck(f"{self._waiting} targets are not complete after {self._network.now:.3g} S/B: {lost}")
        all_nodes = list(self.fleet.nodes.values())
        targets = [node for node in all_nodes[self.scenario.seeds :] if node.done_at is not None]
        done = {node: node.done_at for node in targets if node.done_at is not None}
        begin = min(node.arrived_at for node in targets)
        return SimOutcome(
            total=max(done.values()) - begin,
            healthy=max(time for node, time in done.items() if node not in self._slow) - begin,
            late=max((done[node] - node.arrived_at for node in targets if node in self._late), default=None),
            own=max(time - node.arrived_at for node, time in done.items() if node not in self._slow),
            max_egress=max(node.egress.carried for node in all_nodes),
            max_ingress=max(node.ingress.carried for node in all_nodes),
            plans=self._plans,
            plan_seconds=self._planner.plan_seconds,
            watch_seconds=self._planner.watch_seconds,
        )

    # -- nodes --------------------------------------------------------------------------------------

    def _create_nodes(self) -> None:
        scenario = self.scenario
        rng, delays = random.Random(scenario.draw), random.Random(scenario.draw)
        for number in range(scenario.seeds):
            self._planner.join(self.fleet.seed(f"seed-{number}").name, complete=True)
        numbers = range(scenario.targets)
        slow = set(rng.sample(numbers, round(scenario.stragglers * scenario.targets)))
        failing = rng.sample(numbers, round(scenario.deaths * scenario.targets))
        late = set(rng.sample(numbers, round(scenario.late * scenario.targets)))
        targets = []
        for number in numbers:
            rate = scenario.straggler_rate if number in slow else 1.0
            host = self._hosts[number % scenario.hosts] if scenario.hosts else None
            target = self.fleet.target(f"target-{number:05}", rate, host)
            targets.append(target)
            self._response_time[target] = 1 - scenario.report_spread * delays.random()
            if number in slow:
                self._slow.add(target)
            if number in late:
                self._late.add(target)
            target.arrived_at = scenario.late_at if number in late else scenario.spread * rng.random()
            self._network.call(target.arrived_at, partial(self._arrive, target))
        for number in failing:
            moment = targets[number].arrived_at + rng.random()
            self._network.call(moment, partial(self._die, targets[number]))
        if scenario.pauses:
            pauses = random.Random(scenario.draw)
            for target in targets:
                self._await_pause(target, pauses)
        self._network.call(scenario.heartbeat / 2, self._heartbeat)

    def _await_pause(self, target: SimNode, pauses: random.Random) -> None:
        """Pause the target's link at a random time, and again after that."""
        begin, scenario = self._network.now + pauses.expovariate(self.scenario.pauses), self.scenario
        links = target.egress, target.ingress

        def resume() -> None:
            for link in links:
                self._network.set_rate(link, link.rate / PAUSED_RATE)
            self._await_pause(target, pauses)

        def pause() -> None:
            for link in links:
                self._network.set_rate(link, link.rate * PAUSED_RATE)
            self._network.call(begin + scenario.pause, resume)

        self._network.call(begin, pause)

    def _arrive(self, target: SimNode) -> None:
        scenario = self.scenario
        measured = target.ingress.rate if scenario.measured else None
        host = f"host-{self._hosts.index(target.host)}" if self._hosts else None
        self._planner.join(target.name, complete=False, host=host, measured=measured)
        self._reading[target] = SimReports()
        self._request_plan(target)

    def _finished(self, target: SimNode) -> None:
        self._waiting -= 1
        del self._reading[target]
        self._planner.finished(target.name)

    # -- plan requests ------------------------------------------------------------------------------

    def _request_plan(self, target: SimNode, blamed: str | None = None) -> None:
        if not target.alive or target.done_at is not None:
            return
        is_replan = blamed is not None or bool(target.chunks or target.routes)
        batch = self._replans if is_replan else self._arrivals
        faults = batch.requests.setdefault(target, set())
        if blamed is not None:
            faults.add(blamed)
        due_at = self._network.now + self._window(target, is_replan=is_replan, has_fault=blamed is not None)
        if due_at < batch.due_at:
            batch.due_at = due_at
            self._network.call(due_at, partial(self._plan, batch, due_at))

    def _window(self, target: SimNode, *, is_replan: bool, has_fault: bool) -> float:
        """Return how long the planner waits for others; targets arrive within one rush."""
        min_wait_s = self.scenario.batch * IMAGE_SECONDS
        if is_replan:
            reads_on = not has_fault and self._has_all_sources(target)
            return replan_window_s(min_wait_s, reads_on=reads_on) / IMAGE_SECONDS
        if not min_wait_s:
            return 0.0
        return window_s(self._network.now * IMAGE_SECONDS, min_wait_s) / IMAGE_SECONDS

    def _has_all_sources(self, target: SimNode) -> bool:
        """Return True if the target's sources serve all that it is missing."""
        return target.chunks | sum(self.fleet.shares(target).values()) == self.fleet.every_chunk

    def _plan(self, batch: SimBatch, due_at: float) -> None:
        if batch.due_at != due_at:
            return  # planned earlier, because of a request that could not wait
        pending, batch.requests, batch.due_at = batch.requests, {}, math.inf
        requests = {
            target.name: SimPlanRequest(target.name, target.chunks, frozenset(blamed), self.fleet.shares(target))
            for target, blamed in pending.items()
            if target.alive and target.done_at is None
        }
        if not requests:
            return
        self._plans += len(requests)
        for name, response in self._planner.plan(list(requests.values()), self._network.now).items():
            target = self.fleet.nodes[name]
            self.fleet.apply_shares(target, response.shares)
            for source in response.shares:
                if not self.fleet.nodes[source].alive:
                    self._on_death_detected(self.fleet.nodes[source], [target])
            if response.replan_suggested or not self._has_all_sources(target):
                self._network.call(self._network.now + self.scenario.retry, partial(self._request_plan, target))

    # -- faults and reports -------------------------------------------------------------------------

    def _die(self, target: SimNode) -> None:
        if target.done_at is None:
            self._waiting -= 1
        readers = self.fleet.kill(target)
        self._reading.pop(target, None)
        self._on_death_detected(target, readers)

    def _on_death_detected(self, dead: SimNode, readers: list[SimNode]) -> None:
        def noticed() -> None:
            self._planner.remove(dead.name)
            for reader in readers:
                self._request_plan(reader, dead.name)

        if readers:
            self._network.call(self._network.now + self.scenario.detect, noticed)

    def _heartbeat(self) -> None:
        """Report the progress of all targets; every second time, of those only that have reported a few times."""
        self._ticks += 1
        now, heartbeat = self._network.now, self.scenario.heartbeat
        until = {target: heartbeat / 2 if self._is_first(target) else heartbeat for target in self._reading}
        reporting = [target for target in self._reading if self._is_first(target) or self._ticks % 2 == 0]
        for target in reporting:
            self._reading[target].add(has_chunks=bool(target.chunks))
            self._planner.progress(target.name, target.chunks, self.fleet.active_rates(target), now)
        for name in self._planner.stragglers(now):
            slow = self.fleet.nodes[name]
            for target in (slow, *(route.target for route in slow.readers)):
                self._network.call(
                    now + self._response_time[target] * until[target], partial(self._suggest_replan, target, slow)
                )
        for name in self._planner.starving([target.name for target in reporting]):
            self._request_plan(self.fleet.nodes[name])
        self._network.call(now + heartbeat / 2, self._heartbeat)

    def _is_first(self, target: SimNode) -> bool:
        """Return True if the target's next report is one of its first, at half the interval."""
        reports = self._reading[target]
        return progress_interval_s(reports.count, reports.with_chunks) < PROGRESS_INTERVAL_S

    def _suggest_replan(self, target: SimNode, slow: SimNode) -> None:
        """Suggest a new plan to a slow target, or to one that still reads from it, with the response to its report."""
        if target is slow or slow in target.routes:
            self._request_plan(target)
