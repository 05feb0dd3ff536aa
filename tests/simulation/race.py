"""A simulated fork from a slow source, into an instance that could load its own files.

Besides the promises of `tests.simulation.world`: no fork takes longer than 1.15 times the own load, and a constant. If
the files can only be loaded completely, a source that becomes slow later costs the time until then, too.
"""

from __future__ import annotations

from tests.simulation.world import SETTINGS, World

CHUNKS = 32
MAX_RATIO = 1.15
CONSTANT_S = 1.5
"""Time of the plan, of the first measurements and of a sample."""


class RaceWorld(World):
    """One seed, which is slow from the start, stalls, or does not; and one target with files of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        draw = self.random
        # Nothing else ends a fork from a source that sends nothing.
        self.settings = SETTINGS.model_copy(update={"source_idle_timeout_s": 500.0, "deadline_s": 1000.0})
        self.chunks, self.shared_chunks = CHUNKS, 0
        self.jitter_s = draw.choice([0.0005, 0.005])
        self.disk_chunk_s = draw.choice([0.02, 0.1, 0.5, 1.0])
        self.load_s = self.disk_chunk_s * CHUNKS
        self.chunk_s = self.disk_chunk_s * draw.choice([0.1, 0.5, 1.0, 2.0, 10.0, 1000.0])
        self.opaque_loader = draw.random() < 0.5
        self.max_readers = 8
        self.stalls_after_s = draw.choice([None, None, draw.random() * self.load_s])
        self.max_fork_s = MAX_RATIO * self.load_s + CONSTANT_S
        if self.opaque_loader and self.stalls_after_s is not None:
            self.max_fork_s += self.stalls_after_s
        self.end_within_s = max(self.end_within_s, 2 * self.max_fork_s)

    def _populate(self) -> None:
        self._add_seed("seed0", "v1")
        self.later(1.5, self._add_race, on=None)

    def _add_race(self) -> None:
        self._add_target("target0", like=self.instances["seed0"])
        if self.stalls_after_s is not None:
            self.later(self.stalls_after_s, self._stall, on=None)

    def _stall(self) -> None:
        """Suspend the seed for the rest of the world."""
        self.at_fault.add("seed0")
        self.instances["seed0"].process.stopped = True

    def _check_end(self) -> None:
        super()._check_end()
        target = self.targets[0]
        seconds = (target.ended_at or self.now) - target.began_at
        self.check(
            seconds <= self.max_fork_s,
            f"the fork took {seconds:.1f} s, the own load {self.load_s:.1f} s, a peer {self.chunk_s * CHUNKS:.1f} s: "
            f"{target.outcome}, stalled after {self.stalls_after_s}, loader {self.opaque_loader}",
        )
