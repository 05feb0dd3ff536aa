"""The simulator compared with exact formulas, and complete runs of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, log2

import pytest

from benchmarks.simulate import baselines
from benchmarks.simulate.__main__ import parse
from benchmarks.simulate.fleet import SimFleet, SimNode, bits
from benchmarks.simulate.planner import bits_of, ranges_of
from benchmarks.simulate.runner import SimRun, SimScenario
from rfork.errors import SettingsError

CHUNKS = 16
EVERY = (1 << CHUNKS) - 1
SEED = 0


class Static:
    """Node 0 is a seed, 1 to N are targets; each reads what a table lists, from the time it lists."""

    def __init__(self, targets: int, *, rates: Mapping[int, float] | None = None, **how: float) -> None:
        self.fleet = SimFleet(
            CHUNKS, lambda target: None, latency=how.get("latency", 0.0), window=int(how.get("window", 1))
        )
        rates = rates or {}
        self.nodes = [self.fleet.seed("0", rates.get(SEED, 1.0))]
        self.nodes += [self.fleet.target(str(name), rates.get(name, 1.0)) for name in range(1, targets + 1)]

    def reads(self, target: int, shares: Mapping[int, int], *, at: float = 0.0) -> None:
        named = {str(source): chunks for source, chunks in shares.items()}
        self.fleet.network.call(at, lambda: self.fleet.apply_shares(self.nodes[target], named))

    def run(self) -> float:
        self.fleet.network.run(lambda: False)
        return max(self.done(node) for node in self.nodes[1:] if node.alive)

    @staticmethod
    def done(node: SimNode) -> float:
        assert node.done_at is not None, f"{node.name} is not complete"
        return node.done_at


@pytest.mark.parametrize("targets", [1, 2, 5, 40])
def test_a_chain_matches_its_formula(targets: int) -> None:
    """Each target reads everything from the previous one: (k + N - 1)/k."""
    fleet = Static(targets)
    for target in range(1, targets + 1):
        fleet.reads(target, {target - 1: EVERY})
    assert pytest.approx(baselines.chain(targets, 1, CHUNKS)) == fleet.run()


@pytest.mark.parametrize("targets", [1, 2, 5, 40])
def test_a_star_matches_its_formula(targets: int) -> None:
    """All targets read everything from the seed and share its link: N."""
    fleet = Static(targets)
    for target in range(1, targets + 1):
        fleet.reads(target, {SEED: EVERY})
    assert pytest.approx(baselines.star(targets, 1, CHUNKS)) == fleet.run()


@pytest.mark.parametrize("targets", [1, 3, 7, 15, 31])
def test_doubling_matches_its_formula(targets: int) -> None:
    """In each round every complete node serves one target: log2(N + 1)."""
    fleet = Static(targets)
    for target in range(1, targets + 1):
        round_ = target.bit_length() - 1
        fleet.reads(target, {target - (1 << round_): EVERY}, at=float(round_))
    assert pytest.approx(baselines.doubling(targets, 1, CHUNKS)) == fleet.run()


@pytest.mark.parametrize("depth", [3, 4, 5])
def test_two_trees_need_two_ticks_per_level(depth: int) -> None:
    """Each of two mirrored trees carries half of the chunks at half of the rate: (k + 2(depth - 1))/k."""
    targets = 2**depth - 2  # an even number: no node is an inner node of both trees
    halves = bits(range(0, CHUNKS, 2)), bits(range(1, CHUNKS, 2))
    shares: dict[int, dict[int, int]] = {target: {} for target in range(1, targets + 1)}
    for half, line in zip(halves, ([*shares], [*shares][::-1]), strict=True):
        for position, target in enumerate(line):
            parent = line[(position - 1) // 2] if position else SEED
            shares[target][parent] = shares[target].get(parent, 0) | half
    fleet = Static(targets)
    for target, its_shares in shares.items():
        fleet.reads(target, its_shares)
    assert pytest.approx((CHUNKS + 2 * (depth - 1)) / CHUNKS) == fleet.run()


@pytest.mark.parametrize("dimensions", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 4, 64])
def test_the_hypercube_schedule_matches_its_paper(dimensions: int, chunks: int) -> None:
    """Tick by tick, 2**d nodes have k chunks after k + d - 1 ticks."""
    assert chunks + dimensions - 1 == baselines.hypercube_ticks(dimensions, chunks)


@pytest.mark.parametrize("targets", [1, 3, 7, 15, 31, 100, 1000, 10_000])
def test_the_floor_of_one_seed_is_the_binomial_pipeline(targets: int) -> None:
    """Counting the possible senders yields the bound of the paper: (k + ceil(log2(N + 1)) - 1)/k."""
    assert (64 + ceil(log2(targets + 1)) - 1) / 64 == baselines.floor(targets, 1, 64)


def test_with_a_seed_for_each_target_the_floor_is_one() -> None:
    """Nothing is faster than a target's own link."""
    assert 1.0 == baselines.floor(4, 4, 64)
    assert 1.0 == baselines.floor(4, 9, 64)


