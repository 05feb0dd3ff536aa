"""One image of a holder: fetched from the sources that the planner assigns, then served until it is closed.

The fetch is a fork like an engine's, into plain tensors. While it runs, the image is a relay, and afterwards a seed.
Its chunks are moved to sealed memory files as they arrive, which engines on this host map.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Final, Literal
from uuid import uuid4

from rfork import settings as options
from rfork.errors import ForkCancelled, RforkError, SourceWeightsChanged, StorageError
from rfork.image.chunks import Chunks
from rfork.image.host_memory import separate_mappings
from rfork.image.layout import Layout, allocate_tensors
from rfork.logs import logger
from rfork.receiver.fallback import Fallback, snapshot_fallback
from rfork.receiver.session import TRANSIENT_EGRESS_SHARE, ForkOptions, ForkSession, Network, fetch_layout, module_of
from rfork.schema import HeldImage, InstanceReport, WantedImage
from rfork.settings import InstanceSettings, StorageSettings
from rfork.source.seed import InstanceIdentity, Seed
from rfork.transport.shared_memory import SharedMemoryTransport
from rfork.transport.shared_memory.image_sealer import ImageSealer

log = logger(__name__)

FETCH_DEADLINE_S: Final = 3600.0
"""Maximum time of one attempt: a prefetch waits while engines need its sources."""
LAYOUT_TIMEOUT_S: Final = 60.0
"""Maximum time to receive the layout from an instance that has it."""

_allocation = threading.Lock()
"""Acquired while tensors are allocated: the allocator's settings apply to all threads."""

State = Literal["fetching", "ready", "failed", "closed"]
LayoutOf = Callable[[WantedImage], Layout | None]
"""Returns the layout of an image in the settings' snapshot; None if it has no such image. Raises StorageError types."""


