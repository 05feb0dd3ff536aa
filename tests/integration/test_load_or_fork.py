"""A toy engine's model started in real processes: forked if an instance has it, otherwise loaded once."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import cast

import pytest

from rfork.image import ranges
from rfork.image.chunks import MIB
from rfork.planner_client.client import PlannerClient
from tests.conftest import StartRfork
from tests.integration.engine_node import RESPONSE_TIMEOUT_S, EngineNode, expected_proof

READY = r'"event": ?"ready"'
LOADING = "loading for all waiting instances"
SIZE = 6 * MIB
LARGE = 300 * 1000 * 1000
MAX_GROWTH_BYTES = 1.5 * LARGE
"""Of a process that loads a large model once; includes modules that are imported meanwhile."""
Start = Callable[..., EngineNode]


class ToyEngineFleet:
    """A planner, and toy engines of one model."""

    def __init__(self, start: StartRfork, folder: Path) -> None:
        environment = {"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "0.5", "RFORK_PLANNER_INSTANCE_TTL_S": "8"}
        planner = start("planner", "--port", "0", "--json", until=READY, environment=environment)
        self.url = cast(str, json.loads(planner.wait_for(rf"^.*{READY}.*$").group())["url"])
        self.client = PlannerClient(self.url)
        self.folder = folder
        self.nodes: list[EngineNode] = []
        (folder / "weights").write_text("1")
        os.mkfifo(folder / "gate")

    def node(self, *arguments: str, **options: str) -> EngineNode:
        """Start one more engine process."""
        made = EngineNode(options.pop("planner", self.url), self.folder, *arguments, **options)
        self.nodes.append(made)
        return made

    def open_gate(self) -> None:
        """Release one gated loader."""
        (self.folder / "gate").write_text("")

    def wait_for_chunks(self, min_chunks: int) -> None:
        """Wait until an incomplete instance has verified `min_chunks` chunks."""
        until = time.monotonic() + 40
        while not any(
            ranges.count(view.report.verified) >= min_chunks
            for view in self.client.instances()
            if view.report.state == "loading"
        ):
            if time.monotonic() > until:
                raise TimeoutError("no instance is reading")

    @property
    def loads(self) -> list[str]:
        """Return the processes whose own loader has run, in that order."""
        loads_file = self.folder / "loads"
        return loads_file.read_text().split() if loads_file.exists() else []


@pytest.fixture
def fleet(rfork_process: StartRfork, tmp_path: Path) -> Iterator[ToyEngineFleet]:
    """A fleet with an empty planner."""
    made = ToyEngineFleet(rfork_process, tmp_path)
    yield made
    for node in made.nodes:
        node.close()
        print("".join(node.lines))
    made.client.close()


@pytest.mark.slow  # logic: tests/unit/receiver/test_cold_start_session.py
def test_forks_of_a_cold_seed_are_equal(fleet: ToyEngineFleet) -> None:
    """The first instance uses the engine's loader; the next one forks everything, including hidden tensors,
    and reads no file.
    """
    first = fleet.node().request("up")
    second = fleet.node("--config-only").request("up")
    assert "fallback" == first["outcome"]
    assert 1 == first["loads"]
    assert "forked" == second["outcome"]
    assert 0 == second["loads"]
    assert expected_proof(1, SIZE) == first["proof"]
    assert first["proof"] == second["proof"]
    assert first["weights_id"] == second["weights_id"]


@pytest.mark.slow  # logic: tests/unit/receiver/test_cold_start_session.py
def test_a_cold_group_loads_once(fleet: ToyEngineFleet) -> None:
    """Of several that start together one is elected; the others wait for it and fork from it."""
    # Starting processes may be silent this long on a busy machine.
    nodes = [fleet.node("--gate", no_source_timeout_s="1", source_idle_timeout_s="4") for _ in range(3)]
    for node in nodes:
        node.start_request("up")
    loader = wait_elected(nodes)
    for node in nodes:
        if node is not loader:
            node.wait_for("plan received")
    # Longer than the no-source and the source-idle timeouts.
    assert [False] * 3 == [node.has_response(within_s=5) for node in nodes]
    fleet.open_gate()
    responses = [node.next_response() for node in nodes]
    assert [str(loader.pid)] == fleet.loads
    assert [expected_proof(1, SIZE)] * 3 == [response["proof"] for response in responses]
    assert ["fallback", "forked", "forked"] == sorted(cast(str, response["outcome"]) for response in responses)


@pytest.mark.parametrize("failure", ["--fail-load", pytest.param("--fail-load-as-rfork", marks=pytest.mark.slow)])
def test_another_is_elected_after_a_loader_fails(fleet: ToyEngineFleet, failure: str) -> None:
    """The engine gets its loader's error once; a waiting instance loads, correctly."""
    failing = fleet.node("--gate", failure, source_idle_timeout_s="2")
    failing.start_request("up")
    failing.wait_for(LOADING)
    other = fleet.node(source_idle_timeout_s="2")
    other.start_request("up")
    other.wait_for("plan received")
    fleet.open_gate()
    failed, loaded = failing.next_response(), other.next_response()
    expected = "OSError" if failure == "--fail-load" else "CheckpointError"
    assert expected == failed["error"]
    assert 1 == failed["loads"]
    assert expected_proof(1, SIZE) == loaded["proof"]
    assert 1 == loaded["loads"]


