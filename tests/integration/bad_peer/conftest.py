"""The seed that is attacked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.integration.bad_peer.scene import SIZE, STALL_S, Scene, popen
from tests.integration.bad_peer_node import start_node


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One seed for all attacks."""
    folder = tmp_path_factory.mktemp("nodes")
    environment = {"RFORK_TRANSPORTS": "http", "BAD_PEER_BYTES": str(SIZE)}
    patience = {"seed": STALL_S, "reader": 30}  # who is attacked gives up soon; who is honest may wait
    with contextlib.ExitStack() as nodes:
        made = []
        for role in ("seed", "reader"):
            settings = {**environment, "RFORK_STALL_S": str(patience[role])}
            made.append(start_node(popen, folder, role, role, **settings))
            nodes.callback(made[-1].close)
        facts = made[0].ask("facts")
        address = str(facts["address"])
        (http,) = made[0].ports() - {int(address.rpartition(":")[2])}
        yield Scene(made[0], made[1], address, str(facts["layout_id"]), http)
