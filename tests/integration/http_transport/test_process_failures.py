"""The http transport from another process, which is stopped or killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rfork.errors import RforkError, SourceTimeout, SourceUnavailable
from rfork.image.chunks import MIB
from rfork.settings import InstanceSettings
from rfork.transport.base import Endpoint
from rfork.transport.http import HttpTransport
from tests.fork_server import PythonProcess
from tests.processes import send
from tests.transport_contract import TOKEN, content, image_of, soon

ROOT = Path(__file__).parents[3]
SEED = """
import threading
from rfork.settings import InstanceSettings
from rfork.transport.http import HttpTransport
from tests.transport_contract import FakeGate, image_of
exporter = HttpTransport(InstanceSettings()).export(image_of((40 << 20, 1000), seed=1), FakeGate())
parameters = exporter.endpoint().parameters
print(parameters["url"], parameters["etag"], flush=True)
threading.Event().wait()
"""


@pytest.fixture
def seed() -> Iterator[tuple[subprocess.Popen[str], Endpoint]]:
    """A seed in a separate process that serves the image `image_of((40 << 20, 1000), seed=1)`."""
    with PythonProcess([sys.executable, "-c", SEED], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None:
                raise RuntimeError("the seed has no output")
            url, etag = process.stdout.readline().split()
            yield process, Endpoint("http", {"url": url, "etag": etag})
        finally:
            process.kill()


def test_another_process_sends_the_right_bytes(seed: tuple[subprocess.Popen[str], Endpoint]) -> None:
    """An image read from another process equals that process's image."""
    target = image_of((40 << 20, 1000))
    reader = HttpTransport(InstanceSettings()).connect(seed[1], target, lambda: TOKEN, soon())
    reader.read(0, target.layout.image_bytes, soon())
    reader.close()
    assert content(image_of((40 << 20, 1000), seed=1)) == content(target)


@pytest.mark.slow  # logic: tests/integration/http_transport/test_bad_servers.py
def test_a_stopped_process_is_stalled(seed: tuple[subprocess.Popen[str], Endpoint]) -> None:
    """SIGSTOP raises SourceTimeout after `source_idle_timeout_s`, well before the deadline; reads work after
    SIGCONT.
    """
    process, endpoint = seed
    target = image_of((40 << 20, 1000))
    reader = HttpTransport(InstanceSettings(source_idle_timeout_s=4.0)).connect(endpoint, target, lambda: TOKEN, soon())
    reader.read(0, 1000, soon())
    send(process, signal.SIGSTOP)
    with pytest.raises(SourceTimeout, match="sent nothing"):
        reader.read(0, target.layout.image_bytes, soon(600))
    with pytest.raises(SourceTimeout, match="deadline"):
        reader.read(0, target.layout.image_bytes, time.monotonic() + 0.2)
    process.send_signal(signal.SIGCONT)
    reader.read(0, 5 * MIB, soon())
    reader.close()
    assert content(image_of((40 << 20, 1000), seed=1), 0, 5 * MIB) == content(target, 0, 5 * MIB)


def test_a_killed_process_is_unavailable(seed: tuple[subprocess.Popen[str], Endpoint]) -> None:
    """SIGKILL raises SourceUnavailable on an open connection and on a new one."""
    process, endpoint = seed
    target = image_of((40 << 20, 1000))
    reader = HttpTransport(InstanceSettings()).connect(endpoint, target, lambda: TOKEN, soon())
    reader.read(0, 1000, soon())
    process.kill()
    process.wait(30)
    with pytest.raises(SourceUnavailable):
        reader.read(0, target.layout.image_bytes, soon())
    with pytest.raises(SourceUnavailable):
        HttpTransport(InstanceSettings()).connect(endpoint, target, lambda: TOKEN, soon())
    reader.close()


def test_a_process_killed_during_a_read_is_unavailable(seed: tuple[subprocess.Popen[str], Endpoint]) -> None:
    """SIGKILL ends a running read immediately with SourceUnavailable."""
    process, endpoint = seed
    target = image_of((40 << 20, 1000))
    reader = HttpTransport(InstanceSettings()).connect(endpoint, target, lambda: TOKEN, soon())
    begun = threading.Event()
    raised: list[type[RforkError]] = []

    def read_on() -> None:
        try:
            while True:
                reader.read(0, target.layout.image_bytes, soon(600))
                begun.set()
        except SourceUnavailable as error:
            raised.append(type(error))

    thread = threading.Thread(target=read_on)
    thread.start()
    assert begun.wait(60)
    process.kill()
    thread.join(60)
    reader.close()
    assert [SourceUnavailable] == raised
