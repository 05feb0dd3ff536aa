"""Fixed ports for several ranks of one host: each uses the first free port of the range."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress

import pytest
import torch

from rfork.errors import PortInUse
from rfork.image.capture import image_from_tensors
from rfork.settings import InstanceSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.transport.http import HttpTransport
from tests.ports import free_port

RANKS = 3


@pytest.fixture
def first() -> int:
    """A port that is followed by free ones."""
    while True:
        port = free_port()
        with ExitStack() as stack, suppress(OSError):
            for offset in range(2 * RANKS):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            break
    return port


def seed_of(settings: InstanceSettings) -> Seed:
    image = image_from_tensors({"weight": torch.ones(64)})
    return Seed(
        image, InstanceIdentity("model"), settings, Connections([HttpTransport(settings)]), manifest=image.manifest()
    )


def settings_of(first: int) -> InstanceSettings:
    return InstanceSettings(peer_port=first, http_port=first + RANKS, port_range_size=RANKS)


def test_each_rank_uses_the_first_free_port(first: int) -> None:
    """Three processes with the same range run concurrently, on these ports and no others."""
    settings = settings_of(first)
    with ExitStack() as running:
        seeds = [running.enter_context(seed_of(settings)) for _ in range(RANKS)]
        peers = [seed.report().address for seed in seeds]
        urls = [seed._exports["http"].endpoint().parameters["url"] for seed in seeds]
    assert [f"127.0.0.1:{first + rank}" for rank in range(RANKS)] == peers
    assert [f":{first + RANKS + rank}/" for rank in range(RANKS)] == [
        url[len("http://127.0.0.1") :][: len(f":{first}/")] for url in urls
    ]


@pytest.mark.parametrize("setting", ["peer_port", "http_port"])
def test_an_exhausted_port_range_is_named(first: int, setting: str) -> None:
    """One process too many fails, and names the tried ports and the setting."""
    settings = InstanceSettings(**{setting: first}, port_range_size=RANKS)  # type: ignore[arg-type]
    with ExitStack() as running:
        for _ in range(RANKS):
            running.enter_context(seed_of(settings))
        with pytest.raises(PortInUse) as caught, seed_of(settings):
            pass
    message = f"{caught.value} {caught.value.hint}"
    assert [True, True, True] == [
        part in message
        for part in (f"127.0.0.1:{first}-{first + RANKS - 1}", f"RFORK_{setting.upper()}", "RFORK_PORT_RANGE_SIZE")
    ]


def test_a_single_port_is_named(first: int) -> None:
    """Without a range the error names the one port."""
    settings = InstanceSettings(peer_port=first)
    with seed_of(settings), pytest.raises(PortInUse) as caught, seed_of(settings):
        pass
    assert f"cannot listen on 127.0.0.1:{first}: the address is in use" == str(caught.value)


def test_port_zero_uses_any_port() -> None:
    """Port 0 has no range, and no range exceeds the last port."""
    settings = InstanceSettings(port_range_size=RANKS)
    assert [0] == [*settings.ports_from(0)]
    assert [65534, 65535] == [*settings.ports_from(65534)]
