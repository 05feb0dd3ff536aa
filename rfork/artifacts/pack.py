"""From folders to an image: the files of the chosen kinds, each whole. Runs on the source."""

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
from rfork.artifacts.file_names import META, name_problem
from rfork.artifacts.key import ArtifactKey
from rfork.artifacts.metadata import ArtifactMetadata
from rfork.artifacts.triton_groups import missing_file, to_portable
from rfork.image.capture import image_from_tensors, natural_sort_key
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.settings import ArtifactSettings

log = logger(__name__)

READ_AT_ONCE: Final = 1 << 20
EXECUTABLE: Final = 0o111
YOUNG, CHANGED, NO_FILES = "changed just now", "changed while it was read", "a group without its files"
TRANSIENT_REASONS: Final = frozenset({YOUNG, CHANGED, NO_FILES})
"""Why files are left out that may be whole a moment later."""
MAX_FILE_ENTRY_CHARS: Final = len(f":[false,{(1 << 63) - 1}],")


class FoundFile(NamedTuple):
    """One file of a kind, as it was when its folder was listed."""

    cache_type: CacheType
    path: Path
    name: str
    """``KIND/relative/path``."""
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Packed:
    """An image of artifacts. `files` and `bytes` count the files; `skipped` says why others are not."""

    image: Image
    files: int
    bytes: int
    skipped: dict[str, int] = field(default_factory=dict)


