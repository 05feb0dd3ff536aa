"""Fixtures of tests of `fork_pretrained` across layouts and with tensor parallelism."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import cast

import pytest

from rfork.settings import InstanceSettings
from tests.conftest import StartRfork
from tests.integration.test_fork_pretrained import wait_until_closed


@pytest.fixture
def settings(rfork_process: StartRfork) -> InstanceSettings:
    """Settings of instances that take part in forks across layouts, with a planner of their own."""
    # Until it expects a heartbeat of each instance, a planner without records plans no fork of a rank.
    environment = {"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "0.1"}
    process = rfork_process("planner", "--port", "0", "--json", environment=environment)
    line = process.wait_for(r'^.*"event": ?"ready".*$').group()
    return InstanceSettings(
        planner=cast(dict[str, str], json.loads(line))["url"],
        cross_layout=True,
        transports=("http",),
        no_source_timeout_s=0.2,
        drain_timeout_s=0,
    )


@pytest.fixture(autouse=True)
def _seeds_closed() -> Iterator[None]:
    """Closes the seeds of all models that a test forked."""
    yield
    gc.collect()
    wait_until_closed()
