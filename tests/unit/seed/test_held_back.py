"""A seed that serves: what it holds back, whom it tells, and what the planner hears of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from rfork.control.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.image.capture import image_of
from rfork.image.chunks import MIB
from rfork.peer.memory import MemoryPeers
from rfork.seed import latency
from rfork.seed.holding import seal
from rfork.seed.latency import FIRST_RATE, FLOOR_RATE
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings
from rfork.transport.base import Transport
from rfork.transport.memory import MemoryNetwork, MemoryTransport

KEY = derive_key(b"s" * 32, "seed-1")
IMAGE = image_of({"a": torch.zeros(3 * MIB, dtype=torch.uint8)})
LAYOUT_ID = IMAGE.layout.layout_id


@contextmanager
def giving(
    *, one_sided: bool = False, transports: Sequence[Transport] = (), **options: float
) -> Iterator[Seed]:
    """A seed without a planner, and a reader's place taken in it."""
    made = Seed(
        IMAGE,
        Identity("model", instance_id="seed-1"),
        Settings.model_validate({"host": "node", "drain_s": 0, **options}),
        list(transports) or [MemoryTransport(MemoryNetwork(), one_sided=one_sided)],
        manifest=seal(IMAGE),
        serve_peer=MemoryPeers().service,
    )
    made.learn_keys([KEY])
    with made:
        admit(made, "fork-1")
        made.open_channel("fork-1", LAYOUT_ID, ["memory"], "127.0.0.1")
        yield made


def admit(seed: Seed, fork_id: str) -> None:
    """Have it know a lease of this fork."""
    claims = LeaseClaims(fork_id, "seed-1", LAYOUT_ID, None, 0, time.time() + 60)
    seed.admit(sign(claims, decode_key(KEY)), 0, 1)


def serve(seed: Seed) -> None:
    """Enough units of work, alike, that the seed knows what they take: far longer than a test does."""
    for _ in range(20):
        seed.observe(60.0)


@pytest.mark.parametrize(("one_sided", "expected"), [(True, 5_000_000), (False, None)])
def test_a_rate_is_told_where_it_cannot_be_held(one_sided: bool, expected: int | None) -> None:
    """Readers of a transport that asks for each byte are told nothing."""
    with giving(one_sided=one_sided, egress_rate=5_000_000) as seed:
        assert expected == seed.news(()).rate


def test_readers_hear_of_one_more() -> None:
    """Its place makes the share of each smaller, and they are told at once."""
    with giving(one_sided=True, egress_rate=5_000_000) as seed:
        before = seed.news(()).rate
        heard: list[int | None] = []
        admit(seed, "fork-2")
        with seed.on_change(lambda: heard.append(len(seed.report().readers))):
            seed.open_channel("fork-2", LAYOUT_ID, ["memory"], "127.0.0.1")
        after = seed.news(()).rate
    # What the first was told may come late, so that it is heard here too.
    assert (5_000_000, True, 2_500_000) == (before, 2 in heard, after)


@pytest.mark.parametrize(("one_sided", "expected"), [(False, 100_000_000), (True, 50_000_000)])
def test_the_rate_holds_for_both_kinds_of_readers(one_sided: bool, expected: int) -> None:
    """One reader asks for each byte; beside one that takes its half by itself, it is granted the other."""
    transports = [
        MemoryTransport(MemoryNetwork()),
        Aside(MemoryNetwork(), one_sided=one_sided),
    ]
    with giving(transports=transports, egress_rate=100_000_000) as seed:
        admit(seed, "fork-2")
        seed.open_channel("fork-2", LAYOUT_ID, ["aside"], "127.0.0.1")
        assert expected // 50 == seed.grant(1 << 40, "fork-1")


class Aside(MemoryTransport):
    """A second transport of a seed."""

    @property
    def name(self) -> str:
        return "aside"


def test_who_serves_tells_its_readers() -> None:
    """One-sided readers hear of no limit; once it serves, of the floor until it knows what its work takes."""
    with giving(one_sided=True) as seed:
        rates = [seed.news(()).rate]
        with seed.serving():
            rates.append(seed.news(()).rate)
    assert [None, FLOOR_RATE] == rates


def test_a_seed_that_serves_grants_little_at_once() -> None:
    """All that is asked for while it idles; a fiftieth of a second's worth while it serves."""
    with giving() as idling, giving() as busy_one:
        idle = idling.grant(1 << 40, "fork-1")
        serve(busy_one)
        with busy_one.serving():
            busy = busy_one.grant(1 << 40, "fork-1")
    assert (1 << 40, FIRST_RATE // 50) == (idle, busy)


def test_the_planner_hears_what_readers_are_held_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixed cap, and less while it serves and gives."""
    monkeypatch.setattr(latency, "SETTLE_S", 60.0)  # what was granted a moment ago is still given
    with giving(egress_rate=1 << 40) as seed:
        told = [seed.report().egress_rate]
        serve(seed)
        with seed.serving():
            seed.grant(1, "fork-1")
            told.append(seed.report().egress_rate)
    assert [1 << 40, FIRST_RATE] == told


def test_a_setpoint_of_zero_holds_nothing_back() -> None:
    """Nor does it tell anybody to."""
    with giving(one_sided=True, latency_setpoint=0) as seed:
        serve(seed)
        with seed.serving():
            assert (None, 1 << 40) == (seed.news(()).rate, seed.grant(1 << 40, "fork-1"))


def test_a_closed_seed_leaves_no_thread() -> None:
    """The one that tells readers of the rate ends with the seed."""
    with giving(one_sided=True) as seed:
        seed.news(())
    assert [] == [thread.name for thread in threading.enumerate() if thread.name == "rfork-pacing"]
