"""One trace across three processes, sent to a collector; and a collector that does not respond."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import cast

import pytest

from tests.conftest import StartRfork
from tests.otlp_collector import LONG_FLUSH_PATCH, CollectedSpan, running_collector
from tests.processes import RforkProcess, startup_patch

READY = r'"event": ?"ready"'


def event(process: RforkProcess) -> dict[str, str]:
    """Return the process's ready event."""
    return cast(dict[str, str], json.loads(process.wait_for(rf"^.*{READY}.*$").group()))


def parents_of(spans: list[CollectedSpan]) -> dict[str, str]:
    """Return the name and service of each span's parent, by the span's own; empty for a trace's root."""
    known = {span.span_id: f"{span.service}: {span.name}" for span in spans}
    return {f"{span.service}: {span.name}": known[span.parent] if span.parent else "" for span in spans}


def test_one_trace_across_three_processes(rfork_process: StartRfork, tiny_model: Path, tmp_path: Path) -> None:
    """The fork's trace: its spans in the planner and in the seed have the fork as their parent."""
    with running_collector() as collector:
        traced = {
            "RFORK_TRACING_ENDPOINT": collector.url,
            "RFORK_TRACING_HEADERS": "x-tenant=fleet",
            "RFORK_TRANSPORTS": "http",
            **startup_patch(tmp_path / "patch", LONG_FLUSH_PATCH),
        }
        planner = rfork_process("planner", "--port", "0", "--json", until=READY, environment=traced)
        options = ("--name", "tiny", "--planner", event(planner)["url"], "--json")
        seed = rfork_process("seed", str(tiny_model), *options, until=READY, environment=traced)
        pull = rfork_process("pull", str(tiny_model), *options, environment=traced)
        assert 0 == pull.wait()
        report = json.loads(pull.stdout)
        for process in (seed, planner):
            process.signal(signal.SIGTERM)
            process.wait()
        spans = [span for span in collector.spans if span.trace_id == report["trace_id"]]
    instance, coordinator = "rfork-instance: ", "rfork-planner: "
    assert {
        f"{instance}fork": "",
        f"{instance}capture": f"{instance}fork",
        f"{instance}transfer": f"{instance}fork",
        f"{instance}plan": f"{instance}transfer",
        f"{coordinator}POST /v1/forks": f"{instance}plan",
        f"{coordinator}wait for plan": f"{coordinator}POST /v1/forks",
        f"{coordinator}make plan": f"{coordinator}wait for plan",
        f"{instance}read from peer": f"{instance}transfer",
        f"{instance}serve": f"{instance}read from peer",
        f"{coordinator}POST /v1/forks/{{fork_id}}/finish": f"{instance}fork",
    } == {name: parent for name, parent in parents_of(spans).items() if "progress" not in name}
    (fork,), (serve_span,) = collector.spans_named("fork"), collector.spans_named("serve")
    assert report["fork_id"] == serve_span.attributes["rfork.fork"]
    assert report["image_bytes"] == serve_span.attributes["rfork.bytes"]
    assert "forked" == fork.attributes["rfork.outcome"]
    assert not fork.failed
    assert {"fleet"} == {headers["x-tenant"] for headers in collector.headers}
    assert report["trace_id"] in planner.stderr


@pytest.mark.slow  # logic: tests/unit/tracing/test_sdk.py
def test_a_hanging_collector_costs_only_spans(rfork_process: StartRfork, tiny_model: Path) -> None:
    """The fork and its process end, and the number of dropped spans is logged."""
    with running_collector(hangs=True) as collector:
        planner = rfork_process("planner", "--port", "0", "--json", until=READY)
        options = ("--name", "tiny", "--planner", event(planner)["url"], "--json")
        rfork_process("seed", str(tiny_model), *options, until=READY)
        pull = rfork_process("pull", str(tiny_model), *options, environment={"RFORK_TRACING_ENDPOINT": collector.url})
        assert 0 == pull.wait()
        request_received = collector.request_received.wait(60)
    dropped = json.loads(pull.wait_for(r"^.*spans dropped in total.*$").group())
    assert request_received
    assert "forked" == json.loads(pull.stdout)["outcome"]
    assert dropped["spans"] > 0


def test_an_invalid_tracing_endpoint_fails_the_start(rfork_process: StartRfork) -> None:
    """In one line that names the setting."""
    planner = rfork_process("planner", "--port", "0", environment={"RFORK_TRACING_ENDPOINT": "collector:4318"})
    assert 2 == planner.wait()
    assert "RFORK_TRACING_ENDPOINT" in planner.stderr
