"""The shared_memory transport's two sides, put together."""

from __future__ import annotations

import os
import threading
from weakref import WeakKeyDictionary

from rfork.errors import TransportUnusable
from rfork.image.memory import Image
from rfork.settings import Settings
from rfork.transport.base import Availability, Endpoint, Gate, Talk, TokenSource, silent
from rfork.transport.same_host.dialling import Connections
from rfork.transport.same_host.host import same_host_availability
from rfork.transport.shared_memory.exporter import NAME, SharedMemoryExporter
from rfork.transport.shared_memory.reader import SharedMemoryReader
from rfork.transport.shared_memory.sealed import memory_file
from rfork.transport.shared_memory.shelf import Shelf


class SharedMemoryTransport:
    """`Transport` by memory files whose descriptors go over a Unix socket.

    Endpoint parameters: those of `LocalServer`. A relay gives the chunks that it received onwards where it
    exports, by this object, the very image that it reads into.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._shelves: WeakKeyDictionary[Image, Shelf] = WeakKeyDictionary()

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
        way = "mapped, copy on write" if self._settings.shared_memory == "map" else "copied"
        return Availability(True, f"memory of processes of this host, {way}")

    def export(self, image: Image, gate: Gate) -> SharedMemoryExporter:
        """Source side: serve `image` until the exporter is closed.

        Raises TransportUnusable for an image that is not in host memory alone, and SettingsError.
        """
        _check(image)
        return SharedMemoryExporter(image, gate, self._shelf_of(image), self._settings)

    def connect(
        self, endpoint: Endpoint, image: Image, token: TokenSource, deadline: float, talk: Talk = silent
    ) -> SharedMemoryReader:
        """Target side. Raises NotOneHost where the two share too little, TransportUnusable, or as `read`."""
        _check(image)
        settings = self._settings
        connections = Connections(endpoint.parameters, settings.stall_s, folder=settings.local_sockets)
        connections.open(deadline)
        maps = settings.shared_memory == "map"
        return SharedMemoryReader(
            connections, image, token, self._shelf_of(image), maps=maps, stall_s=settings.stall_s
        )

    def _shelf_of(self, image: Image) -> Shelf:
        with self._lock:
            return self._shelves.setdefault(image, Shelf())


def _check(image: Image) -> None:
    if devices := sorted({device.type for device in image.devices} - {"cpu"}):
        raise TransportUnusable(f"shared_memory is for weights in host memory, not on {', '.join(devices)}")
