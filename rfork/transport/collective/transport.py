"""The `nccl` and `gloo` transports: when they can run, and how both sides begin."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rfork.errors import SourceCorrupt, SourceTimeout, TransportUnavailable, VersionMismatch
from rfork.image.memory import Image
from rfork.settings import InstanceSettings, own_address
from rfork.transport.base import (
    AccessGate,
    Availability,
    Endpoint,
    Exporter,
    OpenControlStream,
    Reader,
    TokenSource,
    no_control_stream,
)

if TYPE_CHECKING:  # torch.distributed, which not every torch has, is imported when a group is wanted
    from rfork.transport.collective.group import Backend

WILDCARDS = frozenset({"", "0.0.0.0", "::"})


class GlooTransport:
    """Host memory to host memory, over TCP: for fleets whose only other way would be none at all.

    It is here because it is the same code as `nccl` and runs anywhere; `http` is faster and guarded.
    """

    name = "gloo"
    one_sided = False

    def __init__(self, settings: InstanceSettings) -> None:
        self._settings = settings

    def availability(self) -> Availability:
        """See `Transport.availability`."""
        if not _has_distributed() or not torch.distributed.is_gloo_available():
            return Availability(False, "this torch was built without gloo", "install a torch with gloo")
        if not sys.platform.startswith("linux"):
            return Availability(False, "needs Linux: its ports are shut by a packet filter")
        return Availability(True, "host memory, over TCP that every process on a reader's host may join")

    def export(self, image: Image, gate: AccessGate) -> Exporter:
        """Source side; see `Transport.export`. Raises TransportUnavailable for an image on a GPU."""
        return _export(self._settings, self._backend(), image, gate)

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        talk: OpenControlStream = no_control_stream,
    ) -> Reader:
        """Target side; see `Transport.connect`. Raises VersionMismatch where the two torches differ."""
        return _connect(self._settings, self._backend(), endpoint, image, token, deadline, talk)

    def _backend(self) -> Backend:
        _require(self.name, self.availability)
        from rfork.transport.collective.gloo import GlooBackend

        settings = self._settings
        return GlooBackend(own_address() if settings.bind in WILDCARDS else settings.bind)


class NcclTransport:
    """GPU memory to GPU memory by NCCL: over NVLink, InfiniBand, RoCE or TCP, whatever NCCL finds.

    NCCL moves bytes by kernels. So giving costs the seed's GPU some of its multiprocessors and memory
    bandwidth while it lasts, beside the kernels it serves with: the one transport that does.

    One GPU a process, that of the image. What a module keeps in host memory goes through the staging
    tensor on that GPU.
    """

    name = "nccl"
    one_sided = False

    def __init__(self, settings: InstanceSettings) -> None:
        self._settings = settings

    def availability(self) -> Availability:
        """See `Transport.availability`."""
        if not _has_distributed() or not torch.distributed.is_nccl_available():
            return Availability(False, "this torch was built without NCCL", "install a torch for CUDA")
        if not torch.cuda.is_available():
            return Availability(False, "no CUDA device", "use http or gloo for weights in host memory")
        return Availability(True, "by kernels on both GPUs; whoever reaches its ports may join")

    def export(self, image: Image, gate: AccessGate) -> Exporter:
        """Source side; see `Transport.export`. Raises TransportUnavailable for an image in host memory."""
        return _export(self._settings, self._backend(), image, gate)

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        talk: OpenControlStream = no_control_stream,
    ) -> Reader:
        """Target side; see `Transport.connect`. Raises VersionMismatch where NCCL's majors differ."""
        return _connect(self._settings, self._backend(), endpoint, image, token, deadline, talk)

    def _backend(self) -> Backend:
        _require(self.name, self.availability)
        from rfork.transport.collective.nccl import NcclBackend

        return NcclBackend()


def _has_distributed() -> bool:
    return torch.distributed.is_available()


def _require(name: str, availability: Callable[[], Availability]) -> None:
    available = availability()
    if not available.usable:
        raise TransportUnavailable(f"{name}: {available.reason}", hint=available.hint)


def _export(settings: InstanceSettings, backend: Backend, image: Image, gate: AccessGate) -> Exporter:
    from rfork.transport.collective.exporter import CollectiveExporter

    backend.device(image)
    return CollectiveExporter(
        image, gate, backend, stall_s=settings.source_idle_timeout_s, nice=settings.serving_thread_nice
    )


def _connect(
    settings: InstanceSettings,
    backend: Backend,
    endpoint: Endpoint,
    image: Image,
    token: TokenSource,
    deadline: float,
    talk: OpenControlStream,
) -> Reader:
    from rfork.transport.collective.reader import CollectiveReader

    device = backend.device(image)
    theirs, block = endpoint.parameters.get("version", ""), endpoint.parameters.get("block", "")
    if not backend.fits(theirs):
        raise VersionMismatch(
            f"{backend.name}: the source has version {theirs[:40] or 'none'}, here is {backend.version()}",
            hint="run one release of torch on both sides, or use another transport between them",
        )
    if not block.isdecimal() or not 0 < int(block) <= backend.block_bytes:
        raise SourceCorrupt(f"{backend.name}: the source says its blocks have {block[:40]!r} bytes")
    if time.monotonic() >= deadline:
        raise SourceTimeout(f"no time is left to connect over {backend.name}")
    reader = CollectiveReader(
        image, backend, device, token, talk(), block_bytes=int(block), stall_s=settings.source_idle_timeout_s
    )
    try:
        reader.open(deadline)
    except BaseException:
        reader.close()
        raise
    return reader
