"""Source and planner processes of `benchmarks.pull`.

The source process offers the same tensors in three forms: as rfork's own seeds, over bare sockets, and
through a plain Mooncake engine without rfork.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, cast

import torch
from torch import nn

import rfork
from benchmarks import shapes
from benchmarks.pull.first_call import MODEL as FIRST_CALL_MODEL
from rfork import logs, settings
from rfork.errors import RforkError
from rfork.image.capture import capture
from rfork.image.memory import Image
from rfork.image.registration import regions_to_register as registered_areas
from rfork.net.stream import MAX_VIEWS
from rfork.settings import InstanceSettings, PlannerSettings
from rfork.transport.mooncake.library import library_state
from rfork.transport.nixl.library import library_state as nixl_state
from rfork.transport.selection import TRANSPORTS

IN_FLIGHT = 4
"""Connections, or reads in flight, of every contender; rfork's `window`."""
REQUEST_BYTES = 64
"""Size of a request to the bare socket server: image and part, padded with spaces."""
SAME_HOST_TRANSPORTS = ("shared_memory", "gloo")
READY_TIMEOUT_S = 120.0
LOOPBACK = "127.0.0.1"
MODULES: Mapping[str, Callable[[bool], nn.Module]] = {"dense": shapes.dense, "small": shapes.small_tensors}

MemoryArea = tuple[int, int]
"""Address and length, in bytes, of one tensor."""


class PlainEngine(Protocol):
    """The methods of `mooncake.engine.TransferEngine` that are used here."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        """Start it; 0 means success."""
        ...

    def get_rpc_port(self) -> int:
        """Return the port of its session."""
        ...

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        """Let peers read these areas; 0 means success."""
        ...

    def batch_transfer_sync_read(self, session: str, local: list[int], remote: list[int], lengths: list[int]) -> int:
        """Read everything and return; 0 means success."""
        ...

    def batch_transfer_async_read(self, session: str, local: list[int], remote: list[int], lengths: list[int]) -> int:
        """Start reading; returns the batch's number."""
        ...

    def transfer_check_status(self, batch: int) -> int:
        """Return 1: done; 0: running; less: failed."""
        ...


@dataclass(frozen=True, slots=True)
class PullOffer:
    """Offer of the source process besides rfork: socket port, Mooncake session, each tensor's address."""

    port: int
    session: str
    areas: Mapping[str, Sequence[MemoryArea]]


def settings_for(
    planner: str, transports: Sequence[str], *, verify: bool = True, shared_memory: str | None = None
) -> InstanceSettings:
    """Return rfork's settings, the same on both sides."""
    return settings.load(
        InstanceSettings,
        planner=planner,
        transports=tuple(transports),
        verify_chunks=verify,
        max_inflight_chunks=IN_FLIGHT,
        bind=LOOPBACK,
        allow_unauthenticated_tcp=True,
        shm_mode=shared_memory,
    )


def transports() -> tuple[str, ...]:
    """Return rfork's transports that can run here."""
    errors = {"transfer_engine": library_state().error, "nixl": nixl_state().error}
    return ("http", *(name for name, error in errors.items() if not error))


def same_host_transports() -> tuple[str, ...]:
    """Return rfork's other transports that can run here, to which no other contender compares."""
    options = settings_for("", ("http",))
    return tuple(name for name in SAME_HOST_TRANSPORTS if TRANSPORTS[name](options).availability().usable)


def plain_engine() -> PlainEngine:
    """Return a TransferEngine over TCP, started as its own users start one. Raises RforkError."""
    engine = cast(PlainEngine, importlib.import_module("mooncake.engine").TransferEngine())
    if engine.initialize(LOOPBACK, "P2PHANDSHAKE", "tcp", "") != 0:
        raise RforkError("Mooncake did not start over TCP")
    return engine


def areas_of(module: nn.Module) -> list[MemoryArea]:
    """Return the address of each tensor of the module, in the same order in every process."""
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in shapes.tensors_of(module)]


def part_of(image: Image, part: int) -> tuple[int, int]:
    """Return the image range that socket connection number `part` carries."""
    size = image.layout.image_bytes
    return size * part // IN_FLIGHT, size * (part + 1) // IN_FLIGHT