def test_each_chunk_has_latency() -> None:
    """One chunk at a time, each waits for its latency and is then transferred: S/B + k latencies."""
    fleet = Static(1, latency=0.01)
    fleet.reads(1, {SEED: EVERY})
    assert pytest.approx(1.0 + CHUNKS * 0.01) == fleet.run()


def test_a_window_shares_the_latency() -> None:
    """Two chunks in flight wait concurrently: half as many waits."""
    fleet = Static(1, latency=0.01, window=2)
    fleet.reads(1, {SEED: EVERY})
    assert pytest.approx(1.0 + CHUNKS // 2 * 0.01) == fleet.run()


@pytest.mark.parametrize("slow", [SEED, 1])
def test_a_slow_link_sets_the_pace(slow: int) -> None:
    """At a quarter of the rate, on either side, everything takes four times as long."""
    fleet = Static(1, rates={slow: 0.25})
    fleet.reads(1, {SEED: EVERY})
    assert pytest.approx(4.0) == fleet.run()


def test_a_flow_has_the_smaller_of_its_two_shares() -> None:
    """Half of the seed's link is more than a slow reader can use; the other reader gets no more for that."""
    fleet = Static(2, rates={1: 0.25})
    fleet.reads(1, {SEED: EVERY})
    fleet.reads(2, {SEED: EVERY})
    fleet.run()
    assert pytest.approx((4.0, 2.0)) == tuple(Static.done(node) for node in fleet.nodes[1:])


def test_a_link_may_change_its_rate() -> None:
    """Half of an image at the full rate, the rest at a tenth of it."""
    fleet = Static(1)
    fleet.reads(1, {SEED: EVERY})
    network = fleet.fleet.network
    network.call(0.5, lambda: network.set_rate(fleet.nodes[SEED].egress, 0.1))
    assert pytest.approx(5.5) == fleet.run()


def test_two_sources_are_read_concurrently() -> None:
    """A target with half of its chunks from each of two sources reads both at half of its rate."""
    fleet = Static(2)
    fleet.reads(1, {SEED: EVERY})
    fleet.reads(2, {SEED: EVERY & 0xFF, 1: EVERY & ~0xFF}, at=1.0)
    assert pytest.approx(2.0) == fleet.run()
    assert pytest.approx((1.5, 0.5)) == tuple(node.egress.carried for node in fleet.nodes[:2])


def test_chunks_of_a_dead_source_are_kept() -> None:
    """A relay dies in mid-chunk: its reader keeps the complete chunks and reads the others from the seed."""
    fleet = Static(2)
    fleet.reads(1, {SEED: EVERY})
    fleet.reads(2, {1: EVERY})
    readers: list[SimNode] = []
    death = 8.5 / CHUNKS
    fleet.fleet.network.call(death, lambda: readers.extend(fleet.fleet.kill(fleet.nodes[1])))
    fleet.reads(2, {SEED: EVERY}, at=death)
    assert pytest.approx(death + 9 / CHUNKS) == fleet.run()  # it had 7 of the 16
    assert [fleet.nodes[2]] == readers
    assert CHUNKS == fleet.nodes[2].received


def test_a_new_plan_keeps_chunks_in_flight_with_their_source() -> None:
    """A chunk that is half read is not read again from the new source."""
    fleet = Static(2)
    fleet.reads(1, {SEED: EVERY})
    fleet.reads(2, {SEED: EVERY}, at=1.0)
    fleet.reads(2, {1: EVERY}, at=1.0 + 0.5 / CHUNKS)
    fleet.run()
    assert (1.0 + 1 / CHUNKS, 1.0 - 1 / CHUNKS) == pytest.approx([node.egress.carried for node in fleet.nodes[:2]])
    assert CHUNKS == fleet.nodes[2].received


@pytest.mark.parametrize(
    ("chunks", "ranges"),
    [(0, ()), (0b1, ((0, 1),)), (0b1011, ((0, 2), (3, 4))), (0b111000, ((3, 6),)), (1 << 200, ((200, 201),))],
)
def test_sets_of_chunks_convert_to_ranges(chunks: int, ranges: tuple[tuple[int, int], ...]) -> None:
    """Bits become ranges, and ranges the same bits."""
    assert ranges == ranges_of(chunks)
    assert chunks == bits_of(ranges)


def test_a_single_target_reads_at_the_rate_of_its_link() -> None:
    """A plan for one target and one seed takes S/B."""
    assert pytest.approx(1.0) == SimRun(SimScenario(targets=1)).run().total


@pytest.mark.parametrize(
    "scenario", [SimScenario(targets=7), SimScenario(targets=40, seeds=3), SimScenario(targets=40, chunks=8)]
)
def test_every_chunk_arrives_once_without_disturbances(scenario: SimScenario) -> None:
    """Each target receives each chunk exactly once, and nothing is sent that does not arrive."""
    run = SimRun(scenario)
    run.run()
    nodes = list(run.fleet.nodes.values())
    assert [scenario.chunks] * scenario.targets == [node.received for node in nodes[scenario.seeds :]]
    assert pytest.approx(scenario.targets) == sum(node.egress.carried for node in nodes)


@pytest.mark.parametrize("targets", [1, 3, 7, 31, 100])
def test_no_plan_beats_the_floor(targets: int) -> None:
    """A simulated time is never below the theoretical minimum."""
    total = SimRun(SimScenario(targets=targets)).run().total
    assert baselines.floor(targets, 1, 64) <= total + 1e-9


@pytest.mark.parametrize(
    "disturbed",
    [
        SimScenario(targets=40, deaths=0.1),
        SimScenario(targets=40, deaths=0.5, detect=0.2, draw=1),
        SimScenario(targets=40, stragglers=0.1),
        SimScenario(targets=40, stragglers=0.1, report_spread=1.0, batch=0.001),
        SimScenario(targets=40, stragglers=0.1, measured=True),
        SimScenario(targets=40, pauses=1.0),
        SimScenario(targets=40, late=0.25, spread=0.1, batch=0.01),
        SimScenario(targets=40, latency=0.002, window=2),
    ],
    ids=str,
)
def test_every_surviving_target_ends_with_all_chunks(disturbed: SimScenario) -> None:
    """Deaths, stragglers and late arrivals leave no surviving target incomplete."""
    run = SimRun(disturbed)
    run.run()
    alive = [node for node in run.fleet.nodes.values() if node.alive]
    assert [run.fleet.every_chunk] * len(alive) == [node.chunks for node in alive]
    assert disturbed.targets - round(disturbed.deaths * disturbed.targets) + disturbed.seeds == len(alive)


@pytest.mark.parametrize(
    ("even", "max_total"),
    [
        (SimScenario(targets=100, late=0.5), 1.6),
        (SimScenario(targets=100, window=4), 2.0),
        (SimScenario(targets=100, late=0.99, late_at=0.001), 1.3),
        (SimScenario(targets=100, pauses=0.2, draw=1), 1.35),
    ],
    ids=["late", "concurrent reads", "one is first", "pauses"],
)
def test_no_target_is_slow_where_all_links_are_equal(even: SimScenario, max_total: float) -> None:
    """A target that had to wait for its sources, or got several chunks at once, keeps its position."""
    assert SimRun(even).run().total < max_total


def test_equal_seeds_produce_equal_runs() -> None:
    """A run depends only on its scenario."""
    scenario = SimScenario(targets=40, deaths=0.1, spread=0.1, draw=3)
    first, second = (replace(SimRun(scenario).run(), plan_seconds=0.0, watch_seconds=0.0) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    "wrong", [{"targets": 0}, {"seeds": 0}, {"deaths": 1.0}, {"late": -0.1}, {"report_spread": 2.0}]
)
def test_an_impossible_scenario_is_an_error(wrong: dict[str, float]) -> None:
    """A scenario without targets, sources or survivors is an error that names the option."""
    name = next(iter(wrong))
    with pytest.raises(SettingsError, match=f"--{name.replace('_', '-')}"):
        replace(SimScenario(), **wrong)  # type: ignore[arg-type]  # one table of integers and floats


def test_the_command_line_selects_one_scenario() -> None:
    """`--targets` makes a scenario of the other options; without it the complete table is made."""
    _, scenario, one = parse(["--targets", "1000", "--deaths", "0.01", "--straggler-rate", "0.5"])
    assert SimScenario(targets=1000, deaths=0.01, straggler_rate=0.5) == scenario
    assert one
    _, scenario, one = parse(["--quick", "--window", "2"])
    assert SimScenario(window=2) == scenario
    assert not one
