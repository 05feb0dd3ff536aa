"""What strangers may send the scaler is bounded: pages, metadata, and what is remembered of both."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from planner.hooks.keda import load
from planner.hooks.keda.load import AT_ONCE, Load
from planner.hooks.keda.signals import LONGEST_SAMPLE, MOST_SAMPLES, Page, page_of
from planner.hooks.keda.triggers import MOST_KEYS, BadTrigger, Trigger, trigger_of
from tests.unit.clock import Clock
from tests.unit.hooks.keda.fakes import MODEL, FakeEngines, FakeFleet, engine, instance

WAITING = Trigger(MODEL, "waiting", 10.0, port=8000)


def samples(number: int) -> bytes:
    return b"".join(b'vllm:num_requests_waiting{engine="%d"} 1\n' % each for each in range(number))


def test_a_page_of_many_samples_is_none() -> None:
    """It would be read for seconds, in which no other trigger is answered."""
    assert MOST_SAMPLES == page_of(samples(MOST_SAMPLES))["waiting"]
    with pytest.raises(ValueError, match="more than"):
        page_of(samples(MOST_SAMPLES + 1))
    with pytest.raises(ValueError, match="more than"):
        page_of(b'vllm:num_requests_waiting{engine="' + b"a" * LONGEST_SAMPLE + b'"} 1\n')


def test_metadata_of_many_keys_is_no_trigger() -> None:
    """Each key that is not known is compared with those that are."""
    with pytest.raises(BadTrigger, match=f"at most {MOST_KEYS}"):
        trigger_of({f"key{number}": "" for number in range(MOST_KEYS + 1)})


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


async def test_who_was_silent_is_forgotten_at_last(
    monkeypatch: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture
) -> None:
    """Callers may name any path: the way that was looked at longest ago is told anew, and no memory grows."""
    monkeypatch.setattr(load, "MOST_SILENT", 2)
    fleet, clock = FakeFleet(), Clock()
    fleet.listed = (instance("a"), instance("b"))
    reads = Load(fleet, FakeEngines({"a": engine(1)}), clock, CollectorRegistry())
    told = []
    for path in ("/1", "/2", "/1", "/3", "/1", "/2"):
        clock.now += 60
        before = len(lines.records)
        await reads.read(replace(WAITING, path=path))
        told.append((path, len(lines.records) - before))
    assert [("/1", 1), ("/2", 1), ("/1", 0), ("/3", 1), ("/1", 0), ("/2", 1)] == told


async def test_engines_that_are_gone_do_not_answer_again(lines: pytest.LogCaptureFixture) -> None:
    """Where a silent engine is taken away, and no other is there, nobody is said to answer."""
    fleet, clock, engines = FakeFleet(), Clock(), FakeEngines({"b": engine(1)})
    reads = Load(fleet, engines, clock, CollectorRegistry())
    told = []
    for listed in (("a", "b"), (), ("a", "b"), ("b",)):
        clock.now += 60
        fleet.listed = tuple(map(instance, listed))
        engines.pages = {"b": engine(1)} if listed else {}
        await reads.read(WAITING)
        told.append(["again" in record.message for record in lines.records])
        lines.clear()
    assert [[False], [], [False], [True]] == told


class Counts:
    """Engines that are counted while they are asked."""

    def __init__(self) -> None:
        self.under_way = self.most = 0

    async def read(self, host: str, *, scheme: str, port: int, path: str) -> Page:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        return {"waiting": 1.0}


async def test_one_model_takes_no_more_than_its_places() -> None:
    """All of its engines are asked, a part of them at one time."""
    fleet, engines = FakeFleet(), Counts()
    fleet.listed = tuple(instance(f"h{number}") for number in range(3 * AT_ONCE))
    reading = await Load(fleet, engines, Clock(), CollectorRegistry()).read(WAITING)
    assert (3.0 * AT_ONCE, AT_ONCE) == (reading.value, engines.most)
