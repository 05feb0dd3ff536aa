"""Unpacks an image into cache folders, file by file, without overwriting any. Runs on the target.

All files of a cache are first written to a staging folder inside it. From there complete entries are renamed
into place: a folder that does not exist yet is moved with all of its content. So an engine that reads at the
same time finds only complete entries, even if this process dies at any point. The process that fills a
staging folder locks it, so that the leftovers of a dead process can be recognised and removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rfork.artifacts.cache_types import STAGING, CacheDir
from rfork.artifacts.metadata import METADATA_TENSOR, ArtifactMetadata, bytes_of
from rfork.artifacts.triton_groups import is_group, to_local
from rfork.errors import DeadlineExceeded, RforkError, StorageAccessDenied, StorageError, StorageFull
from rfork.image.layout import TensorSpec
from rfork.image.memory import Image
from rfork.logs import logger

log = logger(__name__)

SUFFIX: Final = ".tmp"
OWNER_MODE: Final = 0o755
"""Independent of the umask: a folder that others can write to would be skipped from then on."""
ATTEMPTS: Final = 20
STALE_AGE_S: Final = 24 * 3600.0
"""Age in seconds after which a folder counts as abandoned on a file system without locks."""


@contextlib.contextmanager
def staging_dir(folder: Path) -> Iterator[Path]:
    """Create a staging folder in `folder` for the duration of the block, creating `folder` if necessary.

    Raises OSError.
    """
    folder.mkdir(mode=OWNER_MODE, parents=True, exist_ok=True)
    for _ in range(ATTEMPTS):
        staging = Path(tempfile.mkdtemp(prefix=STAGING, suffix=SUFFIX, dir=folder))
        try:
            lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # removed before it was opened
            continue
        try:
            with contextlib.suppress(OSError):  # the file system has no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not staging.exists():  # removed before it was locked
                continue
            try:
                yield staging
            finally:
                shutil.rmtree(staging, ignore_errors=True)
            return
        finally:
            os.close(lock)
    raise StorageError(f"{folder}: other processes keep removing the staging folder")


def remove_stale(folder: Path) -> int:
    """Remove the staging folders of dead processes in `folder`. Returns their number."""
    removed = 0
    for stale in folder.glob(f"{STAGING}*{SUFFIX}"):
        try:
            lock = os.open(stale, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:
                if time.time() - os.fstat(lock).st_mtime < STALE_AGE_S:
                    continue
            removed += 1
            shutil.rmtree(stale, ignore_errors=True)
        finally:
            os.close(lock)
    if removed:
        log.info("removed staging folders of dead processes", folder=str(folder), folders=removed)
    return removed


WRITERS: Final = 8
PROGRAM, DATA = 0o777, 0o666
"""File modes before the umask; other mode bits are not transferred."""


@dataclass(slots=True)
class Unpacked:
    """Result of unpacking; see `ArtifactReport`. `skipped` lists the skipped caches with the reasons."""

    files: int = 0
    bytes: int = 0
    already_present: int = 0
    kept_existing: int = 0
    skipped: tuple[str, ...] = ()


def unpack(
    image: Image,
    metadata: ArtifactMetadata,
    cache_dirs: Sequence[CacheDir],
    deadline: float,
    done: Unpacked | None = None,
) -> Unpacked:
    """Install the files of the caches in `cache_dirs`. Their names were checked before (`check_layout`).

    `deadline` is on `time.monotonic()`'s clock. Raises DeadlineExceeded and StorageError types; files
    installed by then are complete and counted in `done`, and nothing else remains. Concurrent calls by
    several processes install each file once.
    """
    done = Unpacked() if done is None else done
    specs_by_type: dict[str, list[TensorSpec]] = {}
    for spec in image.layout.tensors:
        if spec.name != METADATA_TENSOR:
            specs_by_type.setdefault(spec.name.partition("/")[0], []).append(spec)
    skipped_dirs: list[str] = []
    for cache_dir in cache_dirs:
        cache_type, specs = cache_dir.cache_type, specs_by_type.get(cache_dir.cache_type.name, [])
        source_path = metadata.cache_paths.get(cache_type.name)
        if not specs:
            continue
        if cache_type.path_bound and source_path != str(cache_dir.folder):
            skipped_dirs.append(f"{cache_type.name} is valid only at {source_path}, but is at {cache_dir.folder} here")
        elif (problem := cache_dir.problem()) is not None:
            skipped_dirs.append(f"{cache_type.name}: {cache_dir.folder}: {problem}")
        else:
            with _folder_errors(cache_dir.folder):
                remove_stale(cache_dir.folder)
                _Unpacking(image, metadata.files, cache_dir, deadline, done).run(specs)
    done.skipped = tuple(skipped_dirs)
    for reason in skipped_dirs:
        log.info("JIT cache skipped", reason=reason)
    return done


class _Unpacking:
    """Unpacks one cache into its folder."""

    def __init__(
        self,
        image: Image,
        files: Mapping[str, tuple[bool, int]],
        cache_dir: CacheDir,
        deadline: float,
        done: Unpacked,
    ) -> None:
        self._image = image
        self._files = files
        self._folder = cache_dir.folder
        self._cache_type = cache_dir.cache_type
        self._deadline = deadline
        self._done = done

    def run(self, specs: Sequence[TensorSpec]) -> None:
        with staging_dir(self._folder) as staging:
            # Threads, because each file is flushed to disk before it is moved into place.
            with ThreadPoolExecutor(WRITERS, thread_name_prefix="rfork-unpack") as pool:
                writes = [pool.submit(self._write, spec, staging) for spec in specs]
                try:
                    for write in writes:
                        if write.result():
                            self._done.already_present += 1
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
            self._move(staging, self._folder, top=True)

    def _write(self, spec: TensorSpec, staging: Path) -> bool:
        """Write one file to the staging folder. Returns True if it is already in place with the same content."""
        if time.monotonic() > self._deadline:
            raise DeadlineExceeded("the deadline passed before all artifacts were unpacked")
        relative = spec.name.partition("/")[2]
        final = self._folder / relative
        content = to_local(final, bytes_of(self._image, spec))
        if _has_content(final, content):
            return True
        executable, mtime_ns = self._files[spec.name]
        path = staging / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PROGRAM if executable else DATA)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.utime(file.fileno(), ns=(mtime_ns, mtime_ns))
            os.fsync(file.fileno())
        return False

    def _move(self, staging: Path, folder: Path, *, top: bool = False) -> None:
        """Move the content of `staging` into the existing `folder`; new folders are moved as one."""
        names = sorted(os.listdir(staging), key=lambda name: (is_group(name), name))
        if top:
            names.sort(key=lambda name: name in self._cache_type.written_last)  # stable sort
        with os.scandir(folder) as entries:
            merged = any(entry.is_file(follow_symlinks=False) for entry in entries)
        for name in names:
            source, target = staging / name, folder / name
            if source.is_dir():
                self._move_folder(source, target)
            elif self._cache_type.all_or_nothing and merged and not top:
                self._done.kept_existing += 1
            else:
                self._move_file(source, target)

    def _move_folder(self, source: Path, target: Path) -> None:
        files, size = _count_files(source)
        try:
            os.rename(source, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            # It may be a link to somewhere else: never write through it.
            if stat.S_ISDIR(target.lstat().st_mode):
                self._move(source, target)
            else:
                self._done.kept_existing += files
        else:
            self._done.files += files
            self._done.bytes += size

    def _move_file(self, source: Path, target: Path) -> None:
        size = source.stat().st_size
        try:
            _move_into_place(source, target)
        except FileExistsError:
            # Another process has created it since, or it has other content.
            same = _has_content(target, source.read_bytes())
            self._done.already_present += same
            self._done.kept_existing += not same
        else:
            self._done.files += 1
            self._done.bytes += size


def _move_into_place(source: Path, target: Path) -> None:
    """Move a file into place. Raises FileExistsError instead of overwriting one."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS, errno.EXDEV):
            raise
        # No hard links here. A file created before the rename has the same name, so it is equivalent.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.rename(source, target)
    else:
        os.unlink(source)


def _has_content(path: Path, content: bytes) -> bool:
    """Return True if `path` is a regular file with this content."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        stat_result = os.fstat(file.fileno())
        return stat.S_ISREG(stat_result.st_mode) and stat_result.st_size == len(content) and file.read() == content


def _count_files(folder: Path) -> tuple[int, int]:
    """Return the number of files in a folder and their bytes."""
    sizes = [os.lstat(os.path.join(below, name)).st_size for below, _, names in os.walk(folder) for name in names]
    return len(sizes), sum(sizes)


class _folder_errors:
    """Converts OSErrors raised in the block into one-line errors that name the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, exc_type: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, RforkError):
            return
        message = f"{self._folder}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(message) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StorageAccessDenied(message, hint="set another folder in RFORK_ARTIFACTS_DIRS") from None
        raise StorageError(message) from None
