"""Seeds whose weights are released and restored while others read them, over http and transfer_engine."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch

from rfork.errors import SourceBusy
from rfork.image.capture import image_from_tensors
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.planner_client.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.settings import InstanceSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.transport.base import Endpoint, Transport
from rfork.transport.http import HttpTransport
from rfork.transport.mooncake import TransferEngineTransport
from rfork.transport.mooncake.library import library_state
from tests.conftest import StartRfork
from tests.integration.test_in_place_updates import WeightsFleet, error_kinds, quarantined
from tests.integration.weights_node import CHECKPOINT, WeightsNode, sha256_of

SIZES = (3 * MIB + 5, 17, 2 * MIB)
STATE = library_state()
needs_mooncake = pytest.mark.skipif(bool(STATE.error), reason=f"mooncake is unavailable: {STATE.error}")
TRANSPORTS = [
    "http",
    pytest.param("transfer_engine", marks=needs_mooncake),
]
SLOW_TRANSPORTS = [
    pytest.param("http", marks=pytest.mark.slow),
    pytest.param("transfer_engine", marks=[needs_mooncake, pytest.mark.slow]),
]


@pytest.fixture
def fleet(rfork_process: StartRfork) -> Iterator[WeightsFleet]:
    """A fleet with an empty planner."""
    with contextlib.ExitStack() as stack:
        yield WeightsFleet(rfork_process, stack)


def slow_environment(transport: str) -> dict[str, str]:
    """Return settings with which a fork of all 12 MiB takes seconds, enough to suspend its source."""
    return {
        "RFORK_TRANSPORTS": transport,
        "RFORK_ALLOW_UNAUTHENTICATED_TCP": "1",
        "RFORK_MAX_EGRESS_BYTES_PER_S": str(2 << 20),
        "RFORK_RACE_STORAGE": "0",
    }


def start_mid_fork(fleet: WeightsFleet, transport: str) -> WeightsNode:
    """Start a target, and wait until it has some chunks but not all."""
    target = fleet.node(**slow_environment(transport))
    target.request("fork")
    target.wait_for_chunks(1)
    return target


@pytest.mark.parametrize("transport", SLOW_TRANSPORTS)
def test_the_only_source_is_suspended_in_mid_fork(fleet: WeightsFleet, transport: str) -> None:
    """Its reader falls back, and no instance is blamed."""
    seed, _ = fleet.seed(**slow_environment(transport))
    target = start_mid_fork(fleet, transport)
    seed.request("suspend")
    report = target.request("report")
    assert sha256_of(CHECKPOINT) == report["sha256"]
    assert "SourceWeightsChanged" in error_kinds(report)
    assert {} == quarantined(fleet)


@pytest.mark.parametrize("transport", ["http", *SLOW_TRANSPORTS[1:]])
@pytest.mark.slow  # logic: tests/unit/source/test_suspend.py
def test_one_of_two_sources_is_suspended_in_mid_fork(fleet: WeightsFleet, transport: str) -> None:
    """Its reader continues with the other one, and keeps its chunks."""
    seeds = {name: node for node, name in (fleet.seed(**slow_environment(transport)) for _ in range(2))}
    target = start_mid_fork(fleet, transport)
    (view,) = fleet.client.forks(model="weights")
    read_from = view.plan[0].source_id
    seeds[read_from].request("suspend")
    report = target.request("report")
    assert "forked" == report["outcome"]
    assert sha256_of(1) == report["sha256"]
    assert set(seeds) - {read_from} <= set(cast(list[str], report["sources"]))
    assert {} == quarantined(fleet)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_resumed_seed_serves_its_current_weights(fleet: WeightsFleet, transport: str) -> None:
    """From other addresses, to a later fork."""
    options = {"RFORK_TRANSPORTS": transport, "RFORK_ALLOW_UNAUTHENTICATED_TCP": "1"}
    seed, _ = fleet.seed(**options)
    seed.request("suspend")
    seed.request("resume", 2)
    target = fleet.node(**options)
    target.request("fork")
    report = target.request("report")
    assert "forked" == report["outcome"]
    assert sha256_of(2) == report["sha256"]


def image_with(value: int) -> Image:
    return image_from_tensors(
        {f"t{at}": torch.full((size,), value, dtype=torch.uint8) for at, size in enumerate(SIZES)}
    )


def content(image: Image) -> bytes:
    with image.readable(0, image.layout.image_bytes) as views:
        return b"".join(views)


def token_for(seed: Seed, key: str) -> str:
    layout_id, until = seed.image.layout.layout_id, time.time() + 60
    claims = LeaseClaims("fork-1", seed.identity.instance_id, layout_id, None, seed.generation, until)
    return sign(claims, decode_key(key))


def open_channel(seed: Seed, token: str, transport: str, deadline: float) -> tuple[str, Endpoint]:
    """Open a channel, and retry while the source has not registered its memory yet."""
    while True:
        try:
            return seed.open_channel(seed.check(token), seed.image.layout.layout_id, [transport], "127.0.0.1")
        except SourceBusy:
            if time.monotonic() >= deadline:
                raise
            threading.Event().wait(0.01)


def read_all(seed: Seed, transport: Transport, key: str) -> bytes:
    """Return what a reader gets on a new channel."""
    token, image = token_for(seed, key), image_with(0)
    deadline = time.monotonic() + 60
    channel, endpoint = open_channel(seed, token, transport.name, deadline)
    with contextlib.closing(transport.connect(endpoint, image, lambda: token, deadline)) as reader:
        reader.read(0, image.layout.image_bytes, deadline)
    seed.close_channel(channel)
    return content(image)


def open_resources() -> Counter[str]:
    """Return the number of threads by name, and of descriptors, of this process."""
    threads = Counter(thread.name for thread in threading.enumerate() if thread.name.startswith("rfork"))
    return threads + Counter({"descriptors": len(os.listdir("/proc/self/fd"))})


def until(condition: Callable[[], bool]) -> bool:
    """Return True if the condition becomes true within half a minute."""
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.02)
    return True


@needs_mooncake
@pytest.mark.slow  # logic: tests/unit/source/test_suspend.py
def test_twenty_rounds_leak_nothing() -> None:
    """Each round is read over both transports, with the right bytes from their current location; no resources
    accumulate.
    """
    settings = InstanceSettings(allow_unauthenticated_tcp=True, drain_timeout_s=0)
    transports: list[Transport] = [TransferEngineTransport(settings), HttpTransport(settings)]
    seed = Seed(image_with(1), InstanceIdentity("model"), settings, Connections(transports))
    key = derive_key(b"s" * 32, seed.identity.instance_id)
    seed.set_lease_keys([key])
    wrong: list[int] = []
    with seed:
        for number in range(20):
            value = 2 + number
            seed.suspend()
            if number == 2:  # the first rounds may open what stays, like a log or a thread pool
                early = open_resources()
            image = image_with(value)
            seed.resume(image)
            wrong += [value for transport in transports if read_all(seed, transport, key) != content(image)]
        seed.suspend()
        # The last reader's resources may take a moment to close; leaks do not close.
        assert until(lambda: open_resources() - early == Counter()), open_resources() - early
    assert [] == wrong
    assert [] == [name for name in open_resources() if name.startswith("rfork")]


@needs_mooncake
def test_memory_that_a_suspended_engine_had_registered_is_not_read() -> None:
    """A reader that stays on its channel gets no byte that is written there afterwards."""
    settings = InstanceSettings(allow_unauthenticated_tcp=True, drain_timeout_s=0)
    transport = TransferEngineTransport(settings)
    image, target = image_with(1), image_with(0)
    seed = Seed(image, InstanceIdentity("model"), settings, Connections([transport]))
    key = derive_key(b"s" * 32, seed.identity.instance_id)
    seed.set_lease_keys([key])
    with seed:
        token = token_for(seed, key)
        deadline = time.monotonic() + 60
        _, endpoint = open_channel(seed, token, "transfer_engine", deadline)
        with contextlib.closing(transport.connect(endpoint, target, lambda: token, deadline)) as reader:
            seed.suspend()
            for region in image.regions:
                region.fill_(7)
            with pytest.raises(Exception, match=r"127\.0\.0\.1"):
                reader.read(0, image.layout.image_bytes, time.monotonic() + 5)
    assert 0 == content(target).count(7)
