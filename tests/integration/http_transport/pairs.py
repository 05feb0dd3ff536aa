"""Sources and targets over http on the loopback interface, and raw connections to a source."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from rfork.image.chunks import MIB
from rfork.settings import InstanceSettings
from rfork.transport.base import Endpoint
from rfork.transport.http import HttpTransport
from tests.transport_contract import TOKEN, TransportPair

AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}
SIZES = (3 * MIB, 1000, 77)
LARGE = (40 * MIB,)


@contextmanager
def pair(sizes: tuple[int, ...] = SIZES, **settings: float) -> Iterator[TransportPair]:
    made = TransportPair.create(HttpTransport(InstanceSettings.model_validate(settings)), sizes)
    try:
        yield made
    finally:
        made.close()


def url_of(endpoint: Endpoint) -> str:
    return endpoint.parameters["url"]


def file_url_of(endpoint: Endpoint) -> str:
    """Return the URL of the image as a safetensors file."""
    return f"{url_of(endpoint)}.safetensors"


def open_connection(endpoint: Endpoint) -> socket.socket:
    location = urlsplit(url_of(endpoint))
    assert location.port is not None
    return socket.create_connection((location.hostname, location.port), timeout=30)


def request(**fields: str) -> bytes:
    lines = ["GET /v1/image HTTP/1.1", "Host: seed", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def connection_threads() -> list[threading.Thread]:
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("rfork-http")]
    return [thread for thread in threads if thread.is_alive()]  # a socket that was just closed may still be listed
