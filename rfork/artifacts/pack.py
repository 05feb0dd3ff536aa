"""Packs the files of the selected caches into an image. Runs on the source."""

from __future__ import annotations

import json
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import torch

from rfork.artifacts.cache_types import CacheDir, CacheType
from rfork.artifacts.key import ArtifactKey
from rfork.artifacts.metadata import MAX_FILES, METADATA_TENSOR, ArtifactMetadata, path_problem
from rfork.artifacts.triton_groups import missing_file, to_portable
from rfork.image.capture import image_from_tensors, natural_sort_key
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.settings import ArtifactSettings

log = logger(__name__)

READ_BLOCK_BYTES: Final = 1 << 20
EXECUTABLE: Final = 0o111
RECENT, CHANGED, INCOMPLETE_GROUP = "recently changed", "changed while being read", "incomplete Triton group"
TRANSIENT_REASONS: Final = frozenset({RECENT, CHANGED, INCOMPLETE_GROUP})
"""Reasons for skipping files that may be complete a moment later."""
MAX_FILE_ENTRY_CHARS: Final = len(f":[false,{(1 << 63) - 1}],")


class FoundFile(NamedTuple):
    """One file of a cache, as of the listing of its folder."""

    cache_type: CacheType
    path: Path
    name: str
    """``TYPE/relative/path``."""
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Packed:
    """An image of artifacts. `files` and `bytes` count the packed files; `skipped` counts the others by reason."""

    image: Image
    files: int
    bytes: int
    skipped: dict[str, int] = field(default_factory=dict)


def found_in(cache_dir: CacheDir, skipped: Counter[str] | None = None) -> Iterator[FoundFile]:
    """Yield the files of a cache that may be copied. Links are not followed; files that disappear are ignored."""
    counted = skipped if skipped is not None else Counter[str]()
    if (problem := cache_dir.problem()) is not None:
        log.warning(
            "JIT cache skipped",
            cache=cache_dir.cache_type.name,
            folder=str(cache_dir.folder),
            reason=problem,
        )
        return
    for folder, folders, files in os.walk(cache_dir.folder, followlinks=False):
        folders[:] = sorted(name for name in folders if not cache_dir.cache_type.excludes(name))
        for name in sorted(files):
            if cache_dir.cache_type.excludes(name):
                continue
            path = Path(folder, name)
            try:
                stat_result = path.lstat()
            except OSError:
                continue
            relative = path.relative_to(cache_dir.folder).as_posix()
            if not stat.S_ISREG(stat_result.st_mode):
                counted["not a regular file"] += 1
            elif path_problem(relative, cache_dir.cache_type) is not None:
                counted["forbidden name"] += 1
            else:
                yield FoundFile(
                    cache_dir.cache_type,
                    path,
                    f"{cache_dir.cache_type.name}/{relative}",
                    stat_result.st_size,
                    stat_result.st_mtime_ns,
                )


def pack(
    cache_dirs: Sequence[CacheDir], key: ArtifactKey, settings: ArtifactSettings, max_files: int = MAX_FILES
) -> Packed | None:
    """Return an image of all files of these caches; None if there are none.

    A file changed less than `settings.quiet_period_s` ago may still be written: this waits once, then skips
    files that are still too recent, and files that change while they are read. It also skips what exceeds
    `max_bytes` (including metadata) or `max_files`, and incomplete Triton groups. Skipping a file skips its
    complete entry (`CacheType.entry_of`). Needs memory for the bytes of all files, plus a second copy of the
    largest entry.
    """
    skipped: Counter[str] = Counter()
    wait_until_quiet(cache_dirs, settings.quiet_period_s)
    metadata = ArtifactMetadata(
        key=asdict(key),
        cache_paths={cache_dir.cache_type.name: str(cache_dir.folder) for cache_dir in cache_dirs},
        files={},
    )
    packing = _Packing(settings, max_files, len(metadata.model_dump_json().encode()), skipped)
    recent_since_ns = time.time_ns() - round(settings.quiet_period_s * 1e9)
    entries: list[list[FoundFile]] = []
    for cache_dir in cache_dirs:
        for entry in _entries(cache_dir, skipped):
            if settings.quiet_period_s and (recent := sum(found.mtime_ns > recent_since_ns for found in entry)):
                skipped[RECENT] += recent
                packing.drop(len(entry) - recent)
            elif packing.fits(entry):
                entries.append(entry)
    # In image order, so that the image is one contiguous run of memory.
    entries.sort(key=lambda entry: natural_sort_key(entry[0].name))
    for entry in entries:
        packing.add(entry)
    if skipped:
        log.info("artifact files skipped", **{reason.replace(" ", "_"): count for reason, count in skipped.items()})
    if not packing.files:
        return None
    metadata = metadata.model_copy(update={"files": packing.files})
    packing.tensors[METADATA_TENSOR] = torch.frombuffer(
        bytearray(metadata.model_dump_json().encode()), dtype=torch.uint8
    )
    return Packed(image_from_tensors(packing.tensors), len(packing.files), packing.bytes, dict(skipped))


