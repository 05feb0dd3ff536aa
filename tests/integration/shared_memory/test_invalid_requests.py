"""Invalid and forbidden requests to a shared_memory source."""

from __future__ import annotations

import mmap
import os

import pytest

from rfork.errors import NotSameHost, SourceBusy
from rfork.image.chunks import MIB
from rfork.transport.base import Endpoint
from rfork.transport.same_host.connection import Message, close_all
from rfork.transport.shared_memory import exporter
from tests.integration.shared_memory.pairs import pair, send_request, transport
from tests.transport_contract import TOKEN, content, soon


def test_a_reader_cannot_write() -> None:
    """The descriptor that a reader receives is sealed: it cannot be written, truncated or mapped writable."""
    with pair() as made:
        message, descriptors = send_request(
            made.exporter.endpoint(), {"token": TOKEN, "begin": 0, "end": MIB, "alignment": [0, 64]}
        )
        assert "sealed" in message
        refused = 0
        for attempt in (
            lambda: os.pwrite(descriptors[0], b"x", 0),
            lambda: os.ftruncate(descriptors[0], 0),
            lambda: mmap.mmap(descriptors[0], MIB, mmap.MAP_SHARED),
        ):
            with pytest.raises(OSError, match="not permitted"):
                attempt()
            refused += 1
        close_all(descriptors)
        assert 3 == refused


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"token": TOKEN},
        {"token": 5, "begin": 0, "end": MIB},
        {"token": TOKEN, "begin": "0", "end": MIB},
        {"token": TOKEN, "begin": MIB, "end": 0},
        {"token": TOKEN, "begin": -1, "end": MIB},
        {"token": TOKEN, "begin": 0, "end": 1 << 80},
        {"token": TOKEN, "begin": 0, "end": MIB, "alignment": "all"},
        {"token": TOKEN, "begin": 0, "end": MIB, "alignment": [0]},
        {"token": TOKEN, "begin": 0, "end": MIB, "alignment": [5, 0, 3, 0]},
        {"token": TOKEN, "begin": 0, "end": MIB, "alignment": [0, 4096]},
        {"token": "forged", "begin": 0, "end": MIB},
    ],
)
def test_a_malformed_request_is_refused(message: Message) -> None:
    """It is refused without a descriptor, and the next reader is served."""
    with pair() as made:
        reply, descriptors = send_request(made.exporter.endpoint(), message)
        assert "error" in reply
        assert [] == descriptors
        made.connect().read(0, MIB, soon())
        assert content(made.source, 0, MIB) == content(made.target, 0, MIB)


def test_an_image_on_another_host_is_refused() -> None:
    """The reader gets an immediate error when it runs on another kernel or in another network namespace."""
    with pair() as made:
        parameters = dict(made.exporter.endpoint().parameters)
        for other in (
            {"boot": "another"},
            {"socket": "@unknown", "network": "net:[1]"},
            {"socket": "/nowhere/x.socket", "folder": "1:1"},
            {},
        ):
            with pytest.raises(NotSameHost):
                transport().connect(
                    Endpoint("shared_memory", {**parameters, **other} if other else {}),
                    made.target,
                    str,
                    soon(),
                )


def test_a_source_out_of_descriptors_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports that it is busy, and is not treated as broken."""

    def refuse(*, sealable: bool = True) -> None:
        raise OSError(24, "Too many open files")

    with pair() as made:
        reader = made.connect()
        monkeypatch.setattr(exporter, "memory_file", refuse)
        with pytest.raises(SourceBusy):
            reader.read(0, MIB, soon())
        monkeypatch.undo()
        reader.read(0, MIB, soon())
        assert content(made.source, 0, MIB) == content(made.target, 0, MIB)
