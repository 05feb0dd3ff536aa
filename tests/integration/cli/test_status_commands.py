"""Commands that query the planner: lists and explanations, once and followed."""

from __future__ import annotations

from typing import cast

import pytest

from planner.server import run_in_thread
from rfork import __version__
from rfork.planner_client.client import PlannerClient
from rfork.schema import HolderReport, Placement, RefusedImage
from rfork.settings import PlannerSettings
from tests.conftest import StartRfork
from tests.integration.cli.command_result import Rfork
from tests.unit.planner.builders import fork_request, seed_report


def test_status_as_json(rfork: Rfork, fleet: str) -> None:
    """The rows of the REST interface, for all models or for one."""
    seen = rfork("status", "--planner", fleet, "--json").json
    assert ["models", "instances", "forks", "holders"] == list(seen)
    assert 3 == len(cast(list[object], seen["forks"]))
    none = rfork("status", "--planner", fleet, "--json", "--model", "other").json
    assert {"models": [], "instances": [], "forks": [], "holders": []} == none


def test_status_lists_holders(rfork: Rfork, fleet: str) -> None:
    """Below the instances: the memory, and each image with its state or the reason why it is refused."""
    with PlannerClient(fleet) as client:
        client.report_holder(
            HolderReport(
                holder_id="holder-1", placement=Placement(host="host-9"), memory_bytes=10**9,
                refused=(RefusedImage(model="big", rank_key="main", reason="needs 140 GB of 1 GB memory"),),
            )
        )  # fmt: skip
        output = rfork("status", "--planner", fleet).out
        client.remove_holder("holder-1")
    assert "holders (1)" in output
    assert "needs 140 GB of 1 GB memory" in output


def test_status_reports_how_many_rows_are_omitted(rfork: Rfork, fleet: str) -> None:
    """The tree of a large fleet is cut at a limit that can be raised."""
    output = rfork("status", "--planner", fleet, "--limit", "1").out
    assert "1 more instance: use --limit 4 to show all" in output
    assert output.count(" on host-") == 3


def test_forks_newest_first(rfork: Rfork, fleet: str) -> None:
    """The list, its filters and its limit; stderr reports how many are omitted."""
    names = [line.split()[0] for line in rfork("status", "--forks", "--planner", fleet).out.splitlines()]
    assert ["fork", "fork-c", "fork-b", "fork-a"] == names
    page = rfork("status", "--forks", "--planner", fleet, "--state", "finished", "--limit", "1", "--json").json
    forks = cast(list[dict[str, object]], page["forks"])
    assert ["forks", "total"] == list(page)
    assert ["fork-c"] == [fork["fork_id"] for fork in forks]
    assert 2 == page["total"]
    cut = rfork("status", "--forks", "--planner", fleet, "--limit", "1")
    assert "2 older forks not shown; use --limit 3 to list all\n" == cut.err


def test_forks_are_followed(rfork: Rfork, fleet: str) -> None:
    """As lines or as JSON lines: first the running forks, then each change."""
    line = rfork("status", "--forks", "--planner", fleet, "--follow", "--limit", "1").out
    assert "fork-b m v1 on b: transfer 50%, 1.00 MB/s, 6.29 s left, from s (http)" in line
    event = rfork("status", "--forks", "--planner", fleet, "-f", "--limit", "1", "--json").json
    assert {"kind", "fork"} == set(event)
    assert "progress" == event["kind"]


def test_a_fork_is_explained(rfork: Rfork, fleet: str) -> None:
    """By fork id, instance id, or a prefix of either: what slowed it down, and what to do."""
    for name in ("fork-a", "a"):
        output = rfork("explain", "--planner", fleet, name).out
        assert "cause  s limited its readers to 1.00 MB/s" in output
        assert "advice Raise RFORK_MAX_EGRESS_BYTES_PER_S on s" in output
    fell = rfork("explain", "--planner", fleet, "fork-c").out
    assert "The target loaded from loader because of NoSource: no instance serves it." in fell


def test_an_explanation_as_json(rfork: Rfork, fleet: str) -> None:
    """The fork as listed by the planner, its timeline, the time lost per cause, and the verdict."""
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
        ("absent", "no fork or instance id begins with 'absent'"),
        ("fork-", "'fork-' is ambiguous, 3 ids match: fork-a, fork-b, fork-c"),
        ("s", "no fork of instance s: it loaded without forking, or its fork was forgotten"),
        ("a/b", "'a/b' is not an id: ids have only letters, digits and . _ : -"),
        ("", "'' is not an id: ids have only letters, digits and . _ : -"),
    ],
)
def test_ids_that_name_no_fork(rfork: Rfork, fleet: str, name: str, message: str) -> None:
    """One line states why, with what to do next; exit code 2."""
    done = rfork("explain", "--planner", fleet, name)
    # The planner runs in this process, so its log may be among the lines.
    error, hint = (line for line in done.err.splitlines() if line.startswith(("error: ", "hint: ")))
    assert f"error: {message}" == error
    assert "hint: " == hint[:6]
    assert 2 == done.code


def test_the_version(rfork: Rfork) -> None:
    """`rfork --version` prints only the version."""
    assert f"{__version__}\n" == rfork("--version").out


def test_following_continues_when_the_planner_is_back(rfork_process: StartRfork, free_port: int) -> None:
    """stderr reports the planner's restart, and later changes are shown."""
    settings = PlannerSettings(port=free_port)
    with run_in_thread(settings) as url, PlannerClient(url) as client:
        client.report(seed_report("s"))
        client.request_plan(fork_request("a"))
        command = rfork_process(
            "status", "--forks", "-f", "--limit", "2", "--planner", url, until="fork-a m v1 on a: planned"
        )
    with run_in_thread(settings) as url, PlannerClient(url) as client:
        command.wait_for("reconnected to planner")
        client.report(seed_report("s"))
        client.request_plan(fork_request("b"))
        assert 0 == command.wait()
        assert "fork-b m v1 on b: planned" in command.stdout
