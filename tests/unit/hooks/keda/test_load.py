from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from planner.hooks.fleet import PlannerAway
from planner.hooks.keda.load import KEEP_S, REMEMBER_S, SETTLE_S, Load
from planner.hooks.keda.signals import NothingTold, Reading
from planner.hooks.keda.triggers import Trigger
from tests.unit.clock import Clock
from tests.unit.hooks.keda.fakes import MODEL, VLLM, FakeEngines, FakeFleet, engine, fork, instance, scaleup

WAITING = Trigger(MODEL, "waiting", 10.0, port=8000)


class Bench:
    """A Load over fakes, at a time that stands still."""

    def __init__(self, **pages: str) -> None:
        self.fleet, self.engines, self.clock = FakeFleet(), FakeEngines(pages), Clock()
        self.registry = CollectorRegistry()
        self.load = Load(self.fleet, self.engines, self.clock, self.registry)
        self.clock.now += SETTLE_S

    async def later(self, seconds: float = KEEP_S) -> Reading:
        """What is read of `waiting` when so much time has passed."""
        self.clock.now += seconds
        return await self.load.read(WAITING)

    def looks(self, answer: str) -> float | None:
        return self.registry.get_sample_value("rfork_scaler_engine_looks_total", {"answer": answer})


async def test_engines_are_asked_where_the_planner_says() -> None:
    """Each server once, at the trigger's port and path; what they tell is summed."""
    bench = Bench(a=engine(3), b=engine(4))
    bench.fleet.listed = (instance("a"), instance("b"), instance("c", "loading"))
    trigger = Trigger(MODEL, "waiting", 10.0, port=9000, path="/m", scheme="https")
    assert (Reading(7.0, True), ["https://a:9000/m", "https://b:9000/m"]) == (
        await bench.load.read(trigger),
        sorted(bench.engines.asked),
    )


async def test_many_triggers_share_one_look() -> None:
    """Of one second: the planner and each engine are asked once, whatever metrics are wanted."""
    bench = Bench(a=VLLM)
    bench.fleet.listed = (instance("a"),)
    triggers = [Trigger(MODEL, metric, 1.0, port=8000) for metric in ("waiting", "running", "kv_cache")]
    readings = await asyncio.gather(*(bench.load.read(trigger) for trigger in triggers * 100))
    assert ([20.0, 7.0, 0.5], ["instances of org/llama"], ["http://a:8000/metrics"]) == (
        [reading.value for reading in readings[:3]],
        bench.fleet.asked,
        bench.engines.asked,
    )
    bench.engines.pages["a"] = engine(1)
    assert (20.0, 1.0) == ((await bench.later(0.9)).value, (await bench.later(0.1)).value)


async def test_planner_metrics_ask_no_engine() -> None:
    """Forks and scale-ups are the planner's to tell."""
    bench = Bench()
    bench.fleet.running, bench.fleet.announced = (fork(1), fork(2)), (scaleup(3, 1),)
    assert (Reading(2.0, True), Reading(3.0, True), [], ["forks", "scaleups"]) == (
        await bench.load.read(Trigger(MODEL, "forks", 1.0)),
        await bench.load.read(Trigger(MODEL, "expected", 1.0)),
        bench.engines.asked,
        bench.fleet.asked,
    )


async def test_silent_engines_are_left_out_and_counted() -> None:
    """The rest is told; when none answers the value is not known, and why is said."""
    bench = Bench(a=engine(3))
    bench.fleet.listed = (instance("a"), instance("b"))
    assert (Reading(3.0, True), 1.0, 1.0) == (await bench.later(), bench.looks("told"), bench.looks("silent"))
    del bench.engines.pages["a"]
    with pytest.raises(NothingTold, match="a did not answer http://a:8000/metrics; b did not answer"):
        await bench.later()


async def test_a_model_at_zero_is_woken_by_an_announcement() -> None:
    """No engine: inactive, until replicas are announced; active while they load; then as they say."""
    bench = Bench(a=engine(0))
    states = [(await bench.later()).active]
    bench.fleet.announced = (scaleup(1),)
    states.append((await bench.later()).active)
    bench.fleet.announced, bench.fleet.listed = (), (instance("a", "loading"),)
    states.append((await bench.later()).active)
    bench.fleet.listed = (instance("a"),)
    states.append((await bench.later()).active)
    assert [False, True, True, False] == states


async def test_a_planner_that_restarted_makes_no_silent_zero() -> None:
    """Engines that it does not list yet are asked for a while, and count if they answer."""
    bench = Bench(a=engine(3), b=engine(4))
    bench.fleet.listed = (instance("a"), instance("b"))
    values = [(await bench.later()).value]
    bench.fleet.listed = ()
    values.append((await bench.later()).value)
    bench.fleet.listed = (instance("b"),)
    values.append((await bench.later()).value)
    del bench.engines.pages["a"]  # it had ended, and not only the planner forgotten it
    values.append((await bench.later()).value)
    bench.engines.asked.clear()
    values.append((await bench.later(REMEMBER_S)).value)
    bench.fleet.listed, bench.fleet.away = (), "an hour of no planner"
    with pytest.raises(PlannerAway):
        await bench.later(3600)
    bench.fleet.away = ""
    values.append((await bench.later()).value)
    assert ([7.0, 7.0, 7.0, 4.0, 4.0, 4.0], ["http://b:8000/metrics"] * 2) == (values, bench.engines.asked)


async def test_a_planner_that_started_with_the_scaler_makes_none_either() -> None:
    """Until instances had time to report, none is not known; what is announced counts all the same."""
    bench = Bench()
    bench.clock.now -= SETTLE_S
    with pytest.raises(NothingTold, match="the planner lists no instance of org/llama: the scaler has just"):
        await bench.later()
    bench.fleet.announced = (scaleup(1),)
    assert Reading(0.0, True) == await bench.later()
    bench.fleet.announced = ()
    assert Reading(0.0, False) == await bench.later(SETTLE_S - 2 * KEEP_S)


async def test_the_last_engine_goes() -> None:
    """The planner lists none and none answers: that is zero, and no error."""
    bench = Bench(a=engine(3))
    bench.fleet.listed = (instance("a"),)
    await bench.later()
    bench.fleet.listed, bench.engines.pages = (), {}
    assert Reading(0.0, False) == await bench.later()


async def test_a_planner_that_is_away_is_said() -> None:
    """Its error goes to all who asked, and is not kept."""
    bench = Bench(a=engine(3))
    bench.fleet.listed, bench.fleet.away = (instance("a"),), "planner http://p cannot be reached"
    answers = await asyncio.gather(*(bench.load.read(WAITING) for _ in range(3)), return_exceptions=True)
    assert ([PlannerAway] * 3, 1) == ([type(answer) for answer in answers], len(bench.fleet.asked))
    bench.fleet.away = ""
    assert Reading(3.0, True) == await bench.later()


async def test_a_caller_that_goes_away_takes_nobody_with_it() -> None:
    """Who shares its look gets the answer all the same; what is under way at the end is ended."""
    bench = Bench(a=engine(3))
    bench.fleet.listed = (instance("a"),)
    first = asyncio.create_task(bench.load.read(WAITING))
    second = asyncio.create_task(bench.load.read(WAITING))
    await asyncio.sleep(0)
    first.cancel()
    assert Reading(3.0, True) == await second
    with pytest.raises(asyncio.CancelledError):
        await first
    bench.clock.now += KEEP_S
    third = asyncio.create_task(bench.load.read(WAITING))
    await asyncio.sleep(0)
    await bench.load.close()
    with pytest.raises(asyncio.CancelledError):
        await third
