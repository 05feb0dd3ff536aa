"""The shared_memory transport's two sides, put together."""

from __future__ import annotations

import os
import threading
from weakref import WeakKeyDictionary

from rfork.errors import TransportUnavailable
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
from rfork.transport.shared_memory.chunk_cache import SealedChunkCache
from rfork.transport.shared_memory.exporter import NAME, SharedMemoryExporter
from rfork.transport.shared_memory.memfd import memory_file
from rfork.transport.shared_memory.reader import SharedMemoryReader
from rfork.transport.unix_socket.client import ConnectionPool
from rfork.transport.unix_socket.host_identity import same_host_availability


class SharedMemoryTransport:
    """`Transport` by memory files whose descriptors go over a Unix socket.

    Endpoint parameters: those of `LocalServer`. A relay gives the chunks that it received onwards where it
    exports, by this object, the very image that it reads into.
    """

    def __init__(self, settings: InstanceSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._chunk_caches: WeakKeyDictionary[Image, SealedChunkCache] = WeakKeyDictionary()

    @property
    def name(self) -> str:
        """The word used for it in settings, plans and reports."""
        return NAME

    @property
    def one_sided(self) -> bool:
        """The source hands each chunk over itself."""
        return False

    def availability(self) -> Availability:
        """Usable on Linux, where the kernel lets memory files be made and sealed."""
        found = same_host_availability()
        if not found.usable:
            return found
        if not hasattr(os, "memfd_create"):
            return Availability(False, "this Python knows no memory files (memfd_create)")
        try:
            memory_file()
        except OSError as error:
            return Availability(False, f"memory files cannot be made here: {error.strerror}")
        mode_text = "mapped, copy on write" if self._settings.shm_mode == "map" else "copied"
        return Availability(True, f"memory of processes of this host, {mode_text}")

    def export(self, image: Image, gate: AccessGate) -> SharedMemoryExporter:
        """Source side: serve `image` until the exporter is closed.

        Raises TransportUnavailable for an image that is not in host memory alone, and SettingsError.
        """
        _check(image)
        return SharedMemoryExporter(image, gate, self._chunk_cache_of(image), self._settings)

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        talk: OpenControlStream = no_control_stream,
    ) -> SharedMemoryReader:
        """Target side. Raises NotSameHost where the two share too little, TransportUnavailable, or as `read`."""
        _check(image)
        settings = self._settings
        connections = ConnectionPool(
            endpoint.parameters, settings.source_idle_timeout_s, folder=settings.unix_socket_dir
        )
        connections.open(deadline)
        maps = settings.shm_mode == "map"
        return SharedMemoryReader(
            connections,
            image,
            token,
            self._chunk_cache_of(image),
            maps=maps,
            stall_s=settings.source_idle_timeout_s,
        )

    def _chunk_cache_of(self, image: Image) -> SealedChunkCache:
        with self._lock:
            return self._chunk_caches.setdefault(image, SealedChunkCache())


def _check(image: Image) -> None:
    if devices := sorted({device.type for device in image.devices} - {"cpu"}):
        raise TransportUnavailable(f"shared_memory is for weights in host memory, not on {', '.join(devices)}")
