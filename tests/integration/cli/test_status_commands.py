"""What operators ask a planner: lists and explanations, of now and as they change."""

from __future__ import annotations

from typing import cast

import pytest

from planner.server import run_in_thread
from rfork.planner_client.client import PlannerClient
from rfork.settings import PlannerSettings
from tests.conftest import StartRfork
from tests.integration.cli.command_result import Rfork
from tests.unit.planner.builders import fork_request, seed_report


def test_status_as_json(rfork: Rfork, fleet: str) -> None:
    """The rows of the REST interface, all of them or those of one model."""
    seen = rfork("status", "--planner", fleet, "--json").json
    assert (["models", "instances", "forks"], 3) == (list(seen), len(cast(list[object], seen["forks"])))
    none = rfork("status", "--planner", fleet, "--json", "--model", "other").json
    assert {"models": [], "instances": [], "forks": []} == none


def test_status_of_many_says_what_it_leaves_out(rfork: Rfork, fleet: str) -> None:
    """A tree of a large fleet is cut at a limit, which can be raised."""
    output = rfork("status", "--planner", fleet, "--limit", "1").out
    assert ("1 more instance: use --limit 4 to show all" in output, output.count(" on host-")) == (True, 3)


def test_forks_newest_first(rfork: Rfork, fleet: str) -> None:
    """The list, its filters and its limit; what is left out is said on stderr."""
    names = [line.split()[0] for line in rfork("status", "--forks", "--planner", fleet).out.splitlines()]
    assert ["fork", "fork-c", "fork-b", "fork-a"] == names
    page = rfork("status", "--forks", "--planner", fleet, "--state", "finished", "--limit", "1", "--json").json
    forks = cast(list[dict[str, object]], page["forks"])
    assert (["forks", "total"], ["fork-c"], 2) == (
        list(page),
        [fork["fork_id"] for fork in forks],
        page["total"],
    )
    cut = rfork("status", "--forks", "--planner", fleet, "--limit", "1")
    assert "2 older forks not shown; use --limit 3 to list all\n" == cut.err


def test_forks_that_are_followed(rfork: Rfork, fleet: str) -> None:
    """As lines, or as JSON lines: what is under way at first, and then each change."""
    line = rfork("status", "--forks", "--planner", fleet, "--follow", "--limit", "1").out
    assert "fork-b m v1 on b: transfer 50%, 1.00 MB/s, 6.29 s left, from s (http)" in line
    event = rfork("status", "--forks", "--planner", fleet, "-f", "--limit", "1", "--json").json
    assert ({"kind", "fork"}, "progress") == (set(event), event["kind"])


def test_a_fork_is_explained(rfork: Rfork, fleet: str) -> None:
    """By its id, by its instance's, or by the beginning of either: what held it up, and what to do."""
    for name in ("fork-a", "a"):
        output = rfork("explain", "--planner", fleet, name).out
        assert "cause  s limited its readers to 1.00 MB/s" in output
        assert "advice Raise RFORK_MAX_EGRESS_BYTES_PER_S on s" in output
    fell = rfork("explain", "--planner", fleet, "fork-c").out
    assert "The target loaded from loader because of NoSource: nobody holds it." in fell


def test_an_explanation_as_json(rfork: Rfork, fleet: str) -> None:
    """The fork as the planner lists it, its account, what it lost to which cause, and the verdict."""
    explanation = rfork("explain", "--planner", fleet, "fork-a", "--json").json
    assert ["fork", "stats", "version", "time_losses", "comparison", "diagnosis"] == list(explanation)
    assert {
        "seconds", "phases", "link_bytes_per_s", "min_transfer_s", "transfer_s", "sources", "bytes_repeated",
        "replans", "reasons", "median_fork_s", "median_storage_s",
    } == set(cast(dict[str, object], explanation["stats"]))  # fmt: skip
    assert ["cause", "text", "advice"] == list(cast(dict[str, object], explanation["diagnosis"]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody", "no fork or instance id begins with 'nobody'"),
        ("fork-", "'fork-' is ambiguous, 3 ids match: fork-a, fork-b, fork-c"),
        ("s", "no fork of instance s: it loaded without forking, or its fork was forgotten"),
        ("a/b", "'a/b' is not an id: ids have only letters, digits and . _ : -"),
        ("", "'' is not an id: ids have only letters, digits and . _ : -"),
    ],
)
def test_ids_that_name_no_fork(rfork: Rfork, fleet: str, name: str, message: str) -> None:
    """Each says why in one line, with what to do next; exit code 2."""
    done = rfork("explain", "--planner", fleet, name)
    # The planner is in this process, and its log may be among the lines.
    error, hint = (line for line in done.err.splitlines() if line.startswith(("error: ", "hint: ")))
    assert (f"error: {message}", "hint: ", 2) == (error, hint[:6], done.code)


def test_the_version_as_json(rfork: Rfork) -> None:
    """As every command that prints a result."""
    assert ["version"] == list(rfork("version", "--json").json)


def test_following_goes_on_when_the_planner_is_back(rfork_process: StartRfork, free_port: int) -> None:
    """A restart of the planner is told on stderr, and the changes after it are told too."""
    settings = PlannerSettings(port=free_port)
    with run_in_thread(settings) as url, PlannerClient(url) as client:
        client.report(seed_report("s"))
        client.request_plan(fork_request("a"))
        command = rfork_process("status", "--forks", "-f", "--limit", "2", "--planner", url, until="fork-a m v1 on a: planned")
    with run_in_thread(settings) as url, PlannerClient(url) as client:
        command.wait_for("reconnected to planner")
        client.report(seed_report("s"))
        client.request_plan(fork_request("b"))
        assert (0, True) == (command.wait(), "fork-b m v1 on b: planned" in command.stdout)
