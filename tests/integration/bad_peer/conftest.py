"""Fixture: the seed under attack."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.integration.bad_peer.attacked_seed import SIZE, STALL_S, AttackedSeed, start_process
from tests.integration.bad_peer_node import start_node


@pytest.fixture(scope="module")
def attacked_seed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedSeed]:
    """One seed for all attacks."""
    folder = tmp_path_factory.mktemp("nodes")
    environment = {"RFORK_TRANSPORTS": "http", "BAD_PEER_BYTES": str(SIZE)}
    idle_timeouts = {"seed": STALL_S, "reader": 30}  # the attacked seed gives up soon; the well-behaved reader may wait
    with contextlib.ExitStack() as nodes:
        started = []
        for role in ("seed", "reader"):
            settings = {**environment, "RFORK_SOURCE_IDLE_TIMEOUT_S": str(idle_timeouts[role])}
            started.append(start_node(start_process, folder, role, role, **settings))
            nodes.callback(started[-1].close)
        facts = started[0].request("facts")
        address = str(facts["address"])
        (http,) = started[0].ports() - {int(address.rpartition(":")[2])}
        yield AttackedSeed(started[0], started[1], address, str(facts["layout_id"]), http)
