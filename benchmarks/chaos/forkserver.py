"""Fork server of `benchmarks.chaos`: forks (as in the kernel) processes that have already imported
everything.

Importing torch takes seconds of CPU time, a fork takes milliseconds, so processes can be killed and replaced
in every round. The fork server starts no thread and opens no socket except the one to the cluster; each child
enters the network namespace of its host with `setns` before it opens any.

The fork server has its own mount namespace with a small disk for each node, which disappears with its last
process. Its children end when it ends.
"""

from __future__ import annotations

import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Final, NoReturn

import torch

# Forks import these when they first need them, and the growth of memory would be reported as a leak.
import rfork.storage.checkpoint
import rfork.storage.local
import rfork.storage.snapshots.snapshot  # noqa: F401
from benchmarks.chaos import node
from benchmarks.chaos.messages import SPAWN_ADAPTER, SpawnRequest
from benchmarks.fanout.node import connect
from planner.server import serve
from rfork import logs, settings
from rfork.settings import InstanceSettings, PlannerSettings

NAMESPACES: Final = Path("/run/netns")
CLONE_NEWNS: Final = 0x00020000
CLONE_NEWNET: Final = 0x40000000
MS_REC: Final = 0x4000
MS_SLAVE: Final = 1 << 19
PR_SET_PDEATHSIG: Final = 1
DISK: Final = 96 << 20
"""Bytes of each node's disk."""
REAP_S: Final = 0.5
M_ARENA_MAX: Final = -8

_kernel = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Fork processes until the connection closes. Arguments: the cluster's socket, folder of the disks,
    hosts.
    """
    path, folder, *hosts = sys.argv[1:]
    torch.set_num_threads(1)  # the hosts of a lab share the cores of one machine
    # Each of glibc's sixteen heaps keeps a few free megabytes, which would hide a leak, or look like one.
    _kernel.mallopt(M_ARENA_MAX, 1)
    _own_mounts()
    for host in hosts:
        _mount_disk(Path(folder) / host)
    gc.collect()
    gc.freeze()  # pages shared with the children stay shared
    connection = connect(path, "forkserver")
    children: set[int] = set()
    try:
        _serve(connection, path, children)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def _serve(connection: socket.socket, path: str, children: set[int]) -> None:
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while True:
            ready = selector.select(REAP_S)
            _reap(children)
            if not ready:
                continue
            received = connection.recv(1 << 16)
            if not received:
                return
            *spawn_requests, pending = (pending + received).split(b"\n")
            for text in spawn_requests:
                spawn_request = SPAWN_ADAPTER.validate_json(text)
                pid = os.fork()
                if not pid:
                    selector.close()
                    connection.close()
                    _run_child(spawn_request, path)
                children.add(pid)
                connection.sendall(f"{pid}\n".encode())


def _reap(children: set[int]) -> None:
    for pid in list(children):
        if os.waitpid(pid, os.WNOHANG)[0]:
            children.discard(pid)


def _run_child(spawn_request: SpawnRequest, path: str) -> NoReturn:
    """Run a child process from start to end."""
    code = 1
    try:
        _kernel.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        output = os.open(spawn_request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.update(spawn_request.environment)
        _enter(spawn_request.namespace)
        logs.configure(json=False, level=settings.load(InstanceSettings).log_level)
        match spawn_request.process_type:
            case "node":
                node.main(path, spawn_request.name)
            case "planner":
                serve(settings.load(PlannerSettings))
        code = 0
    except BaseException:  # last line of a process: its log shows why it ended
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _enter(namespace: str) -> None:
    """Move this process, which has no socket yet, into a network namespace."""
    descriptor = os.open(NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_kernel.setns(descriptor, CLONE_NEWNET), f"setns {namespace}")
    finally:
        os.close(descriptor)


def _own_mounts() -> None:
    _check(_kernel.unshare(CLONE_NEWNS), "unshare")
    _check(_kernel.mount(None, b"/", None, MS_REC | MS_SLAVE, None), "mount /")


def _mount_disk(folder: Path) -> None:
    folder.mkdir()
    _check(
        _kernel.mount(b"rfork-chaos", str(folder).encode(), b"tmpfs", 0, f"size={DISK}".encode()),
        f"mount {folder}",
    )


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
