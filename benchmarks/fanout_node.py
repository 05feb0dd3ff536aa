"""One host of `benchmarks.fanout`: a process that seeds and forks by rfork's public functions, as it is told.

`main` runs in a process of its own, inside a host of a lab; its options are rfork's own environment
variables. It says its name on the Unix socket, obeys (`benchmarks.fanout_wire`), and ends with the
connection.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time

import torch
from torch import nn

from benchmarks import fanout_wire
from benchmarks.fanout_wire import Answer, Command, Point
from rfork import logs, settings
from rfork.engines.torch import fork, seed
from rfork.errors import RforkError
from rfork.image.capture import capture
from rfork.image.proof import image_sha256
from rfork.settings import Settings
from rfork.wire import ForkProgress

MATRIX = 4 << 20
"""Bytes of each large tensor; as in a layer of a real model, a small one follows each."""
VECTOR = 4 << 10
PATIENCE_S = 60.0
BUFFER = 1 << 20


def module_of(size: int, *, filled: bool, weights: int = 1) -> nn.Module:
    """A module of exactly `size` bytes: zeros, or random bytes that are the same wherever `weights` is."""
    generator = torch.Generator().manual_seed(weights)
    module = nn.Module()
    left, number = size, 0
    while left:
        part = min(left, MATRIX if number % 2 == 0 else VECTOR)
        tensor = torch.zeros(part, dtype=torch.uint8)
        if filled:
            tensor.random_(generator=generator)
        kind = "weight" if number % 2 == 0 else "norm"
        module.register_buffer(f"layer{number // 2:04d}_{kind}", tensor)
        left, number = left - part, number + 1
    return module


class Node:
    """The module of one host, and what is open around it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._settings = settings.load(Settings)
        self._module = nn.Module()
        self._giving = contextlib.ExitStack()
        self._listener: socket.socket | None = None

    def obey(self, command: Command) -> Answer:
        """Do it; raises RforkError or OSError."""
        match command.verb:
            case "prepare":
                self._module = module_of(self._size, filled=command.filled)
                return Answer()
            case "seed":
                return self._seed(command.model)
            case "fork":
                return self._fork(command)
            case "check":
                return Answer(sha256=image_sha256(capture(self._module)))
            case "rest":
                self._giving.close()
                return Answer()
            case "listen":
                self._listener = socket.create_server((self._settings.bind, 0))
                return Answer(port=self._listener.getsockname()[1])
            case "give":
                return self._give()
            case "take":
                return self._take(command.address, command.port)

    def _seed(self, model: str) -> Answer:
        giving = self._giving.enter_context(seed(self._module, model=model))
        if not giving.wait_acknowledged(PATIENCE_S) or giving.manifest is None:
            raise RforkError(f"the planner did not answer a seed within {PATIENCE_S:g} s")
        return Answer(weights_id=giving.manifest.weights_id)

    def _fork(self, command: Command) -> Answer:
        points: list[Point] = []

        def on_progress(progress: ForkProgress, _: int) -> None:
            points.append((time.monotonic(), sum(progress.sources.values())))

        # Without a planner there is nobody to share with.
        chosen = self._settings.model_copy(update={"planner": None} if command.alone else {})
        began = time.monotonic()
        report = fork(
            self._module,
            model=command.model,
            snapshot=command.snapshot or None,
            checkpoint=command.checkpoint or None,
            settings=chosen,
            on_progress=on_progress,
        )
        ended = time.monotonic()
        if report.seed is not None:
            self._giving.callback(report.seed.close)
        if report.outcome != ("fallback" if command.alone else "forked"):
            raise RforkError(f"not forked: {'; '.join(report.reasons)}")
        points.append((ended, report.image_bytes))
        return Answer(
            began=began,
            ended=ended,
            points=((began, 0), *points),
            weights_id=report.weights_id,
            replans=report.replans,
            storage_bytes=report.storage_bytes,
        )

    def _give(self) -> Answer:
        if self._listener is None:
            raise RforkError("nobody listens")
        with self._listener, contextlib.closing(self._listener.accept()[0]) as connection:
            left, block = self._size, memoryview(bytes(BUFFER))
            while left:
                left -= connection.send(block[: min(left, BUFFER)])
        self._listener = None
        return Answer()

    def _take(self, address: str, port: int) -> Answer:
        began = time.monotonic()
        with socket.create_connection((address, port), PATIENCE_S) as connection:
            got, block = 0, bytearray(BUFFER)
            while received := connection.recv_into(block):
                got += received
        if got != self._size:
            raise RforkError(f"{got} of {self._size} bytes came")
        return Answer(began=began, ended=time.monotonic())


def main() -> None:
    """Connect and obey until the connection ends. Arguments: path of the socket, name, bytes of the image."""
    path, name, size = sys.argv[1:]
    told = settings.load(Settings)
    logs.configure(json=told.log_json, level=told.log_level)
    torch.set_num_threads(1)  # the hosts of a lab share the cores of one machine
    node = Node(int(size))
    with introduced(path, name) as connection, connection.makefile("rb") as lines:
        for text in lines:
            try:
                answer = node.obey(fanout_wire.command(text))
            except (RforkError, OSError) as error:
                answer = Answer(error=f"{name}: {type(error).__name__}: {error}")
            connection.sendall(fanout_wire.line(answer))
    node.obey(Command("rest"))


def introduced(path: str, name: str) -> socket.socket:
    """A connection to the crew that listens at `path`, which has been told the node's name."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        connection.sendall(name.encode() + b"\n")
    except OSError:
        connection.close()
        raise
    return connection
