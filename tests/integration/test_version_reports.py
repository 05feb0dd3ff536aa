"""Weights versions in a fork's report, with a real planner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

import rfork
from planner.server import run_in_thread
from rfork.receiver.report import ForkReport
from rfork.settings import InstanceSettings, PlannerSettings


@pytest.fixture
def settings() -> Iterator[InstanceSettings]:
    """Settings for a planner in this process, which knows a seed of version v1."""
    with run_in_thread(PlannerSettings(port=0, batch_window_s=0)) as url:
        chosen = InstanceSettings(planner=url, transports=("http",))
        with rfork.seed(nn.Linear(8, 8), model="net", version="v1", settings=chosen) as seed:
            assert seed.wait_registered(30)
            yield chosen


def fill(module: nn.Module) -> None:
    """Load the complete module, as a loader must."""
    for parameter in module.parameters():
        nn.init.ones_(parameter)


def fork(settings: InstanceSettings, **options: object) -> ForkReport:
    """Fork the model into a new module, and close its source immediately."""
    report = rfork.fork(nn.Linear(8, 8), model="net", settings=settings, **options)  # type: ignore[arg-type]
    assert report.seed is not None
    report.seed.close()
    return report


def test_an_adopted_version_is_reported(settings: InstanceSettings) -> None:
    """The target had none of its own."""
    report = fork(settings)
    assert "served" == report.version_from
    assert "adopted version v1" in report.line()
    assert "v1" == report.to_dict()["version"]


def test_a_stated_version_is_the_targets_own(settings: InstanceSettings) -> None:
    """Its summary line is the normal one."""
    report = fork(settings, version="v1")
    assert "own" == report.version_from
    assert "version" not in report.line()


def test_the_first_instance_of_a_version_reports_it(settings: InstanceSettings) -> None:
    """It loads from storage, although instances of the model exist."""
    report = fork(settings, version="v2", loader=fill)
    assert report.first
    assert "own" == report.version_from
    assert "from loader:, first of version v2; 1/1 chunks verified" in report.line()


def test_a_target_adopts_none_of_two_versions(settings: InstanceSettings) -> None:
    """It loads from storage, and its summary line has the reason."""
    with rfork.seed(nn.Linear(8, 8), model="net", version="v2", settings=settings) as seed:
        assert seed.wait_registered(30)
        report = fork(settings, loader=fill)
    assert "none" == report.version_from
    assert not report.first
    assert "from loader:, as several versions are served and this target states none; " in report.line()