@pytest.mark.slow  # logic: tests/unit/receiver/test_cold_start_session.py
def test_one_without_weights_is_never_elected(fleet: ToyEngineFleet) -> None:
    """An instance with only a configuration waits for one with the weights, and forks from it."""
    complete, config_only = fleet.node("--gate"), fleet.node("--config-only")
    complete.start_request("up")
    complete.wait_for(LOADING)
    config_only.start_request("up")
    config_only.wait_for("plan received")
    fleet.open_gate()
    loaded, forked = complete.next_response(), config_only.next_response()
    assert [str(complete.pid)] == fleet.loads
    assert 0 == forked["loads"]
    assert expected_proof(1, SIZE) == forked["proof"]
    assert loaded["proof"] == forked["proof"]


@pytest.mark.slow  # logic: tests/unit/receiver/test_cold_start_session.py
def test_the_report_has_the_reason_of_the_election(fleet: ToyEngineFleet) -> None:
    """A cold start's reason is in the report, in its summary line, and at the planner."""
    response = fleet.node().request("up")
    expected = "no instance has model toy: elected to read 7 of 7 chunks from loader, for all waiting instances"
    assert [f"NoSource: {expected}"] == response["reasons"]
    assert cast(str, response["line"]).endswith(f"reason: NoSource: {expected}")
    assert [f"NoSource: {expected}"] == [
        reason for fork in fleet.client.forks() if fork.finish for reason in fork.finish.reasons
    ]


@pytest.mark.slow  # logic: tests/unit/receiver/test_planner_requests.py
def test_another_engines_layout_is_refused_with_a_reason(fleet: ToyEngineFleet) -> None:
    """It uses its own loader, and reports the difference locally and to the planner."""
    fleet.node().request("up")
    other = fleet.node("--engine", "2.0").request("up")
    reason = cast(list[str], other["reasons"])[-1]
    differences = [
        fork.finish.reasons[-1] for fork in fleet.client.forks() if fork.finish and fork.instance_id == other["id"]
    ]
    assert reason.endswith("first difference: engine: here toy 2.0; there toy 1.0")
    assert 1 == other["loads"]
    assert cast(str, other["line"]).endswith(reason)
    assert [reason] == differences


@pytest.fixture
def no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes without the fork server: memory that they share with it counts once they touch it."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.mark.slow
@pytest.mark.usefixtures("no_fork_server")
@pytest.mark.parametrize("transports", ["http", "shared_memory,http"])
def test_a_seed_that_dies_midway_costs_no_second_model(fleet: ToyEngineFleet, transports: str) -> None:
    """Received memory is released before the engine loads: the process never has two models."""
    options = {"transports": transports, "source_idle_timeout_s": "2", "no_source_timeout_s": "1", "race_storage": "0"}
    seed = fleet.node("--size", str(LARGE), max_egress_bytes_per_s=str(60_000_000), **options)
    seed.request("up")
    target = fleet.node("--size", str(LARGE), **options)
    target.start_request("up")
    fleet.wait_for_chunks(2)
    seed.kill()
    response = target.next_response()
    assert "fallback" == response["outcome"]
    assert 1 == response["loads"]
    assert expected_proof(1, LARGE) == response["proof"]
    assert MAX_GROWTH_BYTES > cast(int, response["peak"]) - cast(int, response["before"])


