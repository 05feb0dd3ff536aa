"""Keeps a fork's verified chunks in a spool, so that a restarted process can resume. Runs on the target.

`ChunkPersister` writes chunks as they are verified; `SpoolReader` fills the chunks of a process that died. Both
run on their own threads. The writer has the lowest priority: with a disk slower than the network, or on cores
that the fork needs, it lags. Nothing here can fail or delay a fork: on an error it logs one line and stops, and
a thread that hangs is abandoned.
"""

from __future__ import annotations

import errno
import hashlib
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from typing_extensions import Self

from rfork.errors import StorageError, reason_of
from rfork.image.chunks import MIB, ChunkState
from rfork.image.host_memory import copy_block
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.receiver.events import Event, ReadSpool, SpoolChunkRead, SpoolFailed
from rfork.source.seed import InstanceIdentity
from rfork.storage.spool import Spool, acquire_spool
from rfork.thread_priority import lower_thread_priority

log = logger(__name__)

BLOCK_BYTES: Final = 4 * MIB
"""Size of one read or write: both can be stopped between two of them."""
FLUSH_TIMEOUT_S: Final = 1.0
"""Maximum time that a fork waits for a spool to open, stop or be removed."""
READ_STOP_S: Final = 1.0
"""Maximum time that a fork waits for a read of a spool that hangs."""
WRITER_NICE: Final = 19
"""Niceness of the writer: it gets the CPU time that the fork and other processes do not use."""
DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def spool_name(identity: InstanceIdentity) -> str:
    """Return the name of the spools of one rank of one model: a readable part and a unique part."""
    rank = identity.rank
    identity_text = f"{rank.key}-dp{rank.dp}\n{identity.model}"
    readable = re.sub(r"[^A-Za-z0-9._]+", "-", identity.model)[-64:].strip("-.")
    return f"rfork-{readable}-{hashlib.sha256(identity_text.encode()).hexdigest()[:16]}"


class ChunkPersister:
    """Keeps verified chunks of one fork in a spool under `folder`; without a folder it does nothing.

    Reads chunks directly from the image, without a queue.
    """

    def __init__(self, folder: Path | None, identity: InstanceIdentity, image: Image, chunk_state: ChunkState) -> None:
        self._folder = folder
        self._name = spool_name(identity)
        self._image = image
        self._chunk_state = chunk_state
        self._changed = threading.Condition()
        self._wakeups: SimpleQueue[None] = SimpleQueue()  # marking a chunk never waits for the writer
        self._spool: Spool | None = None
        self._opened = self._ended = folder is None
        self._reading = self._writes = self._halted = self._closing = False
        self._remove = False

    def start(self) -> Self:
        """Begin to open the spool and to write the verified chunks."""
        if self._folder is not None:
            threading.Thread(target=self._run, name="rfork-spool", daemon=True).start()
        return self

    @property
    def spool(self) -> Spool | None:
        """The spool with its previous content, or None if there is none or it is not open in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._opened, FLUSH_TIMEOUT_S)
            return self._spool

    def pause(self) -> None:
        """Stop writing and recording chunks: the image is about to receive other bytes."""
        with self._changed:
            self._halted = True
            self._wakeups.put(None)
            self._changed.wait_for(lambda: not self._reading, FLUSH_TIMEOUT_S)

    def close(self, *, remove: bool) -> None:
        """Stop writing; keep the spool for a restarted process, or remove it.

        Then nothing reads the image: an engine may unmap its memory, even if something refers to it.
        """
        with self._changed:
            self._halted = self._closing = True
            self._remove = remove
            self._wakeups.put(None)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._ended and not self._reading, FLUSH_TIMEOUT_S):
                log.warning("folder of the chunks kept for a restart does not respond", folder=str(self._folder))

    # -- threads ------------------------------------------------------------------------------

    def _run(self) -> None:
        spool: Spool | None = None
        try:
            spool = self._open()
            self._writes = True
            threading.Thread(target=self._write, args=(spool,), name="rfork-spool-write", daemon=True).start()
        except StorageError as error:
            log.warning("verified chunks are not kept for a restart", folder=str(self._folder), reason=str(error))
        except Exception:  # a bug, or no thread available: must not end the fork
            self._writes = False
            log.exception("verified chunks are not kept for a restart", folder=str(self._folder))
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
            spool.close()  # the kernel frees the pages of a removed file here, where the fork does not wait for it

    def _open(self) -> Spool:
        if self._folder is None:
            raise StorageError("RFORK_RESUME_DIR is not set")
        return acquire_spool(self._folder, self._name, self._image.layout)

    def _write(self, spool: Spool) -> None:
        stop = self._chunk_state.subscribe(lambda: self._wakeups.put(None))
        try:
            lower_thread_priority(WRITER_NICE)
            if not spool.has_space():
                raise OSError(errno.ENOSPC, f"{spool.path}: not enough space for the image")
            self._wakeups.put(None)
            while self._wait():
                verified_digests, kept = self._chunk_state.digests, spool.records
                for chunk in sorted(chunk for chunk in verified_digests if kept.get(chunk) != verified_digests[chunk]):
                    self._persist(spool, chunk, verified_digests[chunk])
        except OSError as error:
            if error.errno is not None:  # otherwise the fork has ended and closed the spool
                log.warning("verified chunks are no longer kept for a restart", reason=reason_of(error))
            if error.errno in DISK_FULL_ERRNOS:
                self._disable(spool)  # a full disk harms other processes more than the spool helps
        except Exception:  # a bug, or a failed device: must not end the fork
            log.exception("verified chunks are no longer kept for a restart")
        finally:
            stop()
            with self._changed:
                self._reading = self._writes = False
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait until the chunk state has changed; returns False when writing must stop."""
        self._wakeups.get()
        while not self._wakeups.empty():
            self._wakeups.get()
        return not self._halted

    def _persist(self, spool: Spool, chunk: int, digest: bytes) -> None:
        """Write one chunk, unless the image is about to change first."""
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
        """Return whether the image may be read until the next call."""
        with self._changed:
            self._reading = not self._halted
            self._changed.notify_all()
            return self._reading

    def _disable(self, spool: Spool) -> None:
        try:
            spool.remove()
        except OSError as error:
            log.warning("failed to remove the chunks kept for a restart", reason=reason_of(error))