def found_in(cache_dir: CacheDir, skipped: Counter[str] | None = None) -> Iterator[FoundFile]:
    """The files in a kind's folder that may travel. Links are not followed; what vanishes is passed over."""
    counted = skipped if skipped is not None else Counter[str]()
    if (problem := cache_dir.problem()) is not None:
        log.warning(
            "a cache is passed over",
            kind=cache_dir.cache_type.name,
            folder=str(cache_dir.folder),
            because=problem,
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
                counted["no regular file"] += 1
            elif name_problem(relative, cache_dir.cache_type) is not None:
                counted["a name that is not taken"] += 1
            else:
                yield FoundFile(
                    cache_dir.cache_type,
                    path,
                    f"{cache_dir.cache_type.name}/{relative}",
                    stat_result.st_size,
                    stat_result.st_mtime_ns,
                )


def pack(cache_dirs: Sequence[CacheDir], key: ArtifactKey, settings: ArtifactSettings) -> Packed | None:
    """The image of all files in these places; None where there are none.

    A file that was changed less than `settings.quiet_period_s` ago may still be written: it is waited for once, and
    what is younger then is left out, as is one that changes while it is read. So is what goes beyond
    `max_bytes` (what the image says of its files included) or `max_files`, and a group without its files.
    With a file its whole entry is left out (`Kind.entry_of`). Takes the bytes of all files in memory, and
    while it packs those of the largest entry once more.
    """
    skipped: Counter[str] = Counter()
    wait_until_quiet(cache_dirs, settings.quiet_period_s)
    metadata = ArtifactMetadata(
        key=asdict(key),
        cache_paths={cache_dir.cache_type.name: str(cache_dir.folder) for cache_dir in cache_dirs},
        files={},
    )
    packing = _Packing(settings, len(metadata.model_dump_json().encode()), skipped)
    newest = time.time_ns() - round(settings.quiet_period_s * 1e9)
    entries: list[list[FoundFile]] = []
    for cache_dir in cache_dirs:
        for entry in _entries(cache_dir, skipped):
            if settings.quiet_period_s and (young := sum(found.mtime_ns > newest for found in entry)):
                skipped[YOUNG] += young
                packing.drop(len(entry) - young)
            elif packing.fits(entry):
                entries.append(entry)
    # In the order of the image, so that it is one run of memory.
    entries.sort(key=lambda entry: natural_sort_key(entry[0].name))
    for entry in entries:
        packing.add(entry)
    if skipped:
        log.info("artifacts left out", **{why.replace(" ", "_"): count for why, count in skipped.items()})
    if not packing.files:
        return None
    metadata = metadata.model_copy(update={"files": packing.files})
    packing.tensors[META] = torch.frombuffer(bytearray(metadata.model_dump_json().encode()), dtype=torch.uint8)
    return Packed(image_from_tensors(packing.tensors), len(packing.files), packing.bytes, dict(skipped))


class _Packing:
    """The image as it grows, entry by entry. `metadata_size` bytes are needed to say what it is without its files."""

    def __init__(self, settings: ArtifactSettings, metadata_size: int, skipped: Counter[str]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.files: dict[str, tuple[bool, int]] = {}
        self.bytes = 0
        self._max_files = settings.max_files
        self._max_content_bytes = settings.max_bytes - metadata_size
        self._left_out = skipped
        self._chosen = self._total = self._cost = 0
        self._buffer: torch.Tensor | None = None

    def fits(self, entry: Sequence[FoundFile]) -> bool:
        """Whether there is room for it, which it then has; it is counted as left out else."""
        cost = sum(found.size + _metadata_bytes(found.name) for found in entry)
        if self._chosen + len(entry) > self._max_files or self._cost + cost > self._max_content_bytes:
            beyond = max(1, sum(found.size + _metadata_bytes(found.name) > self._max_content_bytes for found in entry))
            self._left_out["too many or too large"] += beyond
            self.drop(len(entry) - beyond)
            return False
        self._chosen += len(entry)
        self._cost += cost
        self._total += sum(found.size for found in entry)
        return True

    def drop(self, others: int) -> None:
        """So many files stay because another one of their entry does."""
        if others:
            self._left_out["of the same entry"] += others

    def add(self, entry: Sequence[FoundFile]) -> None:
        """Read it, and take it if it is whole; after all were asked for by `fits`."""
        contents: list[tuple[FoundFile, bytes, bool, int]] = []
        siblings: dict[Path, set[str]] = {}
        for found in entry:
            siblings.setdefault(found.path.parent, set()).add(found.path.name)
        for found in entry:
            file_content = _read_stable(found)
            if file_content is None:
                self._left_out[CHANGED] += 1
                return self.drop(len(entry) - 1)
            if missing_file(found.path, file_content[0], siblings[found.path.parent]) is not None:
                self._left_out[NO_FILES] += 1
                return self.drop(len(entry) - 1)
            # It holds names where it held paths, so it is no longer than before.
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
    """The files of a place, entry by entry, each in the order of the image."""
    entries: dict[str, list[FoundFile]] = {}
    for found in found_in(cache_dir, skipped):
        entry = cache_dir.cache_type.entry_of(found.name.partition("/")[2])
        entries.setdefault(entry, []).append(found)
    for files in entries.values():
        yield sorted(files, key=lambda found: natural_sort_key(found.name))


def _metadata_bytes(name: str) -> int:
    """Most bytes that the image takes to say what a file is."""
    return len(json.dumps(name, ensure_ascii=False).encode()) + MAX_FILE_ENTRY_CHARS


def wait_until_quiet(cache_dirs: Sequence[CacheDir], settle_s: float) -> None:
    """Wait until no file is younger than `quiet_period_s`, but no longer: somebody may write all the time."""
    if not settle_s:
        return
    newest = max((found.mtime_ns for cache_dir in cache_dirs for found in found_in(cache_dir)), default=0)
    left = settle_s - (time.time_ns() - newest) / 1e9
    if left > 0:
        time.sleep(min(left, settle_s))


def _read_stable(found: FoundFile) -> tuple[bytes, bool, int] | None:
    """Content, whether it is a program, and mtime of a file; None where it is not what was found."""
    try:
        # A link that was put in its place since is not followed; a pipe does not block.
        descriptor = os.open(found.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode) or (before.st_size, before.st_mtime_ns) != found[3:]:
            return None
        parts: list[bytes] = []
        left = found.size
        while left > 0 and (part := os.read(descriptor, min(left, READ_AT_ONCE))):
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
