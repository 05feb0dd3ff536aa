"""The `nccl` and `gloo` transports: availability, export and connect."""

from __future__ import annotations

import sys
import time
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
    Transport,
    no_control_stream,
)

if TYPE_CHECKING:  # imports torch.distributed, which some builds of torch lack
    from rfork.transport.collective.group import Backend

WILDCARD_ADDRESSES = frozenset({"", "0.0.0.0", "::"})


class GlooTransport:
    """Host memory to host memory over TCP, for fleets that cannot use another transport.

    It shares its code with `nccl` and runs anywhere; `http` is faster and authenticates readers.
    """

    name = "gloo"
    one_sided = False

    def __init__(self, settings: InstanceSettings) -> None:
        self._settings = settings

    def availability(self) -> Availability:
        """See `Transport.availability`."""
        if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
            return Availability(False, "this torch was built without gloo", "install a torch with gloo")
        if not sys.platform.startswith("linux"):
            return Availability(False, "needs Linux: a packet filter protects its ports")
        return Availability(True, "host memory over TCP; every process on a reader's host can connect")

    def export(self, image: Image, gate: AccessGate) -> Exporter:
        """Source side; see `Transport.export`. Raises TransportUnavailable for an image on a GPU."""
        return _export(self._settings, self._backend(), image, gate)

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        open_control_stream: OpenControlStream = no_control_stream,
    ) -> Reader:
        """Target side; see `Transport.connect`. Raises VersionMismatch if the torch versions differ."""
        return _connect(self._settings, self._backend(), endpoint, image, token, deadline, open_control_stream)

    def _backend(self) -> Backend:
        _require_available(self)
        from rfork.transport.collective.gloo import GlooBackend

        settings = self._settings
        return GlooBackend(own_address() if settings.bind in WILDCARD_ADDRESSES else settings.bind)


class NcclTransport:
    """GPU memory to GPU memory over NCCL: NVLink, InfiniBand, RoCE or TCP, whichever NCCL selects.

    NCCL transfers with kernels, so serving occupies some of the seed's multiprocessors and memory bandwidth,
    concurrently with its own kernels. No other transport does that.

    Uses one GPU per process, that of the image. Parts of the image in host memory go through a staging tensor
    on that GPU.
    """

    name = "nccl"
    one_sided = False

    def __init__(self, settings: InstanceSettings) -> None:
        self._settings = settings

    def availability(self) -> Availability:
        """See `Transport.availability`."""
        if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
            return Availability(False, "this torch was built without NCCL", "install a torch for CUDA")
        if not torch.cuda.is_available():
            return Availability(False, "no CUDA device", "use http or gloo for weights in host memory")
        return Availability(True, "kernels on both GPUs; every client that can connect to its ports can join")

    def export(self, image: Image, gate: AccessGate) -> Exporter:
        """Source side; see `Transport.export`. Raises TransportUnavailable for an image in host memory."""
        return _export(self._settings, self._backend(), image, gate)

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        open_control_stream: OpenControlStream = no_control_stream,
    ) -> Reader:
        """Target side; see `Transport.connect`. Raises VersionMismatch if NCCL's versions are incompatible."""
        return _connect(self._settings, self._backend(), endpoint, image, token, deadline, open_control_stream)

    def _backend(self) -> Backend:
        _require_available(self)
        from rfork.transport.collective.nccl import NcclBackend

        return NcclBackend()


def _require_available(transport: Transport) -> None:
    availability = transport.availability()
    if not availability.usable:
        raise TransportUnavailable(f"{transport.name}: {availability.reason}", hint=availability.hint)


def _export(settings: InstanceSettings, backend: Backend, image: Image, gate: AccessGate) -> Exporter:
    from rfork.transport.collective.exporter import CollectiveExporter

    backend.device(image)
    return CollectiveExporter(
        image, gate, backend, idle_timeout_s=settings.source_idle_timeout_s, nice=SERVING_THREAD_NICE
    )


def _connect(
    settings: InstanceSettings,
    backend: Backend,
    endpoint: Endpoint,
    image: Image,
    token: TokenSource,
    deadline: float,
    open_control_stream: OpenControlStream,
) -> Reader:
    from rfork.transport.collective.reader import CollectiveReader

    device = backend.device(image)
    source_version = endpoint.parameters.get("version", "")
    block_bytes = endpoint.parameters.get("block", "")
    if not backend.is_compatible(source_version):
        raise VersionMismatch(
            f"{backend.name}: the source has version {source_version[:40] or 'none'}, here {backend.version()}",
            hint="run the same release of torch on both sides, or use another transport between them",
        )
    if not block_bytes.isdecimal() or not 0 < int(block_bytes) <= backend.block_bytes:
        raise SourceCorrupt(f"{backend.name}: the source reports an invalid block size, {block_bytes[:40]!r} bytes")
    if time.monotonic() >= deadline:
        raise SourceTimeout(f"the deadline passed before connecting over {backend.name}")
    reader = CollectiveReader(
        image,
        backend,
        device,
        token,
        open_control_stream(),
        block_bytes=int(block_bytes),
        idle_timeout_s=settings.source_idle_timeout_s,
    )
    try:
        reader.open(deadline)
    except BaseException:
        reader.close()
        raise
    return reader
