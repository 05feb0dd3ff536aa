"""One host of `benchmarks.fanout`: a process that seeds and forks with rfork's public functions, on command.

`main` runs in a separate process inside a host of the lab; its options are rfork's own environment variables.
It sends its name on the Unix socket, executes commands (`benchmarks.fanout.messages`), and ends when the
connection closes.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time

import torch
from torch import nn

from benchmarks.fanout import messages
from benchmarks.fanout.messages import FanoutCommand, FanoutResponse, ProgressPoint
from rfork import logs, settings
from rfork._api import fork, seed
from rfork.errors import RforkError
from rfork.image.capture import capture
from rfork.image.memory import image_sha256
from rfork.schema import ForkProgress
from rfork.settings import InstanceSettings

MATRIX = 4 << 20
"""Bytes of each large tensor; as in a layer of a real model, a small tensor follows each."""
VECTOR = 4 << 10
NO_SOURCE_TIMEOUT_S = 60.0
BUFFER = 1 << 20


def module_of(size: int, *, filled: bool, weights: int = 1) -> nn.Module:
    """Build a module of exactly `size` bytes: zeros, or random bytes that are the same for equal `weights`."""
    generator = torch.Generator().manual_seed(weights)
    module = nn.Module()
    left, number = size, 0
    while left:
        part = min(left, MATRIX if number % 2 == 0 else VECTOR)
        tensor = torch.zeros(part, dtype=torch.uint8)
        if filled:
            tensor.random_(generator=generator)
        tensor_type = "weight" if number % 2 == 0 else "norm"
        module.register_buffer(f"layer{number // 2:04d}_{tensor_type}", tensor)
        left, number = left - part, number + 1
    return module


class FanoutNode:
    """The module of one host and its open resources."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._settings = settings.load(InstanceSettings)
        self._module = nn.Module()
        self._seed_stack = contextlib.ExitStack()
        self._listener: socket.socket | None = None

    def handle(self, command: FanoutCommand) -> FanoutResponse:
        """Execute a command; raises RforkError or OSError."""
        match command.verb:
            case "prepare":
                self._module = module_of(self._size, filled=command.filled)
                return FanoutResponse()
            case "seed":
                return self._seed(command.model)
            case "fork":
                return self._fork(command)
            case "check":
                return FanoutResponse(sha256=image_sha256(capture(self._module)))
            case "release":
                self._seed_stack.close()
                return FanoutResponse()
            case "listen":
                self._listener = socket.create_server((self._settings.bind, 0))
                return FanoutResponse(port=self._listener.getsockname()[1])
            case "send":
                return self._send_image()
            case "receive":
                return self._receive_image(command.address, command.port)

    def _seed(self, model: str) -> FanoutResponse:
        seed_handle = self._seed_stack.enter_context(seed(self._module, model=model))
        if not seed_handle.wait_registered(NO_SOURCE_TIMEOUT_S) or seed_handle.manifest is None:
            raise RforkError(f"the planner did not respond to a seed within {NO_SOURCE_TIMEOUT_S:g} s")
        return FanoutResponse(weights_id=seed_handle.manifest.weights_id)

    def _fork(self, command: FanoutCommand) -> FanoutResponse:
        points: list[ProgressPoint] = []

        def on_progress(progress: ForkProgress, _: int) -> None:
            points.append((time.monotonic(), sum(progress.sources.values())))

        # Without a planner there are no others to share with.
        fork_settings = self._settings.model_copy(update={"planner": None} if command.independent else {})
        began = time.monotonic()
        report = fork(
            self._module,
            model=command.model,
            snapshot=command.snapshot or None,
            checkpoint=command.checkpoint or None,
            settings=fork_settings,
            on_progress=on_progress,
        )
        ended = time.monotonic()
        if report.seed is not None:
            self._seed_stack.callback(report.seed.close)
        if report.outcome != ("fallback" if command.independent else "forked"):
            raise RforkError(f"not forked: {'; '.join(report.reasons)}")
        points.append((ended, report.image_bytes))
        return FanoutResponse(
            began=began,
            ended=ended,
            points=((began, 0), *points),
            weights_id=report.weights_id,
            replans=report.replans,
            storage_bytes=report.storage_bytes,
        )

    def _send_image(self) -> FanoutResponse:
        if self._listener is None:
            raise RforkError("no socket is listening")
        with self._listener, contextlib.closing(self._listener.accept()[0]) as connection:
            left, block = self._size, memoryview(bytes(BUFFER))
            while left:
                left -= connection.send(block[: min(left, BUFFER)])
        self._listener = None
        return FanoutResponse()

    def _receive_image(self, address: str, port: int) -> FanoutResponse:
        began = time.monotonic()
        with socket.create_connection((address, port), NO_SOURCE_TIMEOUT_S) as connection:
            received_bytes, block = 0, bytearray(BUFFER)
            while received := connection.recv_into(block):
                received_bytes += received
        if received_bytes != self._size:
            raise RforkError(f"received {received_bytes} of {self._size} bytes")
        return FanoutResponse(began=began, ended=time.monotonic())


def main() -> None:
    """Connect and execute commands until the connection closes. Arguments: socket path, name, bytes of the
    image.
    """
    path, name, size = sys.argv[1:]
    log_settings = settings.load(InstanceSettings)
    logs.configure(json=log_settings.log_json, level=log_settings.log_level)
    torch.set_num_threads(1)  # the hosts of a lab share the cores of one machine
    node = FanoutNode(int(size))
    with connect(path, name) as connection, connection.makefile("rb") as lines:
        for text in lines:
            try:
                response = node.handle(messages.parse_command(text))
            except (RforkError, OSError) as error:
                response = FanoutResponse(error=f"{name}: {type(error).__name__}: {error}")
            connection.sendall(messages.encode_line(response))
    node.handle(FanoutCommand("release"))


def connect(path: str, name: str) -> socket.socket:
    """Connect to the cluster that listens at `path` and send it the node's name."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        connection.sendall(name.encode() + b"\n")
    except OSError:
        connection.close()
        raise
    return connection