class SpoolReader:
    """Fills chunks from the spool of a process that died, on its own thread.

    A disk may hang: blocks are read into separate memory, so that they cannot be written to the image later.
    """

    def __init__(self, spool: Spool, image: Image, emit: Callable[[Event], None]) -> None:
        self.advanced_at = 0.0
        """Time of the last block."""
        self.bytes_read = 0
        self._spool = spool
        self._image = image
        self._emit = emit
        self._writing = threading.Lock()
        self._stopped = False
        self._requests: SimpleQueue[ReadSpool | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rfork-spool-read", daemon=True)

    def start(self) -> None:
        """Start its thread."""
        self._thread.start()

    def read(self, request: ReadSpool) -> None:
        """Fill one chunk; the result is the event `SpoolChunkRead`."""
        self._requests.put(request)

    def stop(self) -> None:
        """Stop writing to the image."""
        with self._writing:  # a copy in progress ends
            self._stopped = True
        self._requests.put(None)

    def join(self) -> None:
        """Wait until its thread has ended; call it after `stop`. A thread that hangs is abandoned."""
        if self._thread.is_alive():
            self._thread.join(READ_STOP_S)

    def _run(self) -> None:
        try:
            scratch = memoryview(bytearray(min(BLOCK_BYTES, self._image.layout.chunks.chunk_size)))
            while (request := self._requests.get()) is not None:
                began = time.monotonic()
                digest = self._load(request, scratch)
                self._emit(SpoolChunkRead(request.chunk, digest, time.monotonic() - began))
        except OSError as error:
            if not self._stopped:  # otherwise the fork has ended and closed the spool
                log.warning("kept chunks not readable, reading from the sources", reason=reason_of(error))
        except Exception:  # out of memory, or a bug: the sources must serve the rest
            log.exception("unexpected error with kept chunks, reading from the sources")
        finally:
            self._emit(SpoolFailed())

    def _load(self, request: ReadSpool, scratch: memoryview) -> bytes | None:
        """Fill one chunk; returns the digest of its bytes, or None if the spool did not have all of them."""
        begin, end = self._image.layout.chunks[request.chunk]
        is_complete = True
        for at in range(begin, end, scratch.nbytes):
            block = scratch[: min(scratch.nbytes, end - at)]
            is_complete = self._spool.read(at, block)
            if not is_complete:
                break
            with self._writing:
                if self._stopped:
                    return None
                with self._image.writable(at, at + block.nbytes) as views:
                    copy_block(block, views)
            self.advanced_at = time.monotonic()
            self.bytes_read += block.nbytes
        digest = self._image.digest(request.chunk) if is_complete else None
        if not self._stopped and digest != request.digest:
            self._spool.erase(request.chunk)  # so that it is spooled again once a source has served it
        return digest
