"""Planners that are silent, slow or endless: none blocks a call, a fork or a seed."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import pytest
from torch import nn

import rfork
from rfork.errors import PlannerRejected, PlannerUnreachable
from rfork.planner_client.client import PlannerClient
from rfork.settings import InstanceSettings
from tests.hostile_planner import (
    HOSTILE,
    ResponseWriter,
    endless_body,
    gzip_bomb,
    hostile_server,
    silent,
    unaccepting_address,
)

DEADLINE_S = 1.0
LONG_DEADLINE_S = 10.0
"""Far more than any of these calls needs, and far less than a call without a time limit."""
SLOW_RESPONSES = [write_response for write_response in HOSTILE if write_response not in (endless_body, gzip_bomb)]


def settings(planner: str, **changed: float) -> InstanceSettings:
    return InstanceSettings.model_validate(
        {"planner": planner, "transports": ("http",), "deadline_s": DEADLINE_S, **changed}
    )


def failing_call_seconds(call: Callable[[], object]) -> float:
    """Return the duration of a call that raises an rfork error."""
    begun = time.monotonic()
    with pytest.raises(rfork.RforkError):
        call()
    return time.monotonic() - begun


@pytest.mark.parametrize("write_response", SLOW_RESPONSES)
def test_a_call_ends_by_its_timeout(write_response: ResponseWriter) -> None:
    """The timeout covers the complete response, including its head."""
    with hostile_server(write_response) as url, PlannerClient(url, timeout_s=0.5) as client:
        with pytest.raises(PlannerUnreachable, match=r"no response within 0\.5 s") as raised:
            client.models()
        assert raised.value.silent


@pytest.mark.parametrize(
    ("write_response", "reason"), [(endless_body, "larger than 32 MiB"), (gzip_bomb, "its body is encoded")]
)
def test_an_unbounded_response_is_refused(write_response: ResponseWriter, reason: str) -> None:
    """Neither its bytes nor their decompressed form fill this process's memory."""
    with hostile_server(write_response) as url, PlannerClient(url) as client:
        with pytest.raises(PlannerRejected, match=reason) as refused:
            client.models()
        assert "not-a-planner" == refused.value.problem


def test_the_earlier_deadline_of_a_call_applies() -> None:
    """The caller's deadline applies if it is before the client's timeout."""
    with (
        hostile_server(silent) as url,
        PlannerClient(url, timeout_s=60.0) as client,
        pytest.raises(PlannerUnreachable, match=r"no response within 0\.2 s"),
    ):
        client.remove("i", deadline=time.monotonic() + 0.2)


def test_closing_a_client_ends_a_call_in_progress() -> None:
    """The thread that waits for the response gets an error immediately."""
    raised: list[PlannerUnreachable] = []
    request_received = threading.Event()

    def report_and_wait(connection: socket.socket, ended: threading.Event) -> None:
        request_received.set()
        ended.wait()

    with hostile_server(report_and_wait) as url:
        client = PlannerClient(url, timeout_s=3600.0)

        def call() -> None:
            with pytest.raises(PlannerUnreachable) as unreachable:
                client.models()
            raised.append(unreachable.value)

        calling = threading.Thread(target=call)
        calling.start()
        assert request_received.wait(LONG_DEADLINE_S)
        client.close()
        calling.join(LONG_DEADLINE_S)
    assert 1 == len(raised)


@pytest.mark.parametrize(
    "write_response",
    [*HOSTILE[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in HOSTILE[2:])],
)
def test_a_fork_ends_by_its_deadline(write_response: ResponseWriter) -> None:
    """Whatever the planner sends, the fork ends, and the seed that it is meanwhile is closed too."""
    with hostile_server(write_response) as url:
        elapsed_s = failing_call_seconds(lambda: rfork.fork(nn.Linear(64, 64), model="m", settings=settings(url)))
    assert elapsed_s < LONG_DEADLINE_S


def test_a_planner_that_accepts_no_connection_delays_no_deadline() -> None:
    """The connection attempt has a time limit too."""
    with unaccepting_address() as (host, port):
        chosen = settings(f"http://{host}:{port}", planner_timeout_s=60.0)
        elapsed_s = failing_call_seconds(lambda: rfork.fork(nn.Linear(64, 64), model="m", settings=chosen))
    assert elapsed_s < LONG_DEADLINE_S


@pytest.mark.parametrize("write_response", [silent, SLOW_RESPONSES[1]])
def test_a_seed_closes_soon(write_response: ResponseWriter) -> None:
    """It does not wait for a planner that does not respond, although its timeout is a minute."""
    with hostile_server(write_response) as url:
        chosen = settings(url, planner_timeout_s=60.0)
        with rfork.seed(nn.Linear(64, 64), model="m", settings=chosen):
            begun = time.monotonic()
        elapsed_s = time.monotonic() - begun
    assert elapsed_s < LONG_DEADLINE_S


def test_a_failed_fork_leaves_nothing_open() -> None:
    """No thread and no descriptor is left, wherever it fails."""

    def left() -> tuple[set[str], int]:
        return {each.name for each in threading.enumerate()}, len(os.listdir("/proc/self/fd"))

    chosen = settings("http://127.0.0.1:9")

    def fail(model: object) -> None:
        with pytest.raises((TypeError, ValueError, rfork.RforkError)):
            rfork.fork(nn.Linear(4, 4), model=model, settings=chosen)  # type: ignore[arg-type]

    fail("m")  # objects created once per process
    names, descriptors = left()
    for _ in range(3):
        fail(3)
    names_after, descriptors_after = left()
    assert set() == {name for name in names_after - names if name.startswith("rfork")}
    assert descriptors >= descriptors_after
