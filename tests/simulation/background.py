"""A simulated fleet in which holders prefetch weights while engines fork them over the same links.

Besides the promises of `tests.simulation.world`: each engine's fork takes hardly longer than in the same world without
holders, and every prefetch ends once they have ended. Each host has one link to the network, which carries one chunk
at a time in each direction.
"""

from __future__ import annotations

import contextlib
import random
from functools import partial

from tests.simulation.instance import Instance
from tests.simulation.target import Target
from tests.simulation.world import World

MAX_RATIO = 1.15
YIELD_S = 1.5
"""Time until a prefetch yields: the interval of progress reports, and a plan."""
MAX_CHUNKS_LATE = 6
"""Chunks of others that a fork may wait for: those in flight when its sources are assigned or change."""
VERSION = "v1"


class BackgroundWorld(World):
    """Seeds, engines that start at random times, and holders that start before or between them. Nothing fails."""

    def __init__(self, seed: int, *, has_holders: bool = True) -> None:
        super().__init__(seed)
        self.has_holders = has_holders
        draw = random.Random(f"background {seed}")
        self.chunks, self.shared_chunks = draw.choice([16, 32, 48]), 0
        self.chunk_s = draw.choice([0.03, 0.1, 0.2])
        self.jitter_s = 0.0005
        self.max_readers = draw.choice([1, 2, 8])
        self.seeds = draw.choice([1, 1, 2])
        spread_s = draw.choice([0.0, 0.5, 1.0]) * self.chunks * self.chunk_s
        self.engines = [(f"target{number}", 3 + draw.random() * spread_s) for number in range(draw.randint(1, 4))]
        hosts = [f"host-{name}" for name, _ in self.engines] + [None, None]
        draw.shuffle(hosts)  # a host has one holder
        self.prefetches = [
            (f"holder{number}", host, 1.5 + draw.random() * (1.5 + spread_s))
            for number, host in enumerate(hosts[: draw.randint(1, 4)])
        ]
        self.seconds_without_holders: dict[str, float] = {}
        self._links: dict[tuple[str, str], float] = {}
        """When each link is free again, by host and direction."""

    def run(self) -> None:
        """See `World`; runs the world without holders first."""
        with contextlib.closing(self.loop):  # also if the world without holders fails
            if self.has_holders:
                without = BackgroundWorld(self.seed, has_holders=False)
                without.run()
                self.seconds_without_holders = {each.instance.name: seconds_of(each) for each in without.targets}
            super().run()

    def transfer_s(self, source: Instance, target: Instance) -> float:
        """See `World`; a link carries one chunk after the other."""
        seconds = super().transfer_s(source, target)
        if source.host == target.host:
            return seconds
        links = (source.host, "sends"), (target.host, "receives")
        ends_at = max(self.now, *(self._links.get(link, 0.0) for link in links)) + seconds
        self._links.update(dict.fromkeys(links, ends_at))
        return ends_at - self.now

    def _populate(self) -> None:
        for number in range(self.seeds):
            self._add_seed(f"seed{number}", VERSION)
        for name, at in self.engines:
            self.later(at, partial(self._add_engine, name), on=None)
        if self.has_holders:
            for name, host, at in self.prefetches:
                self.later(at, partial(self._add_holder, name, VERSION, host), on=None)

    def _add_engine(self, name: str) -> None:
        self._start_fork(Instance(self, name, version=VERSION, files=None, max_readers=self.max_readers))

    def on_forked(self, target: Target) -> None:
        """See `World`; no other instance starts."""

    def _check_end(self) -> None:
        super()._check_end()
        for target in self.targets:
            name = target.instance.name
            self.check(target.outcome == "forked", f"{name}: {target.outcome}: {target.machine.reasons}")
            if target.instance.holder is not None or not self.has_holders:
                continue
            without_s, seconds = self.seconds_without_holders[name], seconds_of(target)
            limit_s = MAX_RATIO * without_s + YIELD_S + MAX_CHUNKS_LATE * self.chunk_s
            self.check(seconds <= limit_s, f"{name}: {seconds:.2f} s with holders, {without_s:.2f} s without")


def seconds_of(target: Target) -> float:
    """Return the duration of a fork that has ended."""
    return (target.ended_at or target.world.now) - target.began_at
