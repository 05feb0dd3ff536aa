"""A fork's reported rates per source, compared with the sources' own metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import rfork
from planner.server import run_in_thread
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkEvent
from rfork.settings import InstanceSettings, PlannerSettings

RATES = (12_000_000, 6_000_000)
"""Maximum bytes per second of each seed: slow enough for the fork to report progress."""


@pytest.fixture
def planner() -> Iterator[str]:
    """The URL of a planner without waiting times."""
    with run_in_thread(PlannerSettings(port=0, batch_window_s=0, scaleup_wait_s=0)) as url:
        yield url


def _constant_model(value: float) -> nn.Module:
    """Return a model of 33.6 MB, in layers of 4 MB."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def _events(client: PlannerClient, collected: list[ForkEvent]) -> threading.Thread:
    """Collect the planner's fork events until one fork has ended."""

    def follow() -> None:
        with client.events() as stream:
            listening.set()
            for event in stream:
                collected.append(event)
                if event.kind == "ended":
                    return

    listening = threading.Event()
    thread = threading.Thread(target=follow)
    thread.start()
    assert listening.wait(30)
    return thread


def test_reported_rates_match_each_source(planner: str) -> None:
    """A fork that reads from two seeds reports bytes and rates per source; so does the planner."""

    def settings(host: str, rate: int | None = None) -> InstanceSettings:
        return InstanceSettings(planner=planner, transports=("http",), node_name=host, max_egress_bytes_per_s=rate)

    target = _constant_model(0.0)
    with (
        rfork.seed(_constant_model(1.0), model="m", settings=settings("h0", RATES[0])) as fast,
        rfork.seed(_constant_model(1.0), model="m", settings=settings("h1", RATES[1])) as slow,
        PlannerClient(planner) as client,
    ):
        seeds = {seed.identity.instance_id: seed for seed in (fast, slow)}
        assert [True, True] == [seed.wait_registered(30) for seed in seeds.values()]
        events: list[ForkEvent] = []
        following = _events(client, events)
        report = rfork.fork(target, model="m", settings=settings("h2"))
        following.join()
        served_bytes = {name: seed.served_bytes for name, seed in seeds.items()}
    assert report.seed is not None
    report.seed.close()
    assert all(torch.equal(each, torch.ones_like(each)) for each in target.parameters())
    assert report.image_bytes == sum(served_bytes.values())
    progress_reports = [event.fork.progress for event in events if event.kind == "progress"]
    finish = events[-1].fork.finish
    assert finish is not None
    assert served_bytes == finish.sources
    assert set(served_bytes) == set(finish.source_bytes_per_s)
    assert set(served_bytes) == {
        name for each in progress_reports if each is not None for name in each.source_bytes_per_s
    }
    assert set(served_bytes) == {
        name for each in progress_reports if each is not None for name in each.source_active_bytes_per_s
    }