@pytest.mark.slow
@pytest.mark.usefixtures("no_fork_server")
def test_a_cold_load_costs_no_second_model(fleet: ToyEngineFleet) -> None:
    """Nor without any source: the empty model is released before the engine builds another."""
    response = fleet.node("--size", str(LARGE)).request("up")
    assert expected_proof(1, LARGE) == response["proof"]
    assert MAX_GROWTH_BYTES > cast(int, response["peak"]) - cast(int, response["before"])


@pytest.mark.slow  # logic: tests/unit/engines/test_load_or_fork.py
def test_without_a_planner_the_engine_loads(fleet: ToyEngineFleet) -> None:
    """An unreachable planner, or none, does not stop an engine from serving."""
    down = fleet.node(planner="http://127.0.0.1:9", no_source_timeout_s="1").request("up")
    none = fleet.node(planner="").request("up")
    assert [expected_proof(1, SIZE)] * 2 == [down["proof"], none["proof"]]
    assert down["instance"]
    assert not none["instance"]


@pytest.mark.slow  # logic: tests/unit/receiver/test_fallback.py
def test_fail_if_not_forked_never_loads(fleet: ToyEngineFleet) -> None:
    """With the setting, an unreachable source, a missing planner and a bug each raise rfork's errors."""
    no_source = fleet.node(fail_if_not_forked="1", no_source_timeout_s="1").request("up")
    no_planner = fleet.node(fail_if_not_forked="1", planner="").request("up")
    bug = fleet.node("--fail-empty", fail_if_not_forked="1").request("up")
    assert ["AllSourcesFailed", "SettingsError", "TargetError"] == [
        response["error"] for response in (no_source, no_planner, bug)
    ]
    assert [0, 0, 0] == [response["loads"] for response in (no_source, no_planner, bug)]


def test_a_bug_in_the_plugin_does_not_stop_the_engine(fleet: ToyEngineFleet) -> None:
    """If the empty model cannot be built, the engine loads as without rfork."""
    response = fleet.node("--fail-empty").request("up")
    assert expected_proof(1, SIZE) == response["proof"]
    assert 1 == response["loads"]
    assert not response["instance"]


@pytest.mark.slow  # logic: tests/unit/engines/test_load_or_fork.py
def test_two_models_of_one_process_do_not_collide(fleet: ToyEngineFleet) -> None:
    """The speculative model has its own image: each role forks from its own seed."""
    seed, target = fleet.node(replica="one"), fleet.node("--config-only", replica="two")
    loaded = [seed.request("up", role) for role in ("main", "speculative")]
    forked = [target.request("up", role) for role in ("main", "speculative")]
    assert ["forked"] * 2 == [each["outcome"] for each in forked]
    assert [each["proof"] for each in loaded] == [each["proof"] for each in forked]
    assert 4 == len({each["id"] for each in (*loaded, *forked)})


@pytest.mark.slow  # logic: tests/unit/source/test_fence.py
def test_later_forks_get_an_updated_seeds_weights(fleet: ToyEngineFleet) -> None:
    """Weights and scalars that change on the seed reach later forks, also after memory has moved."""
    seed = fleet.node()
    seed.request("up")
    seed.request("update", "2")
    updated = fleet.node("--config-only", no_source_timeout_s="20").request("up")
    seed.request("suspend")
    seed.request("renew")
    moved = fleet.node("--config-only", no_source_timeout_s="20").request("up")
    assert [expected_proof(2, SIZE)] * 2 == [updated["proof"], moved["proof"]]


def wait_elected(nodes: list[EngineNode]) -> EngineNode:
    """Wait until one runs its loader, and return it."""
    found: SimpleQueue[EngineNode] = SimpleQueue()

    def wait_for_loader(node: EngineNode) -> None:
        with contextlib.suppress(TimeoutError):
            node.wait_for(LOADING)
            found.put(node)

    for node in nodes:
        threading.Thread(target=wait_for_loader, args=(node,), daemon=True).start()
    return found.get(timeout=RESPONSE_TIMEOUT_S)
