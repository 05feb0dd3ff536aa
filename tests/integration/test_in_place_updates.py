"""Weights that change while other processes read them: a fork always gets one consistent version."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast
from urllib.parse import urlsplit

import pytest
import torch

from rfork.errors import SourceWeightsChanged
from rfork.image.capture import image_from_tensors
from rfork.image.chunks import MIB, ChunkState
from rfork.image.layout import Manifest
from rfork.image.ranges import Range
from rfork.peer.base import Progress
from rfork.peer.client import PeerClient
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.settings import InstanceSettings, TlsSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.transport.http import HttpTransport
from tests.conftest import StartRfork
from tests.integration.weights_node import CHECKPOINT, CHUNKS, MODEL, Message, WeightsNode, sha256_of

READY = r'"event": ?"ready"'
SLOW = {"RFORK_MAX_EGRESS_BYTES_PER_S": str(2 << 20)}
"""A fork of all 12 MiB takes seconds, enough to change what it reads."""
SLOWER = {"RFORK_MAX_EGRESS_BYTES_PER_S": str(1 << 20)}
"""The same with two sources."""
ONE_READER = {"RFORK_MAX_READERS": "1"}
"""The second target has to read from the first."""
ManifestFuture = Future[Manifest]
OLD, NEW, LOADED = sha256_of(1), sha256_of(2), sha256_of(CHECKPOINT)


class WeightsFleet:
    """A planner and the instances started with it."""

    def __init__(self, start: StartRfork, stack: contextlib.ExitStack, **options: str) -> None:
        """`options`: environment of the planner."""
        environment = {"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "0.5", "RFORK_LOG_LEVEL": "debug", **options}
        self.planner = planner = start("planner", "--port", "0", "--json", until=READY, environment=environment)
        event = json.loads(planner.wait_for(rf"^.*{READY}.*$").group())
        self.url = cast(str, event["url"])
        self.client = PlannerClient(self.url)
        self._stack = stack
        stack.callback(self.client.close)

    def node(self, **options: str) -> WeightsNode:
        """Start an instance that does nothing yet."""
        chosen = {
            "RFORK_MAX_INFLIGHT_CHUNKS": "1",
            "RFORK_SOURCE_IDLE_TIMEOUT_S": "5",
            "RFORK_RACE_STORAGE": "0",
            "RFORK_DRAIN_TIMEOUT_S": "0",
            **options,
        }
        return self._stack.enter_context(WeightsNode(self.url, chosen))

    def seed(self, **options: str) -> tuple[WeightsNode, str]:
        """Start a seed of version 1 and return it with its id."""
        node = self.node(**options)
        return node, cast(str, node.request("seed", 1)["id"])

    def chain(self, relay: Mapping[str, str] = SLOW) -> tuple[WeightsNode, WeightsNode, WeightsNode]:
        """Start a slow seed, a target in mid-fork, and a second one that reads from the first, the `relay`."""
        first, second = self.node(**relay), self.node()
        seed, _ = self.seed(**SLOW, **ONE_READER)
        first.request("fork")
        first.wait_for_chunks(1)
        second.request("fork")
        second.wait_for_chunks(1)
        return seed, first, second


@pytest.fixture
def fleet(rfork_process: StartRfork) -> Iterator[WeightsFleet]:
    """A fleet with an empty planner."""
    with contextlib.ExitStack() as stack:
        yield WeightsFleet(rfork_process, stack)


def error_kinds(report: Message) -> list[str]:
    """Return the error kinds in a report."""
    return [reason.partition(":")[0] for reason in cast(list[str], report["reasons"])]


def quarantined(fleet: WeightsFleet) -> dict[str, str]:
    """Return the quarantine reason of each quarantined instance, by id."""
    views = fleet.client.instances(model=MODEL)
    return {view.report.instance_id: view.quarantined for view in views if view.quarantined}


def accused(fleet: WeightsFleet) -> dict[str, str]:
    """Return the readers' failure reports about instances, by id; all are on one host, so none is
    quarantined.
    """
    views = fleet.client.instances(model=MODEL)
    return {view.report.instance_id: view.accused for view in views if view.accused}


def fork_afterwards(fleet: WeightsFleet) -> str:
    """Return the hash of the bytes that a later fork gets."""
    node = fleet.node()
    node.request("fork")
    return cast(str, node.request("report")["sha256"])


@pytest.mark.parametrize(
    "updates",
    [pytest.param((2,), id="once"), pytest.param((2, 3), id="twice in a row", marks=pytest.mark.slow)],
)
@pytest.mark.slow  # logic: tests/simulation
def test_an_update_under_a_chain(fleet: WeightsFleet, updates: tuple[int, ...]) -> None:
    """Targets that read the old weights, from seed or relay, start over with the newest ones; no source is
    blamed.
    """
    seed, *targets = fleet.chain()
    for version in updates:
        seed.request("update", version)
    reports = [target.request("report") for target in targets]
    newest = sha256_of(updates[-1])
    assert [("forked", newest)] * 2 == [(report["outcome"], report["sha256"]) for report in reports]
    assert [{"SourceWeightsChanged"}] * 2 == [set(error_kinds(report)) for report in reports]
    assert [True, True] == ["started over" in str(report["reasons"]) for report in reports]
    assert {} == quarantined(fleet)
    assert newest == fork_afterwards(fleet)


@pytest.mark.slow  # logic: tests/unit/receiver/test_in_place_updates.py
def test_targets_of_a_fenced_seed_fall_back(fleet: WeightsFleet) -> None:
    """A target that read the old weights waits for another source until the configured timeout, and then
    loads from storage.
    """
    seed, *targets = fleet.chain()
    seed.request("fence")
    reports = [target.request("report") for target in targets]
    assert [LOADED, LOADED] == [report["sha256"] for report in reports]
    assert [True, True] == ["started over" in str(report["reasons"]) for report in reports]


def test_an_update_under_a_reader_that_opens_its_channel(fleet: WeightsFleet) -> None:
    """A target that has a plan for the old weights but no bytes yet gets the new ones."""
    seed, _ = fleet.seed(RFORK_MAX_EGRESS_BYTES_PER_S=str(6 << 20))  # 2 s: the update is the seed's next request
    target = fleet.node()
    target.request("id")  # the seed is up now: the planner expires silent instances only after a long start-up
    seed.signal(signal.SIGSTOP)
    try:
        target.request("fork")
        fleet.planner.wait_for("fork planned")
        seed.start_request("update", 2)
    finally:
        seed.signal(signal.SIGCONT)
    assert {"acknowledged": True} == seed.next_response()
    report = target.request("report")
    assert "forked" == report["outcome"]
    assert NEW == report["sha256"]
    assert {} == quarantined(fleet)


@pytest.mark.slow  # logic: tests/simulation
def test_a_silent_write_to_one_of_two_seeds(fleet: WeightsFleet) -> None:
    """The target detects it by digest, reports the seed, and reads the bytes from the other."""
    seeds = {name: node for node, name in (fleet.seed(**SLOWER) for _ in range(2))}
    target = fleet.node()
    target.request("fork")
    target.wait_for_chunks(1)
    (view,) = fleet.client.forks(model=MODEL)
    wrong = next(route.source_id for route in view.plan if route.chunks[-1][1] == CHUNKS)
    seeds[wrong].request("write", CHUNKS - 1)
    report = target.request("report")
    assert "forked" == report["outcome"]
    assert OLD == report["sha256"]
    assert ["SourceCorrupt"] == error_kinds(report)
    assert {wrong: True} == {name: "SourceCorrupt" in why for name, why in accused(fleet).items()}


@pytest.mark.slow  # the logic is in tests/unit/receiver/test_in_place_updates.py and test_fallback.py
def test_a_silent_write_to_the_only_seed(fleet: WeightsFleet) -> None:
    """The target detects it by digest, reports the seed, and loads from storage."""
    seed, name = fleet.seed(**SLOW)
    target = fleet.node()
    target.request("fork")
    target.wait_for_chunks(1)
    seed.request("write", CHUNKS - 1)
    report = target.request("report")
    assert LOADED == report["sha256"]
    assert "SourceCorrupt" == error_kinds(report)[0]
    assert {name: True} == {name: "SourceCorrupt" in why for name, why in accused(fleet).items()}


@pytest.mark.slow  # logic: tests/simulation
def test_a_silent_write_to_a_relay(fleet: WeightsFleet) -> None:
    """The relay's memory is corrupted after verification: its reader blames it, and reads from the root."""
    seed, relay, target = fleet.chain(relay=SLOWER)
    relay.wait_for_chunks(CHUNKS // 2)
    relay.request("write", CHUNKS // 2 - 1)
    report = target.request("report")
    relayed = relay.request("report")
    assert "forked" == report["outcome"]
    assert OLD == report["sha256"]
    assert ["SourceCorrupt"] == error_kinds(report)
    assert [relayed["id"]] == list(accused(fleet))
    assert {relayed["id"], seed.request("id")["id"]} == set(cast(list[str], report["sources"]))


def token_for(seed: Seed) -> str:
    """Return a lease for the seed's current weights."""
    name, layout_id = seed.identity.instance_id, seed.image.layout.layout_id
    key = derive_key(b"s" * 32, name)
    seed.set_lease_keys([key])
    claims = LeaseClaims("fork-1", name, layout_id, None, seed.generation, time.time() + 60)
    return sign(claims, decode_key(key))


@contextlib.contextmanager
def pending_manifest_request(
    provisional_id: str | None, patch: pytest.MonkeyPatch
) -> Iterator[tuple[Seed, ManifestFuture]]:
    """Start a relay without a manifest, and a request for that manifest that is already waiting."""
    image, settings = (
        image_from_tensors({"a": torch.ones(2 * MIB, dtype=torch.uint8)}),
        InstanceSettings(drain_timeout_s=0),
    )
    board = ChunkState(image.layout.chunks)
    board.set_provisional_id(provisional_id)
    board.mark_verified(0, b"w" * 16)
    request_waiting = threading.Event()
    with Seed(
        image, InstanceIdentity(MODEL), settings, Connections([HttpTransport(settings)]), chunk_state=board
    ) as relay:
        token, progress_since = token_for(relay), relay.progress_since

        def observed_progress(reported: tuple[Range, ...]) -> Progress:
            found = progress_since(reported)
            request_waiting.set()
            return found

        patch.setattr(relay, "progress_since", observed_progress)
        peer = PeerClient(relay.report().address, lambda: token, TlsSettings())
        with contextlib.closing(peer), ThreadPoolExecutor() as pool:
            future = pool.submit(peer.full_manifest, time.monotonic() + 60)
            request_waiting.wait(60)
            yield relay, future


def test_a_manifest_request_fails_on_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request was for the previous weights, so the manifest of the new ones is no valid response."""
    with pending_manifest_request(None, monkeypatch) as (relay, future):
        with relay.updating():
            pass
        with pytest.raises(SourceWeightsChanged, match="the weights changed"):
            future.result()


def test_a_manifest_request_gets_the_final_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that drops wrong chunks as its provisional manifest is replaced still answers the request."""
    with pending_manifest_request("a" * 32, monkeypatch) as (relay, future):
        relay.invalidate([0])
        relay.set_manifest(relay.image.manifest())
        assert relay.manifest == future.result()
        assert 1 == relay.generation


def test_after_a_fence_no_new_byte_goes_to_an_old_reader() -> None:
    """A reader that does not consume its bytes is cut in mid-slice; whatever it still receives is old data."""
    image = image_from_tensors({"a": torch.zeros(64 * MIB, dtype=torch.uint8)})
    settings = InstanceSettings(drain_timeout_s=0)
    seed = Seed(
        image, InstanceIdentity(MODEL), settings, Connections([HttpTransport(settings)]), manifest=image.manifest()
    )
    token, layout_id = token_for(seed), image.layout.layout_id
    with seed:
        _, endpoint = seed.open_channel(seed.check(token), layout_id, ["http"], "127.0.0.1")
        location = urlsplit(endpoint.parameters["url"])
        with socket.create_connection((str(location.hostname), int(location.port or 0)), 60) as reader:
            request = f"GET {location.path} HTTP/1.1\r\nHost: seed\r\n"
            reader.sendall(f"{request}Authorization: Bearer {token}\r\n\r\n".encode())
            with reader.makefile("rb") as response:
                while response.readline() != b"\r\n":
                    pass
                with seed.updating():
                    image.regions[0].fill_(1)
                body = response.read()
    assert 0 == body.count(1)
    assert len(body) < 64 * MIB
