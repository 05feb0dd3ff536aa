"""The shared_memory transport: availability, export and connect."""

from __future__ import annotations

import os
import threading
from weakref import WeakKeyDictionary

from rfork.errors import TransportUnavailable
from rfork.image.chunks import ChunkState
from rfork.image.memory import Image
from rfork.settings import InstanceSettings
from rfork.transport.base import (
    AccessGate,
    Availability,
    Endpoint,
    OpenControlStream,
    TokenSource,
    no_control_stream,
)
from rfork.transport.same_host.client import ConnectionPool
from rfork.transport.same_host.host_identity import same_host_availability
from rfork.transport.same_host.memory_file import memory_file
from rfork.transport.shared_memory.exporter import NAME, SharedMemoryExporter
from rfork.transport.shared_memory.image_sealer import ImageSealer, SealableSource
from rfork.transport.shared_memory.reader import SharedMemoryReader
from rfork.transport.shared_memory.sealed_chunk import SealedChunkCache


class SharedMemoryTransport:
    """`Transport` over memory files whose descriptors are passed through a Unix socket.

    Endpoint parameters: those of `LocalServer`. A relay serves the chunks that it received if one object of
    this class both exports and fills the image.
    """

    connect_timeout_s = 0.0

    def __init__(self, settings: InstanceSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._chunk_caches: WeakKeyDictionary[Image, SealedChunkCache] = WeakKeyDictionary()

    @property
    def name(self) -> str:
        """Name in settings, plans and reports."""
        return NAME

    @property
    def one_sided(self) -> bool:
        """False: the source sends each chunk."""
        return False

    def availability(self) -> Availability:
        """Available on Linux if memory files can be created and sealed."""
        availability = same_host_availability()
        if not availability.usable:
            return availability
        if not hasattr(os, "memfd_create"):
            return Availability(False, "this Python does not support memory files (memfd_create)")
        try:
            memory_file()
        except OSError as error:
            return Availability(False, f"cannot create memory files: {error.strerror}")
        mode_text = "mapped copy-on-write" if self._settings.shm_mode == "map" else "copied"
        return Availability(True, f"memory shared by processes of this host, {mode_text}")

    def export(self, image: Image, gate: AccessGate) -> SharedMemoryExporter:
        """Source side: serve `image` until the exporter is closed.

        Raises TransportUnavailable for an image that is not entirely in host memory, and SettingsError.
        """
        _check(image)
        return SharedMemoryExporter(image, gate, self._chunk_cache_of(image), self._settings)

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        open_control_stream: OpenControlStream = no_control_stream,
    ) -> SharedMemoryReader:
        """Target side. Raises NotSameHost, TransportUnavailable, or as `Reader.read`."""
        _check(image)
        settings = self._settings
        connections = ConnectionPool(
            endpoint.parameters, settings.source_idle_timeout_s, folder=settings.unix_socket_dir
        )
        connections.open(deadline)
        maps = settings.shm_mode == "map"
        return SharedMemoryReader(connections, image, token, self._chunk_cache_of(image), maps=maps)

    def sealer(self, source: SealableSource, chunk_state: ChunkState) -> ImageSealer:
        """Return a sealer of the source's image, which this object exports."""
        return ImageSealer(source, chunk_state, self._chunk_cache_of(source.image))

    def _chunk_cache_of(self, image: Image) -> SealedChunkCache:
        with self._lock:
            return self._chunk_caches.setdefault(image, SealedChunkCache())


def _check(image: Image) -> None:
    if devices := sorted({device.type for device in image.devices} - {"cpu"}):
        raise TransportUnavailable(f"shared_memory needs weights in host memory, not on {', '.join(devices)}")
