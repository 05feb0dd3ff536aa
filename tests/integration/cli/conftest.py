"""Fixtures: a planner with a small fleet, and access to it through the command line and a terminal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from planner.server import run_in_thread
from rfork.cli.app import app
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkProgress, ForkResult
from rfork.settings import PlannerSettings
from tests.integration.cli.command_result import CommandResult, Rfork
from tests.integration.cli.terminal import PseudoTerminal
from tests.unit.planner.builders import fork_request, seed_report

HALF_PROGRESS = ForkProgress(
    verified=((0, 6),), bytes_read=6 << 20, bytes_per_s=1e6, sources={"s": 6 << 20}, transports={"s": "http"},
    phases={"capture": 0.1, "transfer": 5.0}, link_bytes_per_s=2e6,
)  # fmt: skip
FORKED_RESULT = ForkResult(
    outcome="forked", seconds=12.0, bytes_read=12 << 20, sources={"s": 12 << 20}, transports={"s": "http"},
    phases={"capture": 0.1, "plan": 0.1, "transfer": 11.8}, link_bytes_per_s=2e6,
)  # fmt: skip
FALLBACK_RESULT = ForkResult(
    outcome="fallback", seconds=2.0, bytes_read=0, fallback="loader", reasons=("NoSource: no instance serves it",)
)


@pytest.fixture
def rfork() -> Rfork:
    """Runs `rfork ARGUMENTS` in this process."""

    def run(*arguments: str, **environment: str) -> CommandResult:
        done = CliRunner().invoke(app, list(arguments), env=environment)
        assert isinstance(done.exception, SystemExit | None), done.exception
        assert "Traceback" not in done.output
        return CommandResult(done.stdout, done.stderr, done.exit_code)

    return run


@pytest.fixture(scope="module")
def fleet() -> Iterator[str]:
    """URL of a planner with a seed, a running fork, a finished fork and a fork that fell back."""
    with (
        run_in_thread(PlannerSettings(port=0, instance_ttl_s=3600, lease_ttl_s=3600)) as url,
        PlannerClient(url) as client,
    ):
        client.report(seed_report("s", readers=("fork-b",), egress_rate=1_000_000, max_readers=9))
        for name in ("a", "b", "c"):
            client.request_plan(fork_request(name))
        client.finish("fork-a", FORKED_RESULT)
        client.progress("fork-b", HALF_PROGRESS)
        client.finish("fork-c", FALLBACK_RESULT)
        yield url


@pytest.fixture
def terminal() -> Iterator[PseudoTerminal]:
    """A terminal of 20 lines and 70 columns, narrower than the output."""
    made = PseudoTerminal(rows=20, columns=70)
    yield made
    made.close()
