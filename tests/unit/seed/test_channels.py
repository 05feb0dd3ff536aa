"""Channels: a way in for as long as a lease lasts, and not a moment longer than it takes to notice."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from rfork.control.lease import LeaseClaims, sign
from rfork.errors import SourceBusy, SourceChanged
from rfork.seed.channels import Channels
from rfork.seed.leases import LeaseBook
from rfork.transport.base import Endpoint

KEY = b"k" * 32
CLAIMS = LeaseClaims("fork-1", "seed-1", "0" * 32, None, 0, 1030.0)


class Door:
    """An exporter that notes who is in; `full`: it lets nobody in."""

    def __init__(self) -> None:
        self.inside: dict[str, str] = {}
        self.full = False

    def endpoint(self) -> Endpoint:
        return Endpoint("door", {})

    def let_in(self, channel_id: str, host: str) -> None:
        if self.full:
            raise SourceBusy("full")
        self.inside[channel_id] = host

    def let_out(self, channel_id: str) -> None:
        self.inside.pop(channel_id, None)

    def close(self) -> None:
        return


class Scene:
    def __init__(self) -> None:
        self.now = 1000.0
        self.door = Door()
        self.swept = threading.Event()
        self.leases = LeaseBook("seed-1", 2, clock=lambda: self.now)
        self.leases.learn_keys([KEY])
        self.channels = Channels(self.leases, {"door": self.door}, self.swept.set)

    def open(self, fork_id: str = "fork-1", host: str = "10.0.0.1") -> str:
        self.leases.check(sign(replace(CLAIMS, fork_id=fork_id), KEY), 0)
        return self.channels.open(fork_id, ["carrier pigeon", "door"], host)[0]


def test_a_reader_is_in_from_open_to_close() -> None:
    """The exporter is told the reader's address and channel, and when it is over."""
    scene = Scene()
    channel = scene.open()
    inside = dict(scene.door.inside)
    scene.channels.close(channel)
    scene.channels.close(channel)
    assert ({channel: "10.0.0.1"}, {}, ()) == (inside, scene.door.inside, scene.leases.readers)


def test_an_expired_reader_is_let_out_though_nobody_asks() -> None:
    """A lease that ends ends the way in, and whoever waits for changes hears of it."""
    scene = Scene()
    scene.open()
    scene.channels.start()
    scene.now = 1030.0
    heard = scene.swept.wait(60)
    scene.channels.stop()
    assert (True, {}) == (heard, scene.door.inside)


def test_an_expired_reader_is_let_out_though_somebody_asked_before() -> None:
    """Whoever counts the readers drops those whose lease ended, and they are let out all the same."""
    scene = Scene()
    scene.open()
    scene.now = 1030.0
    readers = scene.leases.readers
    scene.channels.start()
    scene.swept.wait(60)
    scene.channels.stop()
    assert ((), {}) == (readers, scene.door.inside)


def test_who_cannot_be_let_in_gets_no_place() -> None:
    """An exporter that refuses a reader leaves its place to others."""
    scene = Scene()
    scene.door.full = True
    with pytest.raises(SourceBusy, match="full"):
        scene.open()
    assert () == scene.leases.readers


def test_a_transport_that_is_not_exported() -> None:
    """A reader that speaks none of the source's transports is told which there are."""
    scene = Scene()
    with pytest.raises(SourceChanged, match="door"):
        scene.channels.open("fork-1", ["carrier pigeon"], "10.0.0.1")
