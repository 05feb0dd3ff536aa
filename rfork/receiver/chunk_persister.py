"""Copies what a fork has verified to a spool, for a process that dies and comes back. Runs on the target.

On threads of its own, from where the chunks lie: there is no queue, as the image itself holds what is
not written yet. The writer gives way to all else, and with a disk that is slower than the network, or on
cores that the fork needs itself, it falls behind. Nothing here fails or
holds up a fork: it goes on without, and one line says why; what hangs is left behind.
"""

from __future__ import annotations

import errno
import hashlib
import re
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Self

from rfork.errors import StorageError
from rfork.image.chunk_state import ChunkState
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.source.seed import InstanceIdentity
from rfork.storage.spool import Spool
from rfork.storage.spool_lock import acquire_spool
from rfork.thread_priority import lower_thread_priority

log = logger(__name__)

BLOCK_BYTES: Final = 4 * MIB
"""One write: between two of them the writer can be stopped."""
FLUSH_TIMEOUT_S: Final = 1.0
"""Most seconds that a fork waits for a spool: to be opened, to stop, to be removed."""
WRITER_NICE: Final = 19
"""The writer's niceness: it has what the fork, and whatever else runs here, leaves of the cores."""
DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def spool_name(identity: InstanceIdentity) -> str:
    """The name that the spools of one rank of one model have: part of it for people, part of it unique."""
    rank = identity.rank
    identity_text = f"{rank.key}-dp{rank.dp}\n{identity.model}"
    readable = re.sub(r"[^A-Za-z0-9._]+", "-", identity.model)[-64:].strip("-.")
    return f"rfork-{readable}-{hashlib.sha256(identity_text.encode()).hexdigest()[:16]}"


class ChunkPersister:
    """Keeps verified chunks of one fork in a spool under `folder`; without a folder it does nothing."""

    def __init__(self, folder: Path | None, identity: InstanceIdentity, image: Image, chunk_state: ChunkState) -> None:
        self._folder = folder
        self._name = spool_name(identity)
        self._image = image
        self._chunk_state = chunk_state
        self._changed = threading.Condition()
        self._wakeups: SimpleQueue[None] = SimpleQueue()  # whoever marks a chunk never waits for the writer
        self._spool: Spool | None = None
        self._opened = self._ended = folder is None
        self._reading = self._writes = self._halted = self._closing = False
        self._remove = False

    def start(self) -> Self:
        """Begin to open the spool, and to write what the board holds."""
        if self._folder is not None:
            threading.Thread(target=self._run, name="rfork-spool", daemon=True).start()
        return self

    @property
    def spool(self) -> Spool | None:
        """The spool, with what was in it; None where there is none, or where it is not open in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._opened, FLUSH_TIMEOUT_S)
            return self._spool

    def pause(self) -> None:
        """The image is about to hold other bytes: none of them is written, or recorded."""
        with self._changed:
            self._halted = True
            self._wakeups.put(None)
            self._changed.wait_for(lambda: not self._reading, FLUSH_TIMEOUT_S)

    def close(self, *, remove: bool) -> None:
        """Write nothing more, and leave the spool to whoever comes back, or remove it."""
        with self._changed:
            self._halted = self._closing = True
            self._remove = remove
            self._wakeups.put(None)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._ended, FLUSH_TIMEOUT_S):
                log.warning("the resume folder does not answer", folder=str(self._folder))

    # -- its threads ------------------------------------------------------------------------------

    def _run(self) -> None:
        spool: Spool | None = None
        try:
            spool = self._open()
            self._writes = True
            threading.Thread(target=self._write, args=(spool,), name="rfork-keep", daemon=True).start()
        except StorageError as error:
            log.warning("nothing is kept for a resume", reason=str(error))
        except Exception:  # a bug, or no thread to be had: it must not end the fork
            self._writes = False
            log.exception("nothing is kept for a resume")
        with self._changed:
            self._spool = spool
            self._opened = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closing and (self._remove or not self._writes))
        if spool is not None and self._remove:
            self._disable(spool)
        elif spool is not None:
            spool.close()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if spool is not None:
            lower_thread_priority(WRITER_NICE)
            spool.close()  # of a removed file the kernel frees every page now, and nobody waits for it

    def _open(self) -> Spool:
        if self._folder is None:
            raise StorageError("there is no folder")
        return acquire_spool(self._folder, self._name, self._image.layout)

    def _write(self, spool: Spool) -> None:
        stop = self._chunk_state.subscribe(lambda: self._wakeups.put(None))
        try:
            lower_thread_priority(WRITER_NICE)
            if not spool.has_space():
                raise OSError(errno.ENOSPC, f"{spool.path}: there is no room for the image")
            self._wakeups.put(None)
            while self._wait():
                verified_digests, kept = self._chunk_state.digests, spool.records
                for chunk in sorted(chunk for chunk in verified_digests if kept.get(chunk) != verified_digests[chunk]):
                    self._persist(spool, chunk, verified_digests[chunk])
        except OSError as error:
            if error.errno is not None:  # else the fork is over, and the spool closed
                log.warning("nothing more is kept for a resume", reason=str(error))
            if error.errno in DISK_FULL_ERRNOS:
                self._disable(spool)  # a full disk hurts others more than it is worth
        except Exception:  # a bug, or a device that failed: it must not end the fork
            log.exception("nothing more is kept for a resume")
        finally:
            stop()
            with self._changed:
                self._reading = self._writes = False
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait until the board has changed; False once nothing is to be written any more."""
        self._wakeups.get()
        while not self._wakeups.empty():
            self._wakeups.get()
        return not self._halted

    def _persist(self, spool: Spool, chunk: int, digest: bytes) -> None:
        """Write one chunk, unless the image is about to change before it is done."""
        spool.erase(chunk)
        begin, end = self._image.layout.chunks[chunk]
        for at in range(begin, end, BLOCK_BYTES):
            if not self._poll():
                return
            with self._image.readable(at, min(at + BLOCK_BYTES, end)) as views:
                spool.write(at, views)
        if self._poll() and self._chunk_state.digests.get(chunk) == digest:
            spool.record(chunk, digest)
        with self._changed:
            self._reading = False
            self._changed.notify_all()

    def _poll(self) -> bool:
        """Whether the image may be looked at until the next call."""
        with self._changed:
            self._reading = not self._halted
            self._changed.notify_all()
            return self._reading

    def _disable(self, spool: Spool) -> None:
        try:
            spool.remove()
        except OSError as error:
            log.warning("a spool could not be removed", reason=str(error))
