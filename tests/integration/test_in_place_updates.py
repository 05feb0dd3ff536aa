"""Weights that change while others read them, between real processes: a fork has one version or another."""

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

from rfork.control.client import PlannerClient
from rfork.control.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.errors import SourceChanged
from rfork.image.board import ChunkBoard
from rfork.image.capture import image_of
from rfork.image.chunks import MIB
from rfork.image.manifest import Manifest
from rfork.image.ranges import Range
from rfork.peer.base import Progress
from rfork.peer.client import PeerClient
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings, TlsSettings
from rfork.transport.http import HttpTransport
from tests.conftest import StartRfork
from tests.integration.weights_node import CHECKPOINT, CHUNKS, MODEL, Message, Node, sha256_of

READY = r'"event": ?"ready"'
SLOW = {"RFORK_EGRESS_RATE": str(2 << 20)}
"""A fork of all 12 MiB takes seconds: time to change what it reads."""
SLOWER = {"RFORK_EGRESS_RATE": str(1 << 20)}
"""The same where two give it."""
ONE_READER = {"RFORK_MAX_READERS": "1"}
"""The second target has to read from the first."""
Answer = Future[Manifest]
OLD, NEW, LOADED = sha256_of(1), sha256_of(2), sha256_of(CHECKPOINT)


class Fleet:
    """A planner and the instances that were started with it."""

    def __init__(self, start: StartRfork, stack: contextlib.ExitStack) -> None:
        environment = {"RFORK_PLANNER_HEARTBEAT_S": "0.5", "RFORK_PLANNER_LOG_LEVEL": "debug"}
        self.planner = planner = start(
            "planner", "--port", "0", "--json", until=READY, environment=environment
        )
        event = json.loads(planner.wait_for(rf"^.*{READY}.*$").group())
        self.url = cast(str, event["url"])
        self.client = PlannerClient(self.url)
        self._stack = stack
        stack.callback(self.client.close)

    def node(self, **options: str) -> Node:
        """An instance that does nothing yet."""
        chosen = {"RFORK_WINDOW": "1", "RFORK_STALL_S": "5", "RFORK_DRAIN_S": "0", **options}
        return self._stack.enter_context(Node(self.url, chosen))

    def seed(self, **options: str) -> tuple[Node, str]:
        """A seed of version 1, and its id."""
        node = self.node(**options)
        return node, cast(str, node.ask("seed", 1)["id"])

    def chain(self, relay: Mapping[str, str] = SLOW) -> tuple[Node, Node, Node]:
        """A slow seed, a target in mid-fork, and a second one that reads from the first, the `relay`."""
        first, second = self.node(**relay), self.node()
        seed, _ = self.seed(**SLOW, **ONE_READER)
        first.ask("fork")
        first.wait_for_chunks(1)
        second.ask("fork")
        second.wait_for_chunks(1)
        return seed, first, second


@pytest.fixture
def fleet(rfork_process: StartRfork) -> Iterator[Fleet]:
    """A planner that knows nobody yet."""
    with contextlib.ExitStack() as stack:
        yield Fleet(rfork_process, stack)


def kinds(report: Message) -> list[str]:
    """The kinds of errors in a report."""
    return [reason.partition(":")[0] for reason in cast(list[str], report["reasons"])]


def quarantined(fleet: Fleet) -> dict[str, str]:
    """Why instances are kept from others, by id."""
    views = fleet.client.instances(model=MODEL)
    return {view.report.instance_id: view.quarantined for view in views if view.quarantined}


def accused(fleet: Fleet) -> dict[str, str]:
    """What readers say that instances did wrong, by id; all are on one host, so none is quarantined."""
    views = fleet.client.instances(model=MODEL)
    return {view.report.instance_id: view.accused for view in views if view.accused}


def follows(fleet: Fleet) -> str:
    """The bytes that a fork gets which comes after all of it."""
    node = fleet.node()
    node.ask("fork")
    return cast(str, node.ask("report")["sha256"])


@pytest.mark.parametrize("updates", [(2,), (2, 3)], ids=["once", "twice in a row"])
def test_an_update_under_a_chain(fleet: Fleet, updates: tuple[int, ...]) -> None:
    """Who read the old weights, from seed or relay, starts over with the newest; nobody is to blame."""
    seed, *targets = fleet.chain()
    for version in updates:
        seed.ask("update", version)
    reports = [target.ask("report") for target in targets]
    newest = sha256_of(updates[-1])
    assert [("forked", newest)] * 2 == [(report["outcome"], report["sha256"]) for report in reports]
    assert [{"SourceChanged"}] * 2 == [set(kinds(report)) for report in reports]
    assert [True, True] == ["started over" in str(report["reasons"]) for report in reports]
    assert {} == quarantined(fleet)
    assert newest == follows(fleet)


def test_a_seed_that_stays_fenced(fleet: Fleet) -> None:
    """Who read the old weights waits for others as long as the setting says, and then loads."""
    seed, *targets = fleet.chain()
    seed.ask("fence")
    reports = [target.ask("report") for target in targets]
    assert [LOADED, LOADED] == [report["sha256"] for report in reports]
    assert [True, True] == ["started over" in str(report["reasons"]) for report in reports]


def test_an_update_under_a_reader_that_opens_its_channel(fleet: Fleet) -> None:
    """A target that has a plan for the old weights, and no byte yet, gets the new ones."""
    seed, _ = fleet.seed(**SLOW)
    target = fleet.node()
    target.ask("id")  # it is up: a planner forgets who is silent for as long as that may take
    seed.signal(signal.SIGSTOP)
    try:
        target.ask("fork")
        fleet.planner.wait_for("fork planned")
        seed.begin("update", 2)
    finally:
        seed.signal(signal.SIGCONT)
    assert {"acknowledged": True} == seed.answer()
    report = target.ask("report")
    assert ("forked", NEW) == (report["outcome"], report["sha256"])
    assert {} == quarantined(fleet)


