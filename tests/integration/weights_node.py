"""One instance in a process of its own, for tests that change weights under a fork; `WeightsNode` is its other side.

A command is one line of JSON on standard input, its answer one line on standard output; how a fork goes
is told between them. Options are rfork's own environment variables. It ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Self, cast

import torch
from torch import nn

import rfork
from rfork.image.capture import capture
from rfork.image.checksum import image_sha256
from rfork.image.chunks import MIB
from rfork.schema import ForkProgress
from rfork.source.seed import Seed
from tests.processes import send

Message = dict[str, str | int | list[str] | None]

MODEL = "weights"
CHUNKS = 12
SIZES = (5 * MIB + 3, 17, 4 * MIB, 3 * MIB - 20)
"""Bytes of each tensor: some chunks hold several, some tensors several chunks."""
CHECKPOINT = 0
"""The version of the weights that the loader gives."""
RESPONSE_TIMEOUT_S = 120.0
"""It may have to start first; see `tests.processes.START_S`."""


def module_of(version: int | None) -> nn.Module:
    """A module with the weights of this version, or zeros."""
    module = nn.Module()
    for number, size in enumerate(SIZES):
        module.register_buffer(f"layer{number}", torch.zeros(size, dtype=torch.uint8))
    if version is not None:
        fill(module, version)
    return module


def fill(module: nn.Module, version: int) -> None:
    """Write the weights of this version in place; no byte range is the same in two of them."""
    generator = torch.Generator().manual_seed(version)
    for buffer in module.buffers():
        buffer.random_(generator=generator)


def sha256_of(version: int) -> str:
    """The proof of a module that holds this version."""
    return image_sha256(capture(module_of(version)))


class WeightsProcess:
    """The process's own side: one module, and what is open around it."""

    def __init__(self) -> None:
        self._module = module_of(None)
        self._open_seeds = contextlib.ExitStack()
        self._seed: Seed | None = None
        self._report: Message = {}
        self._fork = threading.Thread(target=self._run_fork)

    def execute(self, command: str, number: int) -> Message:
        """Do it; `number` is a version or a chunk."""
        match command:
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
                    raise ValueError("only a seed is updated")
                with self._seed.updating():
                    fill(self._module, number)
                return {"acknowledged": self._seed.wait_registered(RESPONSE_TIMEOUT_S)}
            case "fence":
                if self._seed is None:
                    raise ValueError("only a seed is fenced")
                self._seed.fence()
                return {}
            case "suspend":
                if self._seed is None:
                    raise ValueError("only a seed is suspended")
                self._seed.suspend()
                fill(self._module, CHECKPOINT)  # what lay there is gone: whoever still read it would see
                return {}
            case "resume":
                if self._seed is None:
                    raise ValueError("only a seed is resumed")
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
        """End the fork, and what is given."""
        if self._fork.ident is not None:
            self._fork.join()
        self._open_seeds.close()


def progress_message(progress: ForkProgress) -> Message:
    """How many chunks are there."""
    return {"chunks": sum(end - begin for begin, end in progress.verified)}


def print_message(message: Message) -> None:
    """One line on standard output."""
    os.write(1, json.dumps(message).encode() + b"\n")


class WeightsNode:
    """The test's side: an `WeightsProcess` in a process of its own. Close it."""

    def __init__(self, planner: str, options: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
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

    def request(self, command: str, number: int = 0) -> Message:
        """Have it done; the answer. Raises RuntimeError when the process ends instead."""
        self.start_request(command, number)
        return self.next_response()

    def start_request(self, command: str, number: int = 0) -> None:
        """Tell it, and do not wait."""
        if self._process.stdin is None:
            raise RuntimeError("there is no way to tell it")
        self._process.stdin.write(json.dumps([command, number]) + "\n")
        self._process.stdin.flush()

    def next_response(self) -> Message:
        """The answer to the oldest command that has none. Raises RuntimeError when the process ends."""
        response = self._responses.get(timeout=RESPONSE_TIMEOUT_S)
        if response is None:
            raise RuntimeError(f"the process ended with {self._process.wait()}")
        return response

    def wait_for_chunks(self, min_chunks: int) -> None:
        """Block until its fork has so many chunks; TimeoutError when it takes for ever."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._chunks >= min_chunks, RESPONSE_TIMEOUT_S):
                raise TimeoutError(f"{self._chunks} of {min_chunks} chunks came")

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
        """End it."""
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
    """Obey until standard input ends."""
    torch.set_num_threads(1)
    instance = WeightsProcess()
    for line in sys.stdin:
        command, number = json.loads(line)
        print_message(instance.execute(command, number))
    instance.close()


if __name__ == "__main__":
    main()
