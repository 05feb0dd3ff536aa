"""A TransferEngine seed in its own process, and images with known bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from rfork.image.layout import Layout, TensorSpec
from rfork.image.memory import Image, Segment
from rfork.settings import InstanceSettings
from rfork.transport.base import Endpoint
from rfork.transport.mooncake import TransferEngineTransport
from tests.fork_server import PythonProcess
from tests.processes import send

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = InstanceSettings(allow_unauthenticated_tcp=True)


class UnusedGate:
    """A gate that a one-sided transport never calls."""

    def authorize(self, token: str, begin: int, end: int) -> str:
        raise AssertionError("one-sided reads bypass the gate")

    def read_guard(self, token: str, begin: int, end: int, abort: Callable[[], None]) -> AbstractContextManager[None]:
        raise AssertionError("one-sided reads bypass the gate")

    def acquire_bytes(self, max_bytes: int, fork_id: str) -> int:
        raise AssertionError("one-sided reads bypass the gate")

    def version_tag(self) -> str:
        raise AssertionError("one-sided reads bypass the gate")


def image_of(sizes: list[int], tensors: list[torch.Tensor]) -> Image:
    """Return an image of separately allocated byte tensors, in order."""
    specs, offset = [], 0
    for index, size in enumerate(sizes):
        specs.append(TensorSpec(f"t{index}", "uint8", (size,), (1,), offset))
        offset += size
    return Image(Layout(tuple(specs), offset), tensors)


def pattern(index: int, size: int, salt: int) -> torch.Tensor:
    """Return bytes that differ between tensors, positions and salts."""
    period = ((torch.arange(251) * 7 + index * 13 + salt) % 251).to(torch.uint8)
    return period.repeat(size // 251 + 1)[:size].clone()


class MooncakeSeedProcess:
    """A seed in its own process."""

    def __init__(self, sizes: list[int], salt: int = 0) -> None:
        self.process = PythonProcess(
            [sys.executable, __file__, json.dumps(sizes), str(salt)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        endpoint_line = next((line for line in self.process.stdout if line.startswith('{"parameters"')), None)
        if endpoint_line is None:
            self.kill()
            raise ChildProcessError("the seed did not start")
        description = json.loads(endpoint_line)
        self.endpoint = Endpoint(
            "transfer_engine",
            description["parameters"],
            tuple(Segment(*segment) for segment in description["segments"]),
        )

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the seed."""
        send(self.process, number)

    def kill(self) -> None:
        """Kill the seed if it is running."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def _serve(sizes: list[int], salt: int) -> None:
    tensors = [pattern(index, size, salt) for index, size in enumerate(sizes)]
    exporter = TransferEngineTransport(SETTINGS).export(image_of(sizes, tensors), UnusedGate())
    assert exporter.ready(time.monotonic() + 10)
    exporter.authorize_peer("channel", "127.0.0.1")
    endpoint = exporter.endpoint()
    print(json.dumps({"parameters": dict(endpoint.parameters), "segments": endpoint.segments}), flush=True)
    sys.stdin.readline()
    exporter.close()


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]), int(sys.argv[2]))
