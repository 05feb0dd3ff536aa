"""One host of `benchmarks.chaos`: seeds and forks with rfork's public functions, on command.

Runs in a process that the fork server started inside a host of the lab; its options are rfork's own
environment variables. It sends its name on the Unix socket, executes commands (`benchmarks.chaos.messages`),
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
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from safetensors.torch import save_file
from torch import nn

from benchmarks.chaos import disk
from benchmarks.chaos.checks import TRACE, Finding, ProcessResources, find_leaks
from benchmarks.chaos.cluster import PLANNER, ChaosCluster
from benchmarks.chaos.messages import COMMAND_ADAPTER, ChaosCommand, ChaosResponse, PlannerForkInfo
from benchmarks.chaos.scenarios import StoreType
from benchmarks.fanout.messages import encode_line
from benchmarks.fanout.node import connect, module_of
from rfork import settings
from rfork._api import fork, seed
from rfork.errors import AllSourcesFailed, RforkError
from rfork.image import ranges
from rfork.image.capture import capture
from rfork.image.memory import image_sha256
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkProgress
from rfork.settings import InstanceSettings
from rfork.storage.snapshots.writer import write_snapshot

SETTLE_S: Final = 3.0
"""Timeout for a process to become idle."""
PLANNER_SETTLE_S: Final = 30.0
"""A planner closes a connection to a host that disappeared after 25 s."""
RECORD_TTL_S: Final = 12.0
"""A planner must have removed an expired record after this time: the TTL of a lease, that of an instance, and
a margin.
"""
PAUSE_S: Final = 0.05
MAX_LINE_CHARS: Final = 200
MAX_TRACE_CHARS: Final = 4000
"""Maximum characters of a traceback that are shown."""
POOLED_FILES: Final = 8
"""Connections to Redis that a planner may keep: its maximum number of concurrent calls."""


class Inspector:
    """Compares processes with their resources at start, and planners with the records that they should keep."""

    def __init__(self, cluster: ChaosCluster) -> None:
        self.baseline: dict[str, ProcessResources] = {}
        """Resources of nodes by host; memory is responses from the first time that a node is idle."""
        self._cluster = cluster
        self._pids: dict[str, int] = {}
        self._planners: dict[StoreType, tuple[int, ProcessResources]] = {}
        self._log_offsets: dict[Path, int] = {}
        self._finished_rounds: list[tuple[float, str, StoreType]] = []

    def record_baseline(self) -> None:
        """Record the resources of each new process."""
        nodes = self._cluster.nodes
        fresh = [name for name, node in nodes.items() if self._pids.get(name) != node.process.pid]
        for name, resources in self._resource_snapshots(fresh).items():
            self._pids[name] = nodes[name].process.pid
            self.baseline[name] = replace(resources, memory=0)
        for store, planner in self._cluster.planners.items():
            if self._planners.get(store, (0,))[0] != planner.pid:
                # After its first response: its memory at that point is the baseline.
                self._planners[store] = (planner.pid, ProcessResources.of(planner.pid))

    def wait_until_settled(self, hosts: Iterable[str]) -> dict[str, ProcessResources]:
        """Return the resources of idle nodes, measured again while something is still open."""
        left, found, until = set(hosts), dict[str, ProcessResources](), time.monotonic() + SETTLE_S
        while left and time.monotonic() < until:
            found |= self._resource_snapshots(left)
            for host in left & found.keys():
                if not self.baseline[host].memory:
                    self.baseline[host] = replace(self.baseline[host], memory=found[host].memory)
            left = {host for host in left & found.keys() if any(find_leaks(self.baseline[host], found[host]))}
            self._cluster.receive(PAUSE_S if left else 0.0)
        return found

    def tracebacks(self) -> tuple[str, ...]:
        """Return by process name the tracebacks logged since the last call."""
        found: list[str] = []
        for log in sorted(self._cluster.folder.glob("*.log")):
            with log.open(errors="replace") as lines:
                lines.seek(self._log_offsets.get(log, 0))
                before, trace, after = lines.read().partition(TRACE)
                if trace:
                    found.append(f"{log.stem}: {before[-MAX_LINE_CHARS:]}{trace}{after[:MAX_TRACE_CHARS]}")
                self._log_offsets[log] = lines.tell()
        return tuple(found)

    def end_round(self, model: str, store: StoreType) -> None:
        """Record that a round has ended: its planner must remove the model in time."""
        self._finished_rounds.append((time.monotonic() + RECORD_TTL_S, model, store))

    def stale_records(self) -> tuple[str, ...]:
        """Return expired records that planners still keep. Raises ChaosError."""
        now, problems = time.monotonic(), list[str]()
        for _, model, store in [finished_round for finished_round in self._finished_rounds if finished_round[0] <= now]:
            self._cluster.wait_planner(store)  # it may have restarted only just now
            responses = self._cluster.request_all(
                [PLANNER], ChaosCommand("query", model=model, planner=self._cluster.url(store))
            )
            problems += [
                f"{model}: the planner ({store}) still has a fork on {fork_info.host or 'no host'}"
                for fork_info in responses[PLANNER].forks
            ]
            problems += [
                f"{model}: the planner ({store}) still has the instance on {host}"
                for host in responses[PLANNER].instances
            ]
        self._finished_rounds = [finished_round for finished_round in self._finished_rounds if finished_round[0] > now]
        return tuple(problems)

    def final_findings(self) -> tuple[Finding, ...]:
        """Return, after all rounds, the records that planners still keep and the resources that they leaked."""
        while self._finished_rounds and (left := self._finished_rounds[-1][0] - time.monotonic()) > 0:
            self._cluster.receive(left)
        found = [Finding("stale", text) for text in self.stale_records()]
        for store, (pid, before) in self._planners.items():
            if pid == self._cluster.planners[store].pid:
                texts = self._planner_leaks(pid, before)
                found += [Finding("leak", f"the planner ({store}): {text}") for text in texts]
        return tuple(found)

    def _planner_leaks(self, pid: int, before: ProcessResources) -> list[str]:
        """Return what a planner still has once it has closed its connections to hosts that disappeared."""
        until = time.monotonic() + PLANNER_SETTLE_S
        while texts := list(find_leaks(before, ProcessResources.of(pid), pooled=POOLED_FILES)):
            if time.monotonic() >= until:
                break
            self._cluster.receive(PAUSE_S)
        return texts

    def _resource_snapshots(self, hosts: Iterable[str]) -> dict[str, ProcessResources]:
        responses = self._cluster.request(hosts, ChaosCommand("measure"))
        return {
            host: ProcessResources.of(self._cluster.nodes[host].process.pid, response.threads)
            for host, response in responses.items()
            if host in self._cluster.nodes
        }


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
            with disk.rate_limited_reads(command.disk_rate):
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
