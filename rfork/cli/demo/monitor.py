"""Observes the running demo: the planner's view of the forks, and the seed's answers."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from rfork.cli.demo.processes import Event
from rfork.image import ranges
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkInfo

BAR = 12


@dataclass(frozen=True, slots=True)
class SeedReply:
    """One answer of the seed: start (Unix time), duration in seconds, and text."""

    at: float
    seconds: float
    text: str


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds per answer of the seed during one part of the demo."""

    replies: int
    median: float
    slowest: float


class DemoMonitor:
    """Collects events; `render` draws the current state. Answers arrive on a reader thread."""

    def __init__(self) -> None:
        self.seed_ready: Event = {}
        self.victim: str | None = None
        self.killed_at_share = 0.0
        self._lock = threading.Lock()
        self._replies: list[SeedReply] = []
        self._hosts: dict[str, str] = {}
        self._forks: list[ForkInfo] = []
        self._warm = self._started = self._first_byte = self._ended = float("inf")

    def on_seed_event(self, event: Event) -> None:
        """Handle a line printed by the seed."""
        if event.get("event") == "answer":
            reply = SeedReply(float(str(event["at"])), float(str(event["seconds"])), str(event["text"]))
            with self._lock:
                self._replies.append(reply)

    def seed_warm(self) -> None:
        """Note that the seed's first answers, which load and compile code, are finished."""
        self._warm = time.time()

    def forks_started(self) -> None:
        """Note that the new processes start to load Python, torch and the model's code."""
        self._started = time.time()

    def forks_ended(self) -> None:
        """Note that the last fork is verified."""
        self._ended = time.time()

    def poll(self, client: PlannerClient) -> None:
        """Fetch the current instances and forks from the planner."""
        for view in client.instances():
            self._hosts[view.report.instance_id] = view.report.placement.host
        self._forks = sorted(client.forks(), key=lambda fork: -fork.age_s)
        if self._forks:
            self._first_byte = min(self._first_byte, time.time())

    def done(self, expected: int) -> bool:
        """Return whether this many forks have finished."""
        return sum(1 for fork in self._forks if fork.state == "finished") >= expected

    def relay_to_kill(self, min_share: float, max_share: float) -> str | None:
        """Return the host of a half-finished relay with a reader, unless a relay was already killed."""
        if self.victim is not None:
            return None
        running = [fork for fork in self._forks if fork.state == "running"]
        source_ids = {share.source_id for fork in running for share in fork.plan}
        for fork in running:
            if fork.instance_id in source_ids and min_share <= _share(fork) <= max_share:
                return self._hosts[fork.instance_id]
        return None

    def killed(self, host: str) -> None:
        """Note that the relay on `host` was killed."""
        self.victim = host
        self.killed_at_share = max(_share(fork) for fork in self._forks if self.host(fork.instance_id) == host)

    def host(self, instance_id: str) -> str:
        """Return the node of an instance, or the first part of its id."""
        return self._hosts.get(instance_id, instance_id[:8])

    @property
    def replies(self) -> Sequence[SeedReply]:
        """All answers of the seed so far."""
        with self._lock:
            return tuple(self._replies)

    def latencies(self) -> Mapping[str, Latency]:
        """Return the seed's latency while idle, while processes start, and while forks read."""
        parts = {
            "idle": (self._warm, self._started),
            "new processes start": (self._started, self._first_byte),
            "forks read": (self._first_byte, self._ended),
        }
        found: dict[str, Latency] = {}
        for name, (begin, end) in parts.items():
            seconds = [reply.seconds for reply in self.replies if begin <= reply.at and reply.at < end]
            if seconds:
                found[name] = Latency(len(seconds), statistics.median(seconds), max(seconds))
        return found

    def render(self) -> RenderableType:
        """Return the fork tree with a progress bar per fork, and the seed's latest answer."""
        tree = Tree(Text("node-0  seed", style="bold green"))
        branches: dict[str, Tree] = {"node-0": tree}
        for fork in self._forks:
            sources = [self.host(share.source_id) for share in fork.plan]
            parent = next((branches[source] for source in sources if source in branches), tree)
            branches[self.host(fork.instance_id)] = parent.add(self._line(fork, sources))
        last = self.replies[-1] if self.replies else None
        status_line = f"the seed answered in {last.seconds:.2f} s: {last.text}" if last else "the seed is starting"
        return Group(tree, Text(status_line, style="dim"))

    def _line(self, fork: ForkInfo, sources: list[str]) -> Text:
        host, share = self.host(fork.instance_id), _share(fork)
        filled = round(share * BAR)
        rate = fork.progress.bytes_per_s / 1e6 if fork.progress is not None else 0.0
        state, style = fork.state, "green" if fork.state == "finished" else "cyan"
        if host == self.victim:
            state, style = "failed", "red"
        # Must fit 80 columns: the bar already shows "running" and "finished".
        is_usual = state in ("running", "finished")
        word = "killed (SIGKILL), " if host == self.victim else "" if is_usual else f"{state}, "
        return Text(
            f"{host}  {'█' * filled}{'·' * (BAR - filled)} {share:4.0%} {rate:6.1f} MB/s  "
            f"{word}from {', '.join(sources) or '?'}",
            style=style,
            no_wrap=True,
            overflow="ellipsis",
        )


def _share(fork: ForkInfo) -> float:
    if fork.state == "finished":
        return 1.0
    if fork.progress is None or not fork.chunk_count:
        return 0.0
    return ranges.count(fork.progress.verified) / fork.chunk_count
