"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from rfork import logs
from tests.ports import free_port
from tests.processes import START_S, RforkProcess

if sys.version_info < (3, 11):
    # The planner's integrations need Python 3.11, and these modules import them.
    collect_ignore = [
        "integration/keda",
        "kube",
        "unit/planner/integrations",
        "unit/test_operating_page.py",
        "unit/test_reference_pages.py",
    ]

# Durations are not asserted, since they depend on the machine. Each run uses the same examples, so that a
# failure is due to a change; `make test-all` searches for new ones.
NO_DEADLINE = hypothesis.settings(
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # of making an example
)
hypothesis.settings.register_profile("explore", NO_DEADLINE)
hypothesis.settings.register_profile("rfork", NO_DEADLINE, derandomize=True)
hypothesis.settings.load_profile("rfork")


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis uses constants of all loaded modules; load them all, so that examples do not depend on which
    tests ran before.
    """
    if config.getoption("--hypothesis-profile") != "explore":
        providers._get_local_constants = lambda: providers._local_constants


def _exempt_from_collection() -> None:
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage during the imports: they leave little, and each collection traverses all modules."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exempt all that was imported from garbage collection: tests that collect garbage would traverse it each time."""
    _exempt_from_collection()


if TYPE_CHECKING:
    from tests.fake_libcuda.fake_gpu import FakeGpu

StartRfork = Callable[..., RforkProcess]
JOIN_S = 30.0
"""Timeout for each thread that was stopped."""


@pytest.fixture(autouse=True)
def _no_rfork_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests use rfork's defaults, regardless of the developer's environment."""
    for name in [name for name in os.environ if name.startswith("RFORK_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _fixed_random_seed(request: pytest.FixtureRequest) -> None:
    """Random choices of the product in this process (jitter) are the same in each run of a test."""
    random.seed(request.node.nodeid)


@pytest.fixture(autouse=True)
def _signal_handlers_restored() -> Iterator[None]:
    """Restore signal handlers that a command in this process has set."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    """Restore the logging configuration after a command in this process has changed it."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    levels = {name: logging.getLogger(name).level for name in (None, *logs.NOISY_LOGGERS)}
    yield
    root.handlers = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def _sigint_not_ignored() -> None:
    """Restore SIGINT: a shell that runs the tests in the background makes them and their children ignore it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _collection_is_fast() -> Iterator[None]:
    """Exempt what a test module leaves, and what its tests made subject to collection again."""
    yield
    _exempt_from_collection()


@pytest.fixture(scope="module", autouse=True)
def _seeds_closed() -> Iterator[None]:
    """Close seeds that a test module started in this process: the next module counts threads and descriptors."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread.name.startswith("rfork") and thread not in before]
    for thread in left:
        with contextlib.suppress(RuntimeError):  # an interrupted start: the thread has not begun yet
            thread.join(JOIN_S)
    assert [] == [thread.name for thread in left if thread.is_alive()]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder of a tiny random Llama: config, tokenizer, shards. Do not write into it."""
    from tests.models import make_tiny_llama  # imports torch, for which the process that distributes tests has no use

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    make_tiny_llama(folder)
    return folder


@pytest.fixture
def fake_gpu() -> Iterator[FakeGpu]:
    """Let rfork use the strict fake of the CUDA driver; the test fails if it breaks a rule or releases too little."""
    from tests.fake_libcuda.install import installed  # imports torch

    with installed() as gpu:
        yield gpu


@pytest.fixture(name="free_port")
def _free_port() -> int:
    """Return a free TCP port of the loopback interface."""
    return free_port()


@pytest.fixture
def rfork_process() -> Iterator[StartRfork]:
    """Start ``rfork ARGUMENTS`` and, with `until`, wait for a line that matches it.

    ``start(*arguments, until=None, environment=None, deadline_s=120) -> RforkProcess``. Each process and its
    children are ended at the end of the test, and its output is shown if the test fails.
    """
    started: list[RforkProcess] = []

    def start(
        *arguments: str,
        until: str | None = None,
        environment: dict[str, str] | None = None,
        deadline_s: float = START_S,
    ) -> RforkProcess:
        surroundings = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **(environment or {})}
        process = RforkProcess(arguments, surroundings)
        started.append(process)
        if until is not None:
            process.wait_for(until, deadline_s=deadline_s)
        return process

    yield start
    for process in reversed(started):
        process.stop()
        print(process.transcript())
