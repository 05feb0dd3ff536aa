"""Measure a fork across layouts against a fork of the same bytes between equal ones.

A plain PyTorch model of a Llama's shapes, with the slices and fused tensors of tensor-parallel engines. One process
has all of it and its two ranks; this one forks a rank from the complete model, and the complete model from the ranks.
Everything over HTTP on loopback, verified, and interleaved; every tensor is compared with the expected one (not timed).

- "cross layout": the placement map is recorded, the source gathers and digests the boxes, they are forked, and the
  model's own loader reads them. "later target": the source has the boxes already, as for the second replica.
- "same layout": an ordinary fork of the same rank from a seed that has it.
- "map" is the time to record the map of 67,500 tensors, in seconds; "map MB" its size.

`reshard_steps_p99`: p99 of the steps of a source that computes meanwhile, during a first fork / without one; also for
forks within one layout. The target shares the source's cores here.

`reshard_vs_same_layout`: first target across layouts / same layout, of the worse direction. `reshard_bytes`: bytes
received / bytes needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import Any

import torch

import rfork
from benchmarks import harness
from benchmarks.harness import GB, Contender
from benchmarks.pull.source import settings_for
from benchmarks.reshard.sharded_model import Shape, ShardedEngine, ShardedModel, checkpoint_table, random_weights
from benchmarks.reshard.source import FORGET, SERVE, STEPS, VERSION, rank_of, source_process
from rfork import logs
from rfork.engines.relocation import tensors_of
from rfork.errors import RforkError
from rfork.receiver.box_fork import BoxFork
from rfork.settings import InstanceSettings

DIRECTIONS = {"TP 1 to rank 0 of TP 2": ("complete", "sharded", 0, 2), "TP 2 to TP 1": ("sharded", "complete", 0, 1)}
"""Models of source and of an equal layout, and the target's rank and number of ranks."""
MAP_TENSORS = 67_500
DEADLINE_S = 300.0
WARM_UP_S = 3.0
"""Time in which the source learns the duration of undisturbed steps."""
QUIET_S = 2.0
"""Time without a fork."""


class Target:
    """The target of one direction: its forks, and a check of what they produced."""

    def __init__(self, source: str, equal: str, rank: int, size: int, shape: Shape, settings: InstanceSettings) -> None:
        self._source, self._equal = source, equal
        self._rank, self._settings = rank_of(rank, size), settings
        self._engine = ShardedEngine(shape, rank, size)
        self._expected = self._engine.load_from(lambda _: random_weights(shape))
        self.image_bytes = sum(value.nbytes for value in self._expected.parameters())
        self.received: list[float] = []
        """Bytes received / bytes needed, of each cross-layout fork."""

    def cross_layout(self, prepare: Callable[[], object]) -> Contender:
        """Return the fork across layouts; `prepare` runs before, not timed."""

        def run() -> float:
            prepare()
            began = time.perf_counter()
            fork = BoxFork(self._source, self._rank, VERSION, self._settings, deadline=time.monotonic() + DEADLINE_S)
            fetched = fork.fetch(self._engine.record(fork.checkpoint))
            module = fetched.load(self._engine.load_from, tensors_of)
            seconds = time.perf_counter() - began
            self.received.append(fetched.received_bytes / fetched.needed_bytes)
            fetched.release(0.0)
            self._check(module)
            return seconds

        return run

    def same_layout(self) -> Contender:
        """Return the ordinary fork."""

        def run() -> float:
            began = time.perf_counter()
            module = self._engine.empty()
            report = rfork.fork(module, model=self._equal, version=VERSION, rank=self._rank, settings=self._settings)
            seconds = time.perf_counter() - began
            if report.seed is not None:
                report.seed.close()
            self._check(module)
            return seconds

        return run

    def _check(self, module: ShardedModel) -> None:
        for name, value in self._expected.tensors.items():
            if not torch.equal(value.view(torch.int16), module.tensors[name].view(torch.int16)):
                raise RforkError(f"{name} has other bytes than an own load")


def main() -> None:
    """Run the benchmark, print the table and write the requested files."""
    options = harness.options("reshard", __doc__)
    logs.configure(json=False, level="warning")
    shape = Shape(layers=2) if options.quick else Shape()
    with source_process(shape) as (planner, pipe):
        settings = settings_for(planner, ("http",))
        targets = {name: Target(*direction, shape, settings) for name, direction in DIRECTIONS.items()}
        contenders: dict[str, Contender] = {}
        for name, target in targets.items():
            contenders |= {
                f"{name}: cross layout": target.cross_layout(lambda: _command(pipe, FORGET)),
                f"{name}: cross layout, later target": target.cross_layout(lambda: None),
                f"{name}: same layout": target.same_layout(),
            }
        for warm_up in contenders.values():
            warm_up()
        seconds = harness.interleave(contenders, options.rounds)
        slowdowns = _step_slowdowns(contenders, pipe, options.rounds)
    medians = harness.medians(seconds)
    sizes = {f"{name}: {kind}": target.image_bytes for name, target in targets.items() for kind in KINDS}
    map_s, map_bytes = _map_cost()
    ratios = [medians[f"{name}: cross layout"] / medians[f"{name}: same layout"] for name in targets]
    harness.publish(
        options,
        settings={f"{name}_bytes": target.image_bytes for name, target in targets.items()},
        rows=[
            {
                "contender": name,
                "seconds": median(values),
                "GB/s": sizes[name] / GB / median(values),
                "min": min(values),
                "max": max(values),
            }
            for name, values in seconds.items()
        ],
        figures={
            "reshard_bytes": max(max(target.received) for target in targets.values()),
            "reshard_vs_same_layout": max(ratios),
            "reshard_steps_p99": slowdowns["cross layout"],
            "reshard_steps_p99_same_layout": slowdowns["same layout"],
            "reshard_map_s": map_s,
            "reshard_map_mb": map_bytes / 1e6,
        },
        plot=("contender", "seconds"),
    )


KINDS = ("cross layout", "cross layout, later target", "same layout")


def _command(pipe: Any, command: str) -> list[float]:
    """Send a command to the source, and return its reply."""
    pipe.send(command)
    reply: list[float] = pipe.recv()
    return reply


def _step_slowdowns(contenders: Mapping[str, Contender], pipe: Any, rounds: int) -> dict[str, float]:
    """Return p99 of the source's steps during first forks, divided by that without a fork, for both kinds of fork."""
    direction = next(iter(DIRECTIONS))
    durations: dict[str, list[float]] = {kind: [] for kind in ("no fork", "cross layout", "same layout")}
    _command(pipe, SERVE)
    time.sleep(WARM_UP_S)
    for _ in range(rounds):
        for kind, found in durations.items():
            _command(pipe, FORGET)
            _command(pipe, STEPS)
            if kind == "no fork":
                time.sleep(QUIET_S)
            else:
                contenders[f"{direction}: {kind}"]()
            found += _command(pipe, STEPS)
    p99 = {kind: quantiles(found, n=100)[-1] for kind, found in durations.items()}
    return {kind: value / p99["no fork"] for kind, value in p99.items()}


def _map_cost() -> tuple[float, int]:
    """Return the seconds and bytes of the map of a model with `MAP_TENSORS` tensors."""
    shape = Shape(layers=MAP_TENSORS // 9, hidden=64, intermediate=128, key_value=32, vocabulary=256)
    engine = ShardedEngine(shape, 0, 2)
    table = checkpoint_table(shape)
    began = time.process_time()
    placement_map = engine.record(table)
    return time.process_time() - began, len(placement_map.to_bytes())


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}") from None
