"""One host of `benchmarks.chaos`: seeds and forks by rfork's public functions, as it is told.

Runs in a process that the nursery made, inside a host of a lab; its options are rfork's own environment
variables. It says its name on the Unix socket, obeys (`benchmarks.chaos_wire`), and ends with the
connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from safetensors.torch import save_file
from torch import nn

from benchmarks import chaos_disk
from benchmarks.chaos_wire import COMMAND, Answer, Command, Look
from benchmarks.fanout_node import introduced, module_of
from benchmarks.fanout_wire import line
from rfork import settings
from rfork.control.client import PlannerClient
from rfork.engines.torch import fork, seed
from rfork.errors import NothingLeft, RforkError
from rfork.image import ranges
from rfork.image.capture import capture
from rfork.image.proof import image_sha256
from rfork.settings import Settings
from rfork.storage.snapshots.writer import write_snapshot
from rfork.wire import ForkProgress

CHECKPOINT: Final = "model.safetensors"
SNAPSHOT: Final = "snapshot.safetensors"
PATIENCE_S: Final = 15.0

Tell = Callable[[Answer], None]


class Node:
    """The module of one host, and what is open around it."""

    def __init__(self, tell: Tell) -> None:
        """`tell` is called with what is said before a command's answer, on any thread."""
        self._tell = tell
        self._settings = settings.load(Settings)
        self._module = nn.Module()
        self._giving = contextlib.ExitStack()

    def obey(self, command: Command) -> Answer:
        """Do it; raises RforkError or OSError."""
        match command.verb:
            case "prepare":
                self._module = module_of(command.size, filled=bool(command.weights), weights=command.weights)
                return Answer("prepare", sha256=self._sha256() if command.weights else "")
            case "store":
                save_file(self._module.state_dict(), Path(command.folder) / CHECKPOINT)
                return self._snapshot(command)
            case "seed":
                return self._seed(command)
            case "snapshot":
                return self._snapshot(command)
            case "fork":
                return self._fork(command)
            case "check":
                return Answer("check", sha256=self._sha256())
            case "rest":
                self._giving.close()
                self._module = nn.Module()
                return Answer("rest")
            case "census":
                return _census()
            case "look":
                return _look(command)

    def _sha256(self) -> str:
        return image_sha256(capture(self._module))

    def _snapshot(self, command: Command) -> Answer:
        image = capture(self._module)
        write_snapshot(image, image.manifest(), Path(command.folder) / SNAPSHOT)
        return Answer(command.verb)

    def _seed(self, command: Command) -> Answer:
        chosen = self._settings.model_copy(update={"planner": command.planner})
        giving = self._giving.enter_context(seed(self._module, model=command.model, settings=chosen))
        if not giving.wait_acknowledged(PATIENCE_S):
            raise RforkError(f"the planner did not answer a seed within {PATIENCE_S:g} s")
        return Answer("seed")

    def _fork(self, command: Command) -> Answer:
        told: dict[str, str | Path | None] = {
            "planner": command.planner,
            "snapshot": command.snapshot or None,
        }
        if command.resume:
            told["resume"] = Path(command.resume)
        chosen, began = self._settings.model_copy(update=told), time.monotonic()
        image = capture(self._module).layout
        chunks = len(image.chunks)

        def on_progress(progress: ForkProgress, _: int) -> None:
            self._tell(Answer("progress", verified=ranges.count(progress.verified) / chunks))

        try:
            with chaos_disk.paced(command.disk_rate):
                report = fork(
                    self._module,
                    model=command.model,
                    checkpoint=command.checkpoint or None,
                    settings=chosen,
                    on_progress=on_progress,
                )
        except NothingLeft as error:
            reasons = tuple(f"{reason.kind}: {reason}" for reason in error.reasons)
            return Answer("fork", outcome="failed", seconds=time.monotonic() - began, reasons=reasons)
        except Exception as error:
            # Nothing else may come out of a fork that was called right: the judge counts it.
            traceback.print_exc()
            return Answer("fork", outcome="unclean", reasons=(f"{type(error).__name__}: {error}",))
        if report.seed is not None:
            self._giving.callback(report.seed.close)
        return Answer(
            "fork",
            outcome=report.outcome,
            seconds=time.monotonic() - began,
            repeated=report.bytes_repeated,
            chunk_bytes=image.chunks.chunk_size,
            replans=report.replans,
            reasons=report.reasons,
        )


def main(path: str, name: str) -> None:
    """Connect to the crew at `path` and obey until the connection ends. SIGUSR1: log where threads are."""
    faulthandler.register(signal.SIGUSR1)
    with introduced(path, name) as connection, connection.makefile("rb") as lines:
        say = _speaker(connection)
        node = Node(say)
        for text in lines:
            command = COMMAND.validate_json(text)
            try:
                answer = node.obey(command)
            except (RforkError, OSError) as error:
                answer = Answer(command.verb, error=f"{name}: {type(error).__name__}: {error}")
            say(answer)


def _speaker(connection: socket.socket) -> Tell:
    lock = threading.Lock()

    def say(answer: Answer) -> None:
        with lock:
            connection.sendall(line(answer))

    return say


def _census() -> Answer:
    """What is alive, once nothing is kept only because nobody looked."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return Answer("census", threads=tuple(sorted(thread.name for thread in threading.enumerate())))


def _look(command: Command) -> Answer:
    with PlannerClient(command.planner, timeout_s=1.0) as planner:
        instances = planner.instances(model=command.model)
        hosts = {view.report.instance_id: view.report.placement.host for view in instances}
        forks = tuple(
            Look(
                hosts.get(view.instance_id, ""),
                tuple(hosts[share.source_id] for share in view.plan if share.source_id in hosts),
            )
            for view in planner.forks(model=command.model)
            if view.finish is None
        )
    return Answer("look", forks=forks, instances=tuple(hosts.values()))
