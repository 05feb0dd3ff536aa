"""From an image to folders: every file whole, and none over one that is there. Runs on the target.

All files of a kind are written to a staging folder in the kind's own first. From there whole entries are
renamed into place: a folder that does not exist yet moves at once with all that is in it, so an engine
that reads meanwhile, and a process that dies at any point, finds whole entries only.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rfork.artifacts.contents import Told, bytes_of
from rfork.artifacts.kinds import Place
from rfork.artifacts.names import META
from rfork.artifacts.relocation import is_group, placed
from rfork.artifacts.staging import staged, sweep
from rfork.errors import DeadlinePassed, RforkError, StorageDenied, StorageError, StorageFull
from rfork.image.memory import Image
from rfork.image.specs import TensorSpec
from rfork.logs import logger

log = logger(__name__)

WRITERS: Final = 8
PROGRAM, DATA = 0o777, 0o666
"""Modes before the umask: all else that a mode says stays behind."""


@dataclass(slots=True)
class Unpacked:
    """What unpacking did; see `ArtifactReport`. `passed_over` says of kinds why they were."""

    files: int = 0
    bytes: int = 0
    there: int = 0
    kept: int = 0
    passed_over: tuple[str, ...] = ()


def unpack(
    image: Image, told: Told, places: Sequence[Place], deadline: float, done: Unpacked | None = None
) -> Unpacked:
    """Put the files of the kinds in `places` there. Their names were checked (`check_layout`).

    `deadline` is on `time.monotonic()`'s clock. Raises DeadlinePassed and StorageErrors:
    what is in place by then is whole, and told in `done`, and nothing else stays. Two processes that do it
    at once do it once.
    """
    done = Unpacked() if done is None else done
    of_kind: dict[str, list[TensorSpec]] = {}
    for spec in image.layout.tensors:
        if spec.name != META:
            of_kind.setdefault(spec.name.partition("/")[0], []).append(spec)
    passed: list[str] = []
    for place in places:
        kind, specs = place.kind, of_kind.get(place.kind.name, [])
        lay = told.places.get(kind.name)
        if not specs:
            continue
        if kind.bound and lay != str(place.folder):
            passed.append(f"{kind.name} only fits {lay}, here it lies in {place.folder}")
        elif (trouble := place.trouble()) is not None:
            passed.append(f"{kind.name}: {place.folder}: {trouble}")
        else:
            with _named(place.folder):
                sweep(place.folder)
                _Unpacking(image, told.files, place, deadline, done).run(specs)
    done.passed_over = tuple(passed)
    for why in passed:
        log.info("a cache is passed over", because=why)
    return done


class _Unpacking:
    """One kind, on its way into its folder."""

    def __init__(
        self,
        image: Image,
        files: Mapping[str, tuple[bool, int]],
        place: Place,
        deadline: float,
        done: Unpacked,
    ) -> None:
        self._image = image
        self._files = files
        self._folder = place.folder
        self._kind = place.kind
        self._deadline = deadline
        self._done = done

    def run(self, specs: Sequence[TensorSpec]) -> None:
        with staged(self._folder) as staging:
            # Threads, as each file is brought to the disk before it gets its name.
            with ThreadPoolExecutor(WRITERS, thread_name_prefix="rfork-unpack") as pool:
                writes = [pool.submit(self._write, spec, staging) for spec in specs]
                try:
                    for write in writes:
                        if write.result():
                            self._done.there += 1
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
            self._move(staging, self._folder, top=True)

    def _write(self, spec: TensorSpec, staging: Path) -> bool:
        """Write one file to the staging folder; true where it is in place already, as it must be."""
        if time.monotonic() > self._deadline:
            raise DeadlinePassed("the time for taking artifacts is over")
        relative = spec.name.partition("/")[2]
        final = self._folder / relative
        content = placed(final, bytes_of(self._image, spec))
        if _holds(final, content):
            return True
        executable, mtime_ns = self._files[spec.name]
        path = staging / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PROGRAM if executable else DATA
        )
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.utime(file.fileno(), ns=(mtime_ns, mtime_ns))
            os.fsync(file.fileno())
        return False

    def _move(self, staging: Path, folder: Path, *, top: bool = False) -> None:
        """Move what lies in `staging` into `folder`, which is there: whole folders where none is yet."""
        names = sorted(os.listdir(staging), key=lambda name: (is_group(name), name))
        if top:
            names.sort(key=lambda name: name in self._kind.last)  # stable
        with os.scandir(folder) as entries:
            merged = any(entry.is_file(follow_symlinks=False) for entry in entries)
        for name in names:
            source, target = staging / name, folder / name
            if source.is_dir():
                self._move_folder(source, target)
            elif self._kind.whole and merged and not top:
                self._done.kept += 1
            else:
                self._move_file(source, target)

    def _move_folder(self, source: Path, target: Path) -> None:
        files, size = _counted(source)
        try:
            os.rename(source, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            # A link that somebody put there leads elsewhere: nothing is written through it.
            if stat.S_ISDIR(target.lstat().st_mode):
                self._move(source, target)
            else:
                self._done.kept += files
        else:
            self._done.files += files
            self._done.bytes += size

    def _move_file(self, source: Path, target: Path) -> None:
        size = source.stat().st_size
        try:
            _name(source, target)
        except FileExistsError:
            # It came since this one was staged, or it is another.
            same = _holds(target, source.read_bytes())
            self._done.there += same
            self._done.kept += not same
        else:
            self._done.files += 1
            self._done.bytes += size


def _name(source: Path, target: Path) -> None:
    """Give a file its name. Raises FileExistsError where there is one: it is never written over."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS, errno.EXDEV):
            raise
        # No hard links here. One that comes before the rename has the same name, so the same use.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.rename(source, target)
    else:
        os.unlink(source)


def _holds(path: Path, content: bytes) -> bool:
    """Whether that very file is there: a plain one, of this content."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        told = os.fstat(file.fileno())
        return stat.S_ISREG(told.st_mode) and told.st_size == len(content) and file.read() == content


def _counted(folder: Path) -> tuple[int, int]:
    """Files and bytes in a folder."""
    sizes = [
        os.lstat(os.path.join(below, name)).st_size for below, _, names in os.walk(folder) for name in names
    ]
    return len(sizes), sum(sizes)


class _named:
    """Turns what the disk says within the block into one line that names the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, RforkError):
            return
        told = f"{self._folder}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(told) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StorageDenied(told, hint="RFORK_ARTIFACTS_FOLDERS names another folder") from None
        raise StorageError(told) from None
