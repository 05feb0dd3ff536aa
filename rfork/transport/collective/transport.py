"""The `nccl` and `gloo` transports: availability, export and connect."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rfork.addresses import own_address
from rfork.errors import SourceCorrupt, SourceTimeout, TransportUnavailable, VersionMismatch
from rfork.image.memory import Image
from rfork.settings import InstanceSettings
from rfork.thread_priority import SERVING_THREAD_NICE
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

if TYPE_CHECKING:  # imports torch.distributed, which some builds of torch lack
    from rfork.transport.collective.backend import Backend

WILDCARD_ADDRESSES = frozenset({"", "0.0.0.0", "::"})
NCCL_CONNECT_TIMEOUT_S = 50.0
"""`NcclBackend.form_timeout_s`, and the time in which the source collects a group's readers and reports a failure."""


class CollectiveTransport:
    """Two-sided transfers over process groups of one backend; created by `gloo_transport` or `nccl_transport`.

    `backend` is called only if `availability` allows it: it imports what some builds of torch lack.
    """

    one_sided = False

    def __init__(
        self,
        name: str,
        settings: InstanceSettings,
        availability: Callable[[], Availability],
        backend: Callable[[InstanceSettings], Backend],
        *,
        connect_timeout_s: float = 0.0,
    ) -> None:
        self.name = name
        self.connect_timeout_s = connect_timeout_s
        self._settings = settings
        self._availability = availability
        self._create_backend = backend

    def availability(self) -> Availability:
        """See `Transport.availability`."""
        return self._availability()

    def export(self, image: Image, gate: AccessGate) -> Exporter:
        """Source side; see `Transport.export`. Raises TransportUnavailable for an image on a device that the
        backend does not support.
        """
        from rfork.transport.collective.exporter import CollectiveExporter

        backend = self._backend()
        backend.device(image)
        idle_timeout_s = self._settings.source_idle_timeout_s
        return CollectiveExporter(image, gate, backend, idle_timeout_s=idle_timeout_s, nice=SERVING_THREAD_NICE)

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        open_control_stream: OpenControlStream = no_control_stream,
    ) -> Reader:
        """Target side; see `Transport.connect`. Raises VersionMismatch if the two libraries are incompatible."""
        from rfork.transport.collective.reader import CollectiveReader

        backend = self._backend()
        device = backend.device(image)
        source_version = endpoint.parameters.get("version", "")
        block_bytes = endpoint.parameters.get("block", "")
        if not backend.is_compatible(source_version):
            raise VersionMismatch(
                f"{self.name}: the source has version {source_version[:40] or 'none'}, here {backend.version()}",
                hint="run the same release of torch on both sides, or use another transport between them",
            )
        if not block_bytes.isdecimal() or not 0 < int(block_bytes) <= backend.block_bytes:
            raise SourceCorrupt(f"{self.name}: the source reports an invalid block size, {block_bytes[:40]!r} bytes")
        if time.monotonic() >= deadline:
            raise SourceTimeout(f"the deadline passed before connecting over {self.name}")
        reader = CollectiveReader(
            image,
            backend,
            device,
            token,
            open_control_stream(),
            block_bytes=int(block_bytes),
            idle_timeout_s=self._settings.source_idle_timeout_s,
        )
        try:
            reader.open(deadline)
        except BaseException:
            reader.close()
            raise
        return reader

    def _backend(self) -> Backend:
        availability = self.availability()
        if not availability.usable:
            raise TransportUnavailable(f"{self.name}: {availability.reason}", hint=availability.hint)
        return self._create_backend(self._settings)


def gloo_transport(settings: InstanceSettings) -> CollectiveTransport:
    """Host memory to host memory over TCP, for fleets that cannot use another transport.

    It shares its code with `nccl` and runs anywhere; `http` is faster and authenticates readers.
    """
    return CollectiveTransport("gloo", settings, _gloo_availability, _gloo_backend)


def nccl_transport(settings: InstanceSettings) -> CollectiveTransport:
    """GPU memory to GPU memory over NCCL: NVLink, InfiniBand, RoCE or TCP, whichever NCCL selects.

    NCCL transfers with kernels, so serving occupies some of the seed's multiprocessors and memory bandwidth,
    concurrently with its own kernels. No other transport does that.

    Uses one GPU per process, that of the image. Parts of the image in host memory go through a staging tensor
    on that GPU.
    """
    return CollectiveTransport(
        "nccl", settings, _nccl_availability, _nccl_backend, connect_timeout_s=NCCL_CONNECT_TIMEOUT_S
    )


def _gloo_availability() -> Availability:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return Availability(False, "this torch was built without gloo", "install a torch with gloo")
    if not sys.platform.startswith("linux"):
        return Availability(False, "needs Linux: a packet filter protects its ports")
    return Availability(True, "host memory over TCP; every process on a reader's host can connect")


def _gloo_backend(settings: InstanceSettings) -> Backend:
    from rfork.transport.collective.gloo import GlooBackend

    return GlooBackend(own_address() if settings.bind in WILDCARD_ADDRESSES else settings.bind)


def _nccl_availability() -> Availability:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return Availability(False, "this torch was built without NCCL", "install a torch for CUDA")
    if not torch.cuda.is_available():
        return Availability(False, "no CUDA device", "use http or gloo for weights in host memory")
    return Availability(True, "kernels on both GPUs; every client that can connect to its ports can join")


def _nccl_backend(settings: InstanceSettings) -> Backend:
    from rfork.transport.collective.nccl import NcclBackend

    return NcclBackend()
