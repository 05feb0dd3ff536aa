"""Planners that are silent, slow or endless: no call, no fork and no seed is held by them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import pytest
from torch import nn

import rfork
from rfork.control.client import PlannerClient
from rfork.errors import PlannerRefused, PlannerUnreachable
from rfork.settings import Settings
from tests.hostile_planner import (
    HOSTILE,
    Answer,
    endless_body,
    gzip_bomb,
    never_accepting,
    serving,
    silent,
)

DEADLINE_S = 1.0
FAR_S = 10.0
"""Far more than any of these calls may take, and far less than the defects cost, which have no bound."""
ENDLESS = [answer for answer in HOSTILE if answer not in (endless_body, gzip_bomb)]


def settings(planner: str, **changed: float) -> Settings:
    return Settings.model_validate(
        {"planner": planner, "transports": ("http",), "deadline_s": DEADLINE_S, **changed}
    )


def seconds(call: Callable[[], object]) -> float:
    """How long the call takes, which ends with an error of rfork's."""
    begun = time.monotonic()
    with pytest.raises(rfork.RforkError):
        call()
    return time.monotonic() - begun


@pytest.mark.parametrize("answer", ENDLESS)
def test_a_call_ends_by_its_timeout(answer: Answer) -> None:
    """The timeout is for the complete answer, its head included."""
    with serving(answer) as url, PlannerClient(url, timeout_s=0.5) as client:
        with pytest.raises(PlannerUnreachable, match=r"no answer within 0\.5 s") as raised:
            client.models()
        assert raised.value.silent


@pytest.mark.parametrize(
    ("answer", "reason"), [(endless_body, "larger than 32 MiB"), (gzip_bomb, "its body is encoded")]
)
def test_an_answer_without_bound_is_refused(answer: Answer, reason: str) -> None:
    """Neither its bytes nor what they expand to fill this process's memory."""
    with serving(answer) as url, PlannerClient(url) as client:
        with pytest.raises(PlannerRefused, match=reason) as refused:
            client.models()
        assert "not-a-planner" == refused.value.problem


def test_the_first_deadline_of_a_call_holds() -> None:
    """The caller's own, where that comes before the client's timeout."""
    with (
        serving(silent) as url,
        PlannerClient(url, timeout_s=60.0) as client,
        pytest.raises(PlannerUnreachable, match=r"no answer within 0\.2 s"),
    ):
        client.remove("i", deadline=time.monotonic() + 0.2)


def test_closing_a_client_ends_a_call_in_progress() -> None:
    """The thread that waits for the answer gets an error at once."""
    raised: list[PlannerUnreachable] = []
    asked = threading.Event()

    def report_and_wait(connection: socket.socket, ended: threading.Event) -> None:
        asked.set()
        ended.wait()

    with serving(report_and_wait) as url:
        client = PlannerClient(url, timeout_s=3600.0)

        def call() -> None:
            with pytest.raises(PlannerUnreachable) as unreachable:
                client.models()
            raised.append(unreachable.value)

        calling = threading.Thread(target=call)
        calling.start()
        assert asked.wait(FAR_S)
        client.close()
        calling.join(FAR_S)
    assert 1 == len(raised)


@pytest.mark.parametrize("answer", HOSTILE)
def test_a_fork_ends_by_its_deadline(answer: Answer) -> None:
    """Whatever the planner sends, and the seed that the fork is meanwhile is closed too."""
    with serving(answer) as url:
        took = seconds(lambda: rfork.fork(nn.Linear(64, 64), model="m", settings=settings(url)))
    assert took < FAR_S


def test_a_fork_whose_planner_accepts_no_connection_ends_by_its_deadline() -> None:
    """The wait for the connection is bounded too."""
    with never_accepting() as (host, port):
        chosen = settings(f"http://{host}:{port}", planner_timeout_s=60.0)
        took = seconds(lambda: rfork.fork(nn.Linear(64, 64), model="m", settings=chosen))
    assert took < FAR_S


@pytest.mark.parametrize("answer", [silent, ENDLESS[1]])
def test_a_seed_closes_soon(answer: Answer) -> None:
    """A planner that does not answer is not waited for, though its timeout is a minute."""
    with serving(answer) as url:
        chosen = settings(url, planner_timeout_s=60.0)
        with rfork.seed(nn.Linear(64, 64), model="m", settings=chosen):
            begun = time.monotonic()
        took = time.monotonic() - begun
    assert took < FAR_S


def test_a_fork_that_fails_leaves_nothing_behind() -> None:
    """No thread and no descriptor, wherever it fails."""

    def left() -> tuple[set[str], int]:
        return {each.name for each in threading.enumerate()}, len(os.listdir("/proc/self/fd"))

    chosen = settings("http://127.0.0.1:9")

    def fail(model: object) -> None:
        with pytest.raises((TypeError, ValueError, rfork.RforkError)):
            rfork.fork(nn.Linear(4, 4), model=model, settings=chosen)  # type: ignore[arg-type]

    fail("m")  # what is made once in a process
    names, descriptors = left()
    for _ in range(3):
        fail(3)
    names_after, descriptors_after = left()
    assert set() == {name for name in names_after - names if name.startswith("rfork")}
    assert descriptors >= descriptors_after
