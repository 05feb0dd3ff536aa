"""Rate limits of a serving seed: what it grants, and what it reports to readers and to the planner."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from rfork.image.capture import image_from_tensors
from rfork.image.chunks import MIB
from rfork.image.memory import compute_manifest
from rfork.planner_client.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.settings import InstanceSettings
from rfork.source import latency_controller
from rfork.source.egress_limiter import MAX_GRANT, MAX_UNLIMITED_GRANT
from rfork.source.latency_controller import MIN_RATE
from rfork.source.rate_search import FIRST_RATE
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.testing.peers import InMemoryPeers
from rfork.testing.transport import InMemoryNetwork, InMemoryTransport
from rfork.transport.base import Transport

KEY = derive_key(b"s" * 32, "seed-1")
IMAGE = image_from_tensors({"a": torch.zeros(3 * MIB, dtype=torch.uint8)})
LAYOUT_ID = IMAGE.layout.layout_id


@contextmanager
def seed_with_reader(
    *, one_sided: bool = False, transports: Sequence[Transport] = (), **options: float
) -> Iterator[Seed]:
    """Yield a started seed without a planner, with one reader."""
    seed = Seed(
        IMAGE,
        InstanceIdentity("model", instance_id="seed-1"),
        InstanceSettings.model_validate({"node_name": "node", "drain_timeout_s": 0, **options}),
        Connections(
            list(transports) or [InMemoryTransport(InMemoryNetwork(), one_sided=one_sided)],
            serve_peer=InMemoryPeers().service,
        ),
        manifest=compute_manifest(IMAGE),
    )
    seed.set_lease_keys([KEY])
    with seed:
        admit(seed, "fork-1")
        seed.open_channel("fork-1", LAYOUT_ID, ["memory"], "127.0.0.1")
        yield seed


def admit(seed: Seed, fork_id: str) -> None:
    """Present a lease of this fork to the seed."""
    claims = LeaseClaims(fork_id, "seed-1", LAYOUT_ID, None, 0, time.time() + 60)
    seed.authorize(sign(claims, decode_key(KEY)), 0, 1)


def record_steps(seed: Seed) -> None:
    """Record enough equal steps for a baseline; each is far longer than a test runs."""
    for _ in range(20):
        seed.record_step_latency(60.0)


@pytest.mark.parametrize(("one_sided", "expected"), [(True, 5_000_000), (False, None)])
def test_only_one_sided_readers_are_advised_a_rate(one_sided: bool, expected: int | None) -> None:
    """Readers that request each byte need no advice."""
    with seed_with_reader(one_sided=one_sided, max_egress_bytes_per_s=5_000_000) as seed:
        assert expected == seed.progress_since(()).rate


def test_readers_are_notified_of_another_reader() -> None:
    """Its channel reduces the share of each reader, and they are notified immediately."""
    with seed_with_reader(one_sided=True, max_egress_bytes_per_s=5_000_000) as seed:
        before = seed.progress_since(()).rate
        reader_counts: list[int | None] = []
        admit(seed, "fork-2")
        with seed.on_change(lambda: reader_counts.append(len(seed.report().readers))):
            seed.open_channel("fork-2", LAYOUT_ID, ["memory"], "127.0.0.1")
        after = seed.progress_since(()).rate
    # The notification about the first reader may arrive late and be recorded here too.
    assert 5_000_000 == before
    assert 2 in reader_counts
    assert 2_500_000 == after


@pytest.mark.parametrize(("one_sided", "expected"), [(False, 1_000_000), (True, 500_000)])
def test_the_rate_limits_both_types_of_readers(one_sided: bool, expected: int) -> None:
    """If one of two readers is one-sided and uses its half without requests, the other is granted the other
    half.
    """
    transports = [
        InMemoryTransport(InMemoryNetwork()),
        SecondTransport(InMemoryNetwork(), one_sided=one_sided),
    ]
    with seed_with_reader(transports=transports, max_egress_bytes_per_s=10_000_000) as seed:
        admit(seed, "fork-2")
        seed.open_channel("fork-2", LAYOUT_ID, ["second"], "127.0.0.1")
        assert expected == seed.acquire_bytes(1 << 40, "fork-1")


class SecondTransport(InMemoryTransport):
    """The second transport of a seed."""

    @property
    def name(self) -> str:
        return "second"


def test_one_sided_readers_are_advised_the_floor_while_the_seed_works() -> None:
    """They have no limit while the seed is idle; during its first step the limit is the floor, without a
    baseline.
    """
    with seed_with_reader(one_sided=True) as seed:
        rates = [seed.progress_since(()).rate]
        with seed.measure_step():
            rates.append(seed.progress_since(()).rate)
    assert [None, MIN_RATE] == rates


def test_a_busy_seed_grants_small_amounts() -> None:
    """An idle seed grants much at once; a busy one a small amount."""
    with seed_with_reader() as idle_seed, seed_with_reader() as busy_seed:
        idle = idle_seed.acquire_bytes(1 << 40, "fork-1")
        record_steps(busy_seed)
        with busy_seed.measure_step():
            busy = busy_seed.acquire_bytes(1 << 40, "fork-1")
    assert MAX_UNLIMITED_GRANT == idle
    assert MAX_GRANT == busy


def test_the_rate_limit_is_reported_to_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the fixed cap, and less while the seed serves requests and readers."""
    monkeypatch.setattr(latency_controller, "EGRESS_S", 60.0)  # bytes granted a moment ago still count as being sent
    with seed_with_reader(max_egress_bytes_per_s=1 << 40) as seed:
        egress_rates = [seed.report().egress_rate]
        record_steps(seed)
        with seed.measure_step():
            seed.acquire_bytes(1, "fork-1")
            egress_rates.append(seed.report().egress_rate)
    assert [1 << 40, FIRST_RATE] == egress_rates


def test_a_setpoint_of_zero_limits_nothing() -> None:
    """Grants are as large as those of an idle seed, and readers are advised no rate."""
    with seed_with_reader(one_sided=True, max_latency_ratio=0) as seed:
        record_steps(seed)
        with seed.measure_step():
            assert seed.progress_since(()).rate is None
            assert MAX_UNLIMITED_GRANT == seed.acquire_bytes(1 << 40, "fork-1")


def test_a_closed_seed_leaves_no_thread() -> None:
    """The thread that notifies readers of the rate ends with the seed."""
    with seed_with_reader(one_sided=True) as seed:
        seed.progress_since(())
    assert [] == [thread.name for thread in threading.enumerate() if thread.name == "rfork-rate-advisor"]
