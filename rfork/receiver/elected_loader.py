"""Runs a loader that fills the complete image in place of a transfer.

Runs on the target, on the caller's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rfork.errors import RforkError
from rfork.image.chunk_state import ChunkState
from rfork.image.manifest import Manifest
from rfork.logs import logger
from rfork.receiver.active_sources import ActiveSources
from rfork.receiver.chunk_scheduler import ChunkScheduler
from rfork.receiver.chunk_verifier import ChunkVerifier, ServingState
from rfork.receiver.loader_liveness import LoaderLiveness
from rfork.schema import StorageAssignment
from rfork.storage.base import storage_name

log = logger(__name__)

POLL_INTERVAL_S = 0.25

RunLoader = Callable[[StorageAssignment], Manifest]
"""Fills the image with a loader that this instance offered; raises RforkError if that fails."""


class ElectedLoader:
    """Runs the loader that the planner elected this instance for; the loader writes every byte."""

    def __init__(
        self,
        chunk_state: ChunkState,
        scheduler: ChunkScheduler,
        verifier: ChunkVerifier,
        sources: ActiveSources,
        serving_state: ServingState,
        run_loader: RunLoader,
        changed: threading.Condition,
        identity: tuple[str, str],
    ) -> None:
        """`changed` is the transfer's condition variable; `identity` is this instance's id and host."""
        self.bytes_read = 0
        """Bytes that the loader wrote."""
        self._chunk_state = chunk_state
        self._scheduler = scheduler
        self._verifier = verifier
        self._sources = sources
        self._serving_state = serving_state
        self._run_loader = run_loader
        self._changed = changed
        self._identity = identity

    def load(self, read: StorageAssignment) -> None:
        """Fill the image, or record the fault for the planner. No other thread writes meanwhile."""
        name, size = storage_name(read.kind, read.uri), self._chunk_state.chunks.image_bytes
        instance_id, host = self._identity
        log.info("loading for all waiting instances", storage=name)
        with self._changed:
            self._sources.close_all()
            retired = self._sources.pop_retired()
        for source in retired:
            source.close()
        with self._changed:
            while self._scheduler.in_flight:
                self._changed.wait(POLL_INTERVAL_S)
            self._verifier.invalidate_all("a loader overwrites them")
            self._serving_state.report_storage_activity(LoaderLiveness().last_activity)
        try:
            manifest = self._run_loader(read)
        except RforkError as error:
            with self._changed:
                self._sources.fail_storage(name, instance_id, error)
            return
        finally:
            self._serving_state.report_storage_activity(None)
        with self._changed:
            self._verifier.set_manifest(manifest)
            for chunk, digest in enumerate(manifest.digests):
                self._chunk_state.mark_verified(chunk, digest)
            self._scheduler.mark_all_verified()
            self.bytes_read += size
            self._sources.record_verified(name, host, read.kind, len(self._chunk_state.chunks), size)