class ImageKeeper:
    """Fetches and serves one image. `on_change` is called on any thread after each change of `state`."""

    def __init__(
        self,
        wanted: WantedImage,
        holder_id: str,
        settings: InstanceSettings,
        on_change: Callable[[], None],
        *,
        device: str = "cpu",
        layout_of: LayoutOf | None = None,
        is_transient: bool = False,
    ) -> None:
        """`settings`: of this host, with the snapshot to read if no instance has the image. `is_transient`: the image
        is kept for the start of one engine, so the planner prefers other sources.
        """
        self.wanted = wanted
        self.began_at = time.monotonic()
        self.failure = ""
        """Reason of the failure; empty without one."""
        self._holder_id = holder_id
        self._settings = settings
        self._on_change = on_change
        self._device = device
        self._layout_of = layout_of
        self._egress_share = TRANSIENT_EGRESS_SHARE if is_transient else 1.0
        self._instance_id = uuid4().hex
        self._lock = threading.Lock()
        self._state: State = "fetching"
        self._session: ForkSession | None = None
        self._seed: Seed | None = None
        self._sealer: ImageSealer | None = None
        self._thread = threading.Thread(target=self._run, name="rfork-fetch", daemon=True)

    def start(self) -> None:
        """Begin the fetch, on its own thread."""
        self._thread.start()

    @property
    def state(self) -> State:
        """Stage of its life: fetching, then ready or failed, then closed."""
        return self._state

    @property
    def used_at(self) -> float:
        """When a reader last opened the image, or else when the fetch began, on `time.monotonic()`'s clock."""
        seed = self._seed
        if seed is None:
            return self.began_at
        return time.monotonic() if seed.has_readers else seed.opened_at or self.began_at

    @property
    def used_on_host(self) -> bool:
        """True if a reader has read it over a same-host transport."""
        return self._seed is not None and self._seed.read_on_host

    @property
    def has_readers(self) -> bool:
        """True if a fork reads from it."""
        return self._seed is not None and self._seed.has_readers

    def report(self) -> HeldImage:
        """Return its state for the planner."""
        wanted = self.wanted
        return HeldImage(
            instance_id=self._instance_id,
            model=wanted.model,
            version=wanted.version,
            rank=wanted.rank,
            layout_id=wanted.layout_id,
            image_bytes=wanted.image_bytes,
            state="ready" if self._state == "ready" else "fetching",
            idle_s=max(0.0, time.monotonic() - self.used_at),
            used=self.used_on_host,
        )

    def close(self, drain_s: float = 0.0) -> None:
        """Cancel the fetch, or drain the readers for at most `drain_s` seconds, and release the memory."""
        with self._lock:
            if self._state == "closed":
                return
            fetching, self._state = self._state == "fetching", "closed"
            session, seed = self._session, self._seed
        if fetching and session is not None:
            session.cancel()
        if self._thread.ident is not None:
            self._thread.join()
        if self._sealer is not None:
            self._sealer.close()
        if not fetching and seed is not None:
            seed.close(drain_s)
        self._seed = self._session = self._sealer = None
        # Their objects refer to each other, so the memory would be kept until Python happens to collect them.
        del session, seed
        gc.collect()
        self._on_change()

    def _run(self) -> None:
        try:
            seed = self._fetch()
        except ForkCancelled:
            return
        except RforkError as error:
            self._fail(str(error))
            log.warning("image not fetched", **self._names, reason=str(error), hint=error.hint)
        except Exception as error:  # a bug in one fetch must not end the holder
            self._fail(f"{type(error).__name__}: {error}")
            log.exception("image not fetched", **self._names)
        else:
            with self._lock:
                closed = self._state == "closed"
                if not closed:
                    self._seed, self._session, self._state = seed, None, "ready"
            if closed:
                seed.close()
        self._on_change()

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._session = self._seed = None
            self.failure = reason
            if self._state != "closed":
                self._state = "failed"

    def _fetch(self) -> Seed:
        wanted, settings = self.wanted, self._settings
        log.info("image requested", **self._names, gigabytes=round(wanted.image_bytes / 1e9, 3), reason=wanted.reason)
        network = Network.of(settings)
        layout = self._snapshot_layout()
        fallbacks = self._fallbacks() if layout is not None else []
        if layout is None:
            sample = self._sample_instance(tuple(each.name for each in network.transports))
            layout = fetch_layout(sample, settings, time.monotonic() + LAYOUT_TIMEOUT_S)
        identity = InstanceIdentity(
            wanted.model,
            wanted.rank,
            self._instance_id,
            version=wanted.version,
            replica=f"hold-{self._instance_id[:12]}",
            egress_share=self._egress_share,
            holder=self._holder_id,
        )
        shared_memory = next((each for each in network.transports if isinstance(each, SharedMemoryTransport)), None)

        def on_started(seed: Seed) -> None:
            with self._lock:
                self._seed = seed
            if shared_memory is not None and self._device == "cpu":
                self._sealer = shared_memory.sealer(seed, seed.chunk_state)
                self._sealer.start()

        with _allocation, separate_mappings():
            tensors = allocate_tensors(layout, self._device)
        session = ForkSession(
            module_of(tensors),
            identity,
            settings.model_copy(update={"deadline_s": max(FETCH_DEADLINE_S, settings.deadline_s)}),
            network,
            ForkOptions(fallbacks=fallbacks, like=layout, on_started=on_started),
        )
        with self._lock:
            if self._state == "closed":
                raise ForkCancelled("the image is no longer wanted")
            self._session = session
        try:
            report = session.run()
            seed = report.seed
            if seed is None or seed.manifest is None:
                if seed is not None:
                    seed.close()
                raise SourceWeightsChanged(f"the weights of {wanted.model} changed during the fetch")
        except BaseException:
            if self._sealer is not None:
                self._sealer.close()
                self._sealer = None
            raise
        log.info("image ready", **self._names, report=report.line())
        return seed

    def _snapshot_layout(self) -> Layout | None:
        """Return the layout of the image if the snapshot contains it and can be read."""
        if self._layout_of is None:
            return None
        try:
            return self._layout_of(self.wanted)
        except StorageError as error:
            log.warning("snapshot not read", **self._names, reason=str(error), hint=error.hint)
            return None

    def _fallbacks(self) -> list[Fallback]:
        if self._settings.snapshot is None:
            return []
        wanted, storage = self.wanted, options.load(StorageSettings)
        return [snapshot_fallback(self._settings.snapshot, (), wanted.rank, storage, wanted.version)]

    @property
    def _names(self) -> dict[str, object]:
        wanted = self.wanted
        return {"model": wanted.model, "version": wanted.version, "rank": wanted.rank.key}

    def _sample_instance(self, transports: tuple[str, ...]) -> InstanceReport:
        """Return a report with what identifies the image, for the request for its layout."""
        wanted = self.wanted
        return InstanceReport(
            instance_id=self._instance_id,
            model=wanted.model,
            version=wanted.version,
            rank=wanted.rank,
            layout_id=wanted.layout_id,
            image_bytes=wanted.image_bytes,
            chunk_count=len(Chunks.of(wanted.image_bytes)),
            state="loading",
            address="none:0",
            transports=transports,
            placement=self._settings.placement,
            holder=self._holder_id,
        )
