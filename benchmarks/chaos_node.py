"""One host of `benchmarks.chaos`: seeds and forks with rfork's public functions, on command.

Runs in a process that the fork server started inside a host of the lab; its options are rfork's own
environment variables. It sends its name on the Unix socket, executes commands (`benchmarks.chaos_messages`),
and ends when the connection closes.
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
from benchmarks.chaos_messages import COMMAND_ADAPTER, ChaosCommand, ChaosResponse, PlannerForkInfo
from benchmarks.fanout_messages import encode_line
from benchmarks.fanout_node import connect, module_of
from rfork import settings
from rfork._api import fork, seed
from rfork.errors import AllSourcesFailed, RforkError
from rfork.image import ranges
from rfork.image.capture import capture
from rfork.image.checksum import image_sha256
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkProgress
from rfork.settings import InstanceSettings
from rfork.storage.snapshots.writer import write_snapshot

CHECKPOINT: Final = "model.safetensors"
SNAPSHOT: Final = "snapshot.safetensors"
NO_SOURCE_TIMEOUT_S: Final = 15.0

SendResponse = Callable[[ChaosResponse], None]


class ChaosNode:
    """The module of one host and its open resources."""

    def __init__(self, send_response: SendResponse) -> None:
        """`send_response` is called on any thread with messages that precede a command's response."""
        self._send_response = send_response
        self._settings = settings.load(InstanceSettings)
        self._module = nn.Module()
        self._seed_stack = contextlib.ExitStack()

    def handle(self, command: ChaosCommand) -> ChaosResponse:
        """Execute a command; raises RforkError or OSError."""
        match command.verb:
            case "prepare":
                self._module = module_of(command.size, filled=bool(command.weights), weights=command.weights)
                return ChaosResponse("prepare", sha256=self._sha256() if command.weights else "")
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
                return ChaosResponse("check", sha256=self._sha256())
            case "release":
                self._seed_stack.close()
                self._module = nn.Module()
                return ChaosResponse("release")
            case "measure":
                return _thread_names()
            case "query":
                return _list_planner_records(command)

    def _sha256(self) -> str:
        return image_sha256(capture(self._module))

    def _snapshot(self, command: ChaosCommand) -> ChaosResponse:
        image = capture(self._module)
        write_snapshot(image, image.manifest(), Path(command.folder) / SNAPSHOT)
        return ChaosResponse(command.verb)

    def _seed(self, command: ChaosCommand) -> ChaosResponse:
        fork_settings = self._settings.model_copy(update={"planner": command.planner})
        seed_handle = self._seed_stack.enter_context(seed(self._module, model=command.model, settings=fork_settings))
        if not seed_handle.wait_registered(NO_SOURCE_TIMEOUT_S):
            raise RforkError(f"the planner did not respond to a seed within {NO_SOURCE_TIMEOUT_S:g} s")
        return ChaosResponse("seed")

    def _fork(self, command: ChaosCommand) -> ChaosResponse:
        setting_values: dict[str, str | Path | None] = {
            "planner": command.planner,
            "snapshot": command.snapshot or None,
        }
        if command.resume:
            setting_values["resume_dir"] = Path(command.resume)
        fork_settings, began = self._settings.model_copy(update=setting_values), time.monotonic()
        image = capture(self._module).layout
        chunks = len(image.chunks)

        def on_progress(progress: ForkProgress, _: int) -> None:
            self._send_response(ChaosResponse("progress", verified=ranges.count(progress.verified) / chunks))

        try:
            with chaos_disk.rate_limited_reads(command.disk_rate):
                report = fork(
                    self._module,
                    model=command.model,
                    checkpoint=command.checkpoint or None,
                    settings=fork_settings,
                    on_progress=on_progress,
                )
        except AllSourcesFailed as error:
            reasons = tuple(f"{reason.kind}: {reason}" for reason in error.reasons)
            return ChaosResponse("fork", outcome="failed", seconds=time.monotonic() - began, reasons=reasons)
        except Exception as error:
            # A fork called correctly must raise nothing else: the checks count it as an error.
            traceback.print_exc()
            return ChaosResponse("fork", outcome="unclean", reasons=(f"{type(error).__name__}: {error}",))
        if report.seed is not None:
            self._seed_stack.callback(report.seed.close)
        return ChaosResponse(
            "fork",
            outcome=report.outcome,
            seconds=time.monotonic() - began,
            repeated=report.bytes_repeated,
            chunk_bytes=image.chunks.chunk_size,
            replans=report.replans,
            reasons=report.reasons,
        )


def main(path: str, name: str) -> None:
    """Connect to the cluster at `path` and execute commands until the connection closes. SIGUSR1 logs all
    stacks.
    """
    faulthandler.register(signal.SIGUSR1)
    with connect(path, name) as connection, connection.makefile("rb") as lines:
        send_response = _response_sender(connection)
        node = ChaosNode(send_response)
        for text in lines:
            command = COMMAND_ADAPTER.validate_json(text)
            try:
                response = node.handle(command)
            except (RforkError, OSError) as error:
                response = ChaosResponse(command.verb, error=f"{name}: {type(error).__name__}: {error}")
            send_response(response)


def _response_sender(connection: socket.socket) -> SendResponse:
    lock = threading.Lock()

    def send_response(response: ChaosResponse) -> None:
        with lock:
            connection.sendall(encode_line(response))

    return send_response


def _thread_names() -> ChaosResponse:
    """Return the names of live threads, after a garbage collection."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return ChaosResponse("measure", threads=tuple(sorted(thread.name for thread in threading.enumerate())))


def _list_planner_records(command: ChaosCommand) -> ChaosResponse:
    with PlannerClient(command.planner, timeout_s=1.0) as planner:
        instances = planner.instances(model=command.model)
        hosts = {view.report.instance_id: view.report.placement.host for view in instances}
        forks = tuple(
            PlannerForkInfo(
                hosts.get(view.instance_id, ""),
                tuple(hosts[share.source_id] for share in view.plan if share.source_id in hosts),
            )
            for view in planner.forks(model=command.model)
            if view.finish is None
        )
    return ChaosResponse("query", forks=forks, instances=tuple(hosts.values()))
