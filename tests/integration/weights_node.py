"""An instance in its own process, for tests that change weights during a fork, and `WeightsNode`, which
controls it.

Each command is one line of JSON on standard input, and its response one line on standard output; a fork's
progress messages come in between. Options are rfork's own environment variables. The process exits when its
standard input is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, cast

import torch
from torch import nn
from typing_extensions import Self

import rfork
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.image.memory import image_sha256
from rfork.schema import ForkProgress
from rfork.source.seed import Seed
from tests.fork_server import PythonProcess
from tests.processes import send

Message = dict[str, str | int | list[str] | None]

MODEL = "weights"
CHUNKS = 12
SIZES = (5 * MIB + 3, 17, 4 * MIB, 3 * MIB - 20)
"""Bytes of each tensor: some chunks cover several tensors, some tensors several chunks."""
REVERSED_SIZES = SIZES[::-1]
"""Another layout of as many bytes."""
CHECKPOINT = 0
"""The version of the weights that the loader produces."""
RESPONSE_TIMEOUT_S = 120.0
"""The process may have to start first; see `tests.processes.START_S`."""


def module_of(version: int | None, sizes: Sequence[int] = SIZES) -> nn.Module:
    """Return a module with the weights of this version, or zeros."""
    module = nn.Module()
    for number, size in enumerate(sizes):
        module.register_buffer(f"layer{number}", torch.zeros(size, dtype=torch.uint8))
    if version is not None:
        fill(module, version)
    return module


def fill(module: nn.Module, version: int) -> None:
    """Write the weights of this version in place; no byte range is equal in two versions."""
    generator = torch.Generator().manual_seed(version)
    for buffer in module.buffers():
        buffer.random_(generator=generator)


def sha256_of(version: int, sizes: Sequence[int] = SIZES) -> str:
    """Return the hash of a module with this version."""
    return image_sha256(capture(module_of(version, sizes)))


class WeightsProcess:
    """State of the process: one module, and its open source and target."""

    def __init__(self) -> None:
        self._module = module_of(None)
        self._open_seeds = contextlib.ExitStack()
        self._seed: Seed | None = None
        self._report: Message = {}
        self._fork = threading.Thread(target=self._run_fork)

    def execute(self, command: str, number: int) -> Message:
        """Execute a command; `number` is a version or a chunk."""
        match command:
            case "reverse":
                self._module = module_of(None, REVERSED_SIZES)
                return {}
            case "seed":
                fill(self._module, number)
                seed = self._seed = self._open_seeds.enter_context(rfork.seed(self._module, model=MODEL))
                return {
                    "acknowledged": seed.wait_registered(RESPONSE_TIMEOUT_S),
                    "id": seed.identity.instance_id,
                }
            case "id":
                return {"id": self._seed.identity.instance_id if self._seed is not None else None}
            case "update":
                if self._seed is None:
                    raise ValueError("only a seed can be updated")
                with self._seed.updating():
                    fill(self._module, number)
                return {"acknowledged": self._seed.wait_registered(RESPONSE_TIMEOUT_S)}
            case "fence":
                if self._seed is None:
                    raise ValueError("only a seed can be fenced")
                self._seed.fence()
                return {}
            case "suspend":
                if self._seed is None:
                    raise ValueError("only a seed can be suspended")
                self._seed.suspend()
                fill(self._module, CHECKPOINT)  # the old memory is released: a stale read would be noticed
                return {}
            case "resume":
                if self._seed is None:
                    raise ValueError("only a seed can be resumed")
                self._module = module_of(number)  # at other addresses
                self._seed.resume(capture(self._module))
                return {"acknowledged": self._seed.wait_registered(RESPONSE_TIMEOUT_S)}
            case "write":
                with capture(self._module).writable(number * MIB, number * MIB + 1) as (view,):
                    view[0] ^= 0xFF
                return {}
            case "fork":
                self._fork.start()
                return {}
            case "sha256":
                return {"sha256": image_sha256(capture(self._module))}
            case "report":
                self._fork.join()
                return self._report
            case _:
                raise ValueError(command)

    def _run_fork(self) -> None:
        def loader(module: nn.Module) -> None:
            fill(module, CHECKPOINT)

        try:
            report = rfork.fork(
                self._module,
                model=MODEL,
                loader=loader,
                on_progress=lambda progress, _: print_message(progress_message(progress)),
            )
        except rfork.RforkError as error:
            self._report = {"outcome": error.kind}
            return
        if report.seed is not None:
            self._open_seeds.callback(report.seed.close)
        self._report = {
            "outcome": report.outcome,
            "id": report.instance_id,
            "weights_id": report.weights_id,
            "reasons": list(report.reasons),
            "sources": [share.source_id for share in report.sources],
            "sha256": image_sha256(capture(self._module)),
        }

    def close(self) -> None:
        """End the fork and stop serving."""
        if self._fork.ident is not None:
            self._fork.join()
        self._open_seeds.close()


def progress_message(progress: ForkProgress) -> Message:
    """Return the number of verified chunks as a message."""
    return {"chunks": sum(end - begin for begin, end in progress.verified)}


def print_message(message: Message) -> None:
    """Print one message line to standard output."""
    os.write(1, json.dumps(message).encode() + b"\n")


class WeightsNode:
    """The test's handle of a `WeightsProcess` in its own process. Close it after use."""

    def __init__(self, planner: str, options: Mapping[str, str]) -> None:
        self._process = PythonProcess(
            [sys.executable, "-m", "tests.integration.weights_node"],
            env={**os.environ, "RFORK_PLANNER": planner, "RFORK_TRANSPORTS": "http", **options},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._responses: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._chunks = 0
        self._watch = threading.Thread(target=self._follow, args=(self._process.stdout,), daemon=True)
        self._watch.start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def request(self, command: str, number: int = 0) -> Message:
        """Execute a command and return its response. Raise RuntimeError if the process exits instead."""
        self.start_request(command, number)
        return self.next_response()

    def start_request(self, command: str, number: int = 0) -> None:
        """Send a command without waiting for the response."""
        if self._process.stdin is None:
            raise RuntimeError("the process has no standard input")
        self._process.stdin.write(json.dumps([command, number]) + "\n")
        self._process.stdin.flush()

    def next_response(self) -> Message:
        """Return the response to the oldest pending command. Raise RuntimeError if the process exits."""
        response = self._responses.get(timeout=RESPONSE_TIMEOUT_S)
        if response is None:
            raise RuntimeError(f"the process ended with {self._process.wait()}")
        return response

    def wait_for_chunks(self, min_chunks: int) -> None:
        """Block until its fork has `min_chunks` chunks; raise TimeoutError if that takes too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._chunks >= min_chunks, RESPONSE_TIMEOUT_S):
                raise TimeoutError(f"{self._chunks} of {min_chunks} chunks arrived")

    def signal(self, number: int) -> None:
        """Send a signal."""
        send(self._process, number)

    def _follow(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                message = cast(Message, json.loads(line))
                chunks = message.get("chunks")
                if not isinstance(chunks, int):
                    self._responses.put(message)
                    continue
                with self._changed:
                    self._chunks = chunks
                    self._changed.notify_all()
        self._responses.put(None)

    def close(self) -> None:
        """Stop the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(RESPONSE_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._watch.join(RESPONSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def main() -> None:
    """Execute commands until standard input is closed."""
    torch.set_num_threads(1)
    instance = WeightsProcess()
    for line in sys.stdin:
        command, number = json.loads(line)
        print_message(instance.execute(command, number))
    instance.close()


if __name__ == "__main__":
    main()