def test_a_silent_write_to_one_of_two_seeds(fleet: Fleet) -> None:
    """Its reader finds out by the digest, accuses it, and gets the bytes from the other."""
    seeds = {name: node for node, name in (fleet.seed(**SLOWER) for _ in range(2))}
    target = fleet.node()
    target.ask("fork")
    target.wait_for_chunks(1)
    (view,) = fleet.client.forks(model=MODEL)
    wrong = next(route.source_id for route in view.plan if route.chunks[-1][1] == CHUNKS)
    seeds[wrong].ask("write", CHUNKS - 1)
    report = target.ask("report")
    assert ("forked", OLD, ["SourceCorrupt"]) == (report["outcome"], report["sha256"], kinds(report))
    assert {wrong: True} == {name: "SourceCorrupt" in why for name, why in accused(fleet).items()}


def test_a_silent_write_to_the_only_seed(fleet: Fleet) -> None:
    """Its reader finds out by the digest, accuses it, and loads."""
    seed, name = fleet.seed(**SLOW)
    target = fleet.node()
    target.ask("fork")
    target.wait_for_chunks(1)
    seed.ask("write", CHUNKS - 1)
    report = target.ask("report")
    assert (LOADED, "SourceCorrupt") == (report["sha256"], kinds(report)[0])
    assert {name: True} == {name: "SourceCorrupt" in why for name, why in accused(fleet).items()}


def test_a_silent_write_to_a_relay(fleet: Fleet) -> None:
    """Its memory goes bad after it was verified: its reader blames it, and reads from the root."""
    seed, relay, target = fleet.chain(relay=SLOWER)
    relay.wait_for_chunks(CHUNKS // 2)
    relay.ask("write", CHUNKS // 2 - 1)
    report = target.ask("report")
    relayed = relay.ask("report")
    assert ("forked", OLD, ["SourceCorrupt"]) == (report["outcome"], report["sha256"], kinds(report))
    assert [relayed["id"]] == list(accused(fleet))
    assert {relayed["id"], seed.ask("id")["id"]} == set(cast(list[str], report["sources"]))


def token_for(seed: Seed) -> str:
    """A lease of the seed's weights as they are now."""
    name, layout_id = seed.identity.instance_id, seed.image.layout.layout_id
    key = derive_key(b"s" * 32, name)
    seed.learn_keys([key])
    claims = LeaseClaims("fork-1", name, layout_id, None, seed.generation, time.time() + 60)
    return sign(claims, decode_key(key))


@contextlib.contextmanager
def asked_for_its_manifest(draft: str | None, patch: pytest.MonkeyPatch) -> Iterator[tuple[Seed, Answer]]:
    """A relay that does not know its manifest, and what somebody gets who asks for it and waits by now."""
    image, settings = image_of({"a": torch.ones(2 * MIB, dtype=torch.uint8)}), Settings(drain_s=0)
    board = ChunkBoard(image.layout.chunks)
    board.begin(draft)
    board.mark(0, b"w" * 16)
    waits = threading.Event()
    with Seed(image, Identity(MODEL), settings, [HttpTransport(settings)], board=board) as relay:
        token, news = token_for(relay), relay.news

        def looked(told: tuple[Range, ...]) -> Progress:
            found = news(told)
            waits.set()
            return found

        patch.setattr(relay, "news", looked)
        peer = PeerClient(relay.report().address, lambda: token, TlsSettings())
        with contextlib.closing(peer), ThreadPoolExecutor() as pool:
            answer = pool.submit(peer.full_manifest, time.monotonic() + 60)
            waits.wait(60)
            yield relay, answer


def test_who_waits_for_a_manifest_hears_of_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked for what the image held before: what it holds afterwards is no answer to that."""
    with asked_for_its_manifest(None, monkeypatch) as (relay, answer):
        with relay.updating():
            pass
        with pytest.raises(SourceChanged, match="the weights changed"):
            answer.result()


def test_who_waits_for_a_manifest_gets_it_from_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that drops wrong chunks of its draft as it learns its manifest tells that all the same."""
    with asked_for_its_manifest("a" * 32, monkeypatch) as (relay, answer):
        relay.drop([0])
        relay.learn(relay.image.manifest())
        assert (relay.manifest, 1) == (answer.result(), relay.generation)


def test_after_a_fence_no_new_byte_goes_to_an_old_reader() -> None:
    """Who does not take its bytes is cut in mid-slice: what it still gets afterwards is all of the old."""
    image = image_of({"a": torch.zeros(64 * MIB, dtype=torch.uint8)})
    settings = Settings(drain_s=0)
    seed = Seed(image, Identity(MODEL), settings, [HttpTransport(settings)], manifest=image.manifest())
    token, layout_id = token_for(seed), image.layout.layout_id
    with seed:
        _, endpoint = seed.open_channel(seed.check(token), layout_id, ["http"], "127.0.0.1")
        place = urlsplit(endpoint.parameters["url"])
        begin = int(endpoint.parameters["data_offset"])
        with socket.create_connection((str(place.hostname), int(place.port or 0)), 60) as reader:
            request = f"GET {place.path} HTTP/1.1\r\nHost: seed\r\nRange: bytes={begin}-\r\n"
            reader.sendall(f"{request}Authorization: Bearer {token}\r\n\r\n".encode())
            with reader.makefile("rb") as answer:
                while answer.readline() != b"\r\n":
                    pass
                with seed.updating():
                    image.regions[0].fill_(1)
                body = answer.read()
    assert (0, True) == (body.count(1), len(body) < 64 * MIB)