@contextlib.contextmanager
def source_process(quick: bool) -> Iterator[tuple[str, PullOffer]]:
    """Run a planner and a source process for the block; yields the planner's URL and the offer."""
    with contextlib.ExitStack() as processes:
        url: str = processes.enter_context(process(planner_main))
        offer: PullOffer = processes.enter_context(process(_source_main, url, quick))
        yield url, offer


@contextlib.contextmanager
def process(main: Callable[..., None], *arguments: object) -> Iterator[Any]:
    """Run `main(connection, *arguments)` in a fresh process; yields the first thing it sends."""
    context = multiprocessing.get_context("spawn")
    parent_pipe, child_pipe = context.Pipe()
    process = context.Process(target=main, args=(child_pipe, *arguments), daemon=True)
    process.start()
    child_pipe.close()  # so that its death ends our read
    try:
        if not parent_pipe.poll(READY_TIMEOUT_S):
            raise RforkError(f"{main.__name__} was not ready within {READY_TIMEOUT_S:g} s")
        yield parent_pipe.recv()
    except EOFError:
        raise RforkError(f"{main.__name__} ended before it was ready") from None
    finally:
        process.terminate()
        process.join()


def planner_main(ready: Connection) -> None:
    """Run the planner: sends its URL once it serves."""
    from planner.server import serve

    logs.configure(json=False, level="warning")
    serve(settings.load(PlannerSettings, bind=LOOPBACK, port=0), ready.send)


def _source_main(ready: Connection, planner: str, quick: bool) -> None:
    logs.configure(json=False, level="warning")
    torch.set_num_threads(1)
    modules = {name: make(quick) for name, make in MODULES.items()}
    images = {name: capture(module) for name, module in modules.items()}
    session = ""
    if "transfer_engine" in transports():
        engine = plain_engine()
        for image in images.values():
            # Registered individually, 20,000 tensors would exceed the engine's limit of about 12,000 regions.
            addresses, lengths = zip(*registered_areas(image), strict=True)
            if engine.batch_register_memory(list(addresses), list(lengths)) != 0:
                raise RforkError("Mooncake could not register the tensors")
        session = f"{LOOPBACK}:{engine.get_rpc_port()}"
    options = settings_for(planner, (*transports(), *same_host_transports()))
    with contextlib.ExitStack() as seeds, socket.create_server((LOOPBACK, 0)) as listener:
        for name, module in modules.items():
            seed = seeds.enter_context(rfork.seed(module, model=name, settings=options))
            if not seed.wait_registered(READY_TIMEOUT_S):
                raise RforkError("the planner did not respond to the seed")
        seeds.enter_context(rfork.seed(shapes.tiny(), model=FIRST_CALL_MODEL, settings=options))
        areas = {name: areas_of(module) for name, module in modules.items()}
        ready.send(PullOffer(listener.getsockname()[1], session, areas))
        while True:
            connected, _ = listener.accept()
            threading.Thread(target=_serve_requests, args=(connected, images), daemon=True).start()


def _serve_requests(connected: socket.socket, images: Mapping[str, Image]) -> None:
    """Serve bare sockets: for each request, send the bytes of one part from the tensors' memory."""
    with connected:
        while request := connected.recv(REQUEST_BYTES, socket.MSG_WAITALL):
            name, part = request.decode().split()
            with images[name].readable(*part_of(images[name], int(part))) as views:
                transfer_views(views, connected.sendmsg)


def transfer_views(views: Sequence[memoryview], call: Callable[[list[memoryview]], int]) -> None:
    """Transfer all views with as few system calls as IOV_MAX allows; `call` returns the number of bytes."""
    waiting = list(views)[::-1]
    while waiting:
        window = waiting[-MAX_VIEWS:][::-1]
        transferred = call(window)
        if transferred == 0:
            raise RforkError("the bare socket closed too early")
        while waiting and transferred >= len(waiting[-1]):
            transferred -= len(waiting.pop())
        if transferred:
            waiting[-1] = waiting[-1][transferred:]
