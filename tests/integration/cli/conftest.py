"""A planner that knows something, and ways to ask it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from planner.service import running
from rfork.cli.app import app
from rfork.control.client import PlannerClient
from rfork.settings import PlannerSettings
from rfork.wire import ForkFinish, ForkProgress
from tests.integration.cli.ended import Ended, Rfork
from tests.integration.cli.terminal import Terminal
from tests.unit.planner.builders import ask, whole

HALF = ForkProgress(
    verified=((0, 6),), bytes_read=6 << 20, bytes_per_s=1e6, sources={"s": 6 << 20}, transports={"s": "http"},
    phases={"capture": 0.1, "transfer": 5.0}, link_bytes_per_s=2e6,
)  # fmt: skip
DONE = ForkFinish(
    outcome="forked", seconds=12.0, bytes_read=12 << 20, sources={"s": 12 << 20}, transports={"s": "http"},
    phases={"capture": 0.1, "plan": 0.1, "transfer": 11.8}, link_bytes_per_s=2e6,
)  # fmt: skip
LEFT = ForkFinish(
    outcome="fallback", seconds=2.0, bytes_read=0, fallback="loader", reasons=("NoSource: nobody holds it",)
)


@pytest.fixture
def rfork() -> Rfork:
    """Runs `rfork ARGUMENTS` in this process."""

    def run(*arguments: str, **environment: str) -> Ended:
        done = CliRunner().invoke(app, list(arguments), env=environment)
        assert isinstance(done.exception, SystemExit | None), done.exception
        assert "Traceback" not in done.output
        return Ended(done.stdout, done.stderr, done.exit_code)

    return run


@pytest.fixture(scope="module")
def fleet() -> Iterator[str]:
    """The URL of a planner that knows a seed, a fork under way, one that ended and one that fell back."""
    with (
        running(PlannerSettings(port=0, forget_s=3600, lease_ttl_s=3600)) as url,
        PlannerClient(url) as client,
    ):
        client.report(whole("s", readers=("fork-b",), egress_rate=1_000_000, max_readers=9))
        for name in ("a", "b", "c"):
            client.ask(ask(name))
        client.finish("fork-a", DONE)
        client.progress("fork-b", HALF)
        client.finish("fork-c", LEFT)
        yield url


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """A terminal of 20 lines, and of 70 columns: narrow for what is shown."""
    made = Terminal(rows=20, columns=70)
    yield made
    made.close()
