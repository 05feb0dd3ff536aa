"""Source process of `benchmarks.gpu.pull`, which serves its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch
from torch import nn

import rfork
from benchmarks.gpu.common import NOT_FOUND, error_text, module_of, synchronized
from benchmarks.pull.source import LOOPBACK, READY_TIMEOUT_S, process, settings_for
from rfork import logs
from rfork.errors import LeaseRejected, RforkError
from rfork.image.capture import capture
from rfork.image.memory import Image
from rfork.settings import InstanceSettings
from rfork.transport.base import Endpoint
from rfork.transport.selection import TRANSPORTS

Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
TOKEN = "benchmark"
FORK_ID = "benchmark"
BARE_TRANSPORTS = ("cuda_ipc", "shared_memory", "http")
"""Transports whose reads are also timed without a fork."""


@dataclass(frozen=True)
class GpuOffer:
    """Endpoints of one source process, by shape, and the reasons why other transports are unavailable."""

    transports: tuple[str, ...]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    endpoints: Mapping[str, Mapping[str, Endpoint]] = field(default_factory=dict)

    def unavailable_reason(self, transport: str) -> str:
        """Return why this transport is unavailable; "" if it is available."""
        if transport not in TRANSPORTS:
            return "this version of rfork has no such transport"
        return self.unavailable.get(transport, "")


class AllowAllGate:
    """Access gate without limits for readers with `TOKEN`; see `rfork.transport.base.AccessGate`."""

    def authorize(self, token: str, begin: int, end: int) -> str:
        """See `AccessGate.authorize`."""
        if token != TOKEN:
            raise LeaseRejected("not the benchmark's token")
        return FORK_ID

    @contextlib.contextmanager
    def read_guard(self, token: str, begin: int, end: int, abort: Callable[[], None]) -> Iterator[None]:
        """See `AccessGate.read_guard`."""
        self.authorize(token, begin, end)
        yield

    def acquire_bytes(self, max_bytes: int, fork_id: str) -> int:
        """See `AccessGate.acquire_bytes`."""
        return max_bytes

    def version_tag(self) -> str:
        """See `AccessGate.version_tag`."""
        return "benchmark"


def model_name(shape: str, transport: str, device: torch.device) -> str:
    """Return the model name under which the process on a device offers a shape over one transport."""
    return f"{shape}.{transport}@{device}"


@contextlib.contextmanager
def source_process(planner: str, shapes: Shapes, device: torch.device) -> Iterator[GpuOffer]:
    """Run a source process with its tensors on a device, for the block."""
    offer: GpuOffer
    with process(_source_main, planner, shapes, str(device)) as offer:
        yield offer


def usable_transports(settings: InstanceSettings) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the transports that can run on this machine, and why the others cannot."""
    names: list[str] = []
    unavailable: dict[str, str] = {}
    for name, create_transport in TRANSPORTS.items():
        availability = create_transport(settings).availability()
        if availability.usable:
            names.append(name)
        else:
            unavailable[name] = availability.reason
    return tuple(names), unavailable


def _source_main(ready: Connection, planner: str, shapes: Shapes, device_name: str) -> None:
    logs.configure(json=False, level="error")
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    names, unavailable = usable_transports(settings_for(planner, ("http",)))
    modules = {shape: module_of(tensors, device) for shape, tensors in shapes.items()}
    synchronized(device)
    with contextlib.ExitStack() as resources:
        for name in names:
            try:
                _start_seeds(modules, name, planner, device, resources)
            except NOT_FOUND as error:
                unavailable[name] = error_text(error)
        options = settings_for(planner, names)
        endpoints: dict[str, dict[str, Endpoint]] = {}
        for shape, module in modules.items():
            endpoints[shape] = _export_image(capture(module), options, names, unavailable, resources)
        ready.send(GpuOffer(names, unavailable, endpoints))
        with contextlib.suppress(EOFError):
            ready.recv()  # until the benchmark ends


def _start_seeds(
    modules: Mapping[str, nn.Module],
    transport: str,
    planner: str,
    device: torch.device,
    resources: contextlib.ExitStack,
) -> None:
    """Start a seed for each shape over one transport; a failure does not affect the others."""
    options = settings_for(planner, (transport,))
    for shape, module in modules.items():
        seed = rfork.seed(module, model=model_name(shape, transport, device), settings=options)
        if not resources.enter_context(seed).wait_registered(READY_TIMEOUT_S):
            raise RforkError("the planner did not respond to the seed")


def _export_image(
    image: Image,
    settings: InstanceSettings,
    names: tuple[str, ...],
    unavailable: dict[str, str],
    resources: contextlib.ExitStack,
) -> dict[str, Endpoint]:
    """Export one endpoint per bare transport; one that cannot serve this image is recorded as unavailable."""
    endpoints: dict[str, Endpoint] = {}
    for name in names:
        if name not in BARE_TRANSPORTS:
            continue
        try:
            exporter = TRANSPORTS[name](settings).export(image, AllowAllGate())
        except NOT_FOUND as error:
            unavailable[name] = error_text(error)
            continue
        resources.callback(exporter.close)
        exporter.authorize_peer(FORK_ID, LOOPBACK)
        endpoints[name] = exporter.endpoint()
    return endpoints