class _Packing:
    """The image under construction. `metadata_size` is the size of the metadata without the files."""

    def __init__(self, settings: ArtifactSettings, max_files: int, metadata_size: int, skipped: Counter[str]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.files: dict[str, tuple[bool, int]] = {}
        self.bytes = 0
        self._max_files = max_files
        self._max_content_bytes = settings.max_bytes - metadata_size
        self._skipped = skipped
        self._chosen = self._total = self._cost = 0
        self._buffer: torch.Tensor | None = None

    def fits(self, entry: Sequence[FoundFile]) -> bool:
        """Reserve space for the entry and return True, or count it as skipped and return False."""
        cost = sum(found.size + _metadata_bytes(found.name) for found in entry)
        if self._chosen + len(entry) > self._max_files or self._cost + cost > self._max_content_bytes:
            beyond = max(1, sum(found.size + _metadata_bytes(found.name) > self._max_content_bytes for found in entry))
            self._skipped["too many or too large"] += beyond
            self.drop(len(entry) - beyond)
            return False
        self._chosen += len(entry)
        self._cost += cost
        self._total += sum(found.size for found in entry)
        return True

    def drop(self, count: int) -> None:
        """Count `count` files as skipped because another file of their entry is."""
        if count:
            self._skipped["same entry as a skipped file"] += count

    def add(self, entry: Sequence[FoundFile]) -> None:
        """Read the entry and add it if it is complete. Call it after `fits` was called for all entries."""
        contents: list[tuple[FoundFile, bytes, bool, int]] = []
        siblings: dict[Path, set[str]] = {}
        for found in entry:
            siblings.setdefault(found.path.parent, set()).add(found.path.name)
        for found in entry:
            file_content = _read_stable(found)
            if file_content is None:
                self._skipped[CHANGED] += 1
                return self.drop(len(entry) - 1)
            if missing_file(found.path, file_content[0], siblings[found.path.parent]) is not None:
                self._skipped[INCOMPLETE_GROUP] += 1
                return self.drop(len(entry) - 1)
            # Names replace paths, so the content does not grow.
            content = to_portable(found.path, file_content[0])
            contents.append((found, content if len(content) <= found.size else file_content[0], *file_content[1:]))
        if self._buffer is None:
            self._buffer = torch.empty(self._total, dtype=torch.uint8)
        for found, content, executable, mtime_ns in contents:
            tensor = self._buffer[self.bytes : self.bytes + len(content)]
            if content:
                tensor.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            self.tensors[found.name] = tensor
            self.files[found.name] = executable, mtime_ns
            self.bytes += len(content)
        return None


def _entries(cache_dir: CacheDir, skipped: Counter[str]) -> Iterator[list[FoundFile]]:
    """Yield the files of a cache by entry, each entry in image order."""
    entries: dict[str, list[FoundFile]] = {}
    for found in found_in(cache_dir, skipped):
        entry = cache_dir.cache_type.entry_of(found.name.partition("/")[2])
        entries.setdefault(entry, []).append(found)
    for files in entries.values():
        yield sorted(files, key=lambda found: natural_sort_key(found.name))


def _metadata_bytes(name: str) -> int:
    """Return the maximum size of a file's metadata in bytes."""
    return len(json.dumps(name, ensure_ascii=False).encode()) + MAX_FILE_ENTRY_CHARS


def wait_until_quiet(cache_dirs: Sequence[CacheDir], quiet_period_s: float) -> None:
    """Wait until no file is younger than `quiet_period_s`, but not longer: files may be written all the time."""
    if not quiet_period_s:
        return
    newest = max((found.mtime_ns for cache_dir in cache_dirs for found in found_in(cache_dir)), default=0)
    left = quiet_period_s - (time.time_ns() - newest) / 1e9
    if left > 0:
        time.sleep(min(left, quiet_period_s))


def _read_stable(found: FoundFile) -> tuple[bytes, bool, int] | None:
    """Return content, executable flag and mtime of a file; None if it has changed since it was found."""
    try:
        # Do not follow a link that has replaced the file; do not block on a pipe.
        descriptor = os.open(found.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode) or (before.st_size, before.st_mtime_ns) != found[3:]:
            return None
        parts: list[bytes] = []
        left = found.size
        while left > 0 and (part := os.read(descriptor, min(left, READ_BLOCK_BYTES))):
            parts.append(part)
            left -= len(part)
        after = os.fstat(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if left or (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        return None
    return b"".join(parts), bool(before.st_mode & EXECUTABLE), before.st_mtime_ns
