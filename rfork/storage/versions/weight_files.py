"""Selects the weight files of a folder by name, and digests them by header and sampled blocks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from rfork.errors import StorageChanged, StorageCorrupt, StorageError, StorageNotFound
from rfork.storage.os_errors import storage_error

SAFETENSORS: Final = ".safetensors"
TENSORIZER: Final = ".tensors"
FORMATS: Final = (SAFETENSORS, ".gguf", TENSORIZER)
PICKLES: Final = (".bin", ".pt", ".pth")
"""Pickled weights. Engines ignore them in a folder that has weights in another format."""
TRAINING_STATE: Final = frozenset(
    f"{stem}{suffix}"
    for stem in ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
    for suffix in PICKLES
)
INDEX_SUFFIX: Final = ".index.json"
MAX_INDEX_BYTES: Final = 256 << 20
MANIFEST_SUFFIX: Final = ".manifest.json"
DEFAULT_INDEXES: Final = frozenset({"model.safetensors.index.json", "pytorch_model.bin.index.json"})
"""Indexes that engines read by default, so every shard in them must exist."""
SINGLE: Final = "model.safetensors"

_TEMPLATE: Final = re.compile(r"%(?:0\d)?d(?![0-9a-fA-F])")
_GGUF_PART: Final = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<parts>\d{5})\.gguf")
_RANK_SNAPSHOT: Final = re.compile(r"(model|speculative)-rank-\d{3,}(-ep-\d{3,})?\.safetensors(\.manifest\.json)?")

MAX_FULLY_READ_BYTES: Final = 256 << 10
"""Files up to this size are read completely."""
SAMPLES: Final = 64
BLOCK_BYTES: Final = 4096
HEAD_BYTES: Final = 64 << 10
"""Bytes at the front of a file that is not safetensors, where most formats keep their metadata."""
MAX_HEADER_BYTES: Final = 100_000_000
"""Limit of the safetensors format."""
MIN_CACHE_AGE_NS: Final = 2_000_000_000
"""Minimum age of the last change for a digest to be cached: file systems record changes in ticks, and two
changes within one tick cannot be distinguished.
"""
MAX_CACHED: Final = 1 << 16
LFS_POINTER: Final = b"version https://git-lfs"
ReadBytes = Callable[[int, int], bytes]
"""Returns bytes by offset and length."""
_cache_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Names of weight files, of their indexes, and of possible manifests of snapshots; each sorted."""

    weights: tuple[str, ...]
    indexes: tuple[str, ...] = ()
    manifests: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Every name."""
        return (*self.weights, *self.indexes, *self.manifests)


def select_weight_files(names: Collection[str]) -> WeightFiles:
    """Select among the names of a folder. Hidden files and files in subfolders are ignored.

    Weights are all ``*.safetensors``, ``*.gguf`` and ``*.tensors``, in an index or not, including
    consolidated duplicates: which of them are loaded depends on the engine and its flags. If there are none,
    weights are ``*.bin``, ``*.pt`` and ``*.pth``, without the state of a training run. Snapshots of ranks
    next to a Hugging Face checkpoint are ignored, as in `open_source`.
    """
    visible = sorted(name for name in names if "/" not in name and not name.startswith("."))
    is_checkpoint = not DEFAULT_INDEXES.isdisjoint(visible) or (
        SINGLE in visible and SINGLE + MANIFEST_SUFFIX not in visible
    )
    if is_checkpoint and any(name.endswith(FORMATS) and not _RANK_SNAPSHOT.fullmatch(name) for name in visible):
        visible = [name for name in visible if not _RANK_SNAPSHOT.fullmatch(name)]
    suffixes: tuple[str, ...] = FORMATS
    weights = _ending(visible, suffixes)
    manifests = _ending(visible, (SAFETENSORS + MANIFEST_SUFFIX,))
    if not weights:
        suffixes = PICKLES
        weights = tuple(name for name in _ending(visible, suffixes) if name not in TRAINING_STATE)
    if not weights:  # the shards of an index may be in a folder that cannot be listed
        suffixes = (*FORMATS, *PICKLES)
    indexes = _ending(visible, tuple(suffix + INDEX_SUFFIX for suffix in suffixes))
    return WeightFiles(weights, indexes, manifests)


def select_named(name: str, names: Collection[str]) -> WeightFiles:
    """Select the files for the URI of one file, among the names of its folder.

    These are the file and its manifest, all parts of a split ``.gguf`` or ``.tensors``, all ranks of a
    template such as ``model-rank-%03d.safetensors``, or an index, without its shards.
    """
    if name.endswith(INDEX_SUFFIX):
        return WeightFiles((), (name,))
    if split := _GGUF_PART.fullmatch(name):
        pattern = rf"{re.escape(split['stem'])}-\d{{5}}-of-{split['parts']}\.gguf"
    elif template := _TEMPLATE.search(name):
        head, tail = name[: template.start()], name[template.end() :]
        pattern = rf"{re.escape(head)}\d+(-ep-\d+)?{re.escape(tail)}"
    elif name.endswith(TENSORIZER):
        pattern = rf"{re.escape(name.removesuffix(TENSORIZER))}(-\d{{5}}-of-\d{{5}})?\.tensors"
    else:
        pattern = re.escape(name)
    weights = sorted(each for each in names if re.fullmatch(pattern, each, re.DOTALL))
    manifest = pattern + re.escape(MANIFEST_SUFFIX)
    manifests = sorted(each for each in names if re.fullmatch(manifest, each, re.DOTALL))
    return WeightFiles(tuple(weights), (), tuple(manifests))


def has_weight_suffix(name: str) -> bool:
    """Return True if a name is that of a weight file or an index, rather than of a folder."""
    return name.endswith((*FORMATS, *PICKLES, INDEX_SUFFIX))


def is_set(name: str) -> bool:
    """Return True if the name of one file may refer to several; see `select_named`."""
    return name.endswith(TENSORIZER) or _GGUF_PART.fullmatch(name) is not None or _TEMPLATE.search(name) is not None


def shards_of_index(text: bytes) -> frozenset[str]:
    """Return the shards in an index. Raises ValueError if it is invalid, or refers to a file outside of its
    folder.
    """
    try:
        shards = frozenset(json.loads(text)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("it has no weight_map from tensors to files") from None
    for shard in shards:
        if not isinstance(shard, str) or not shard or shard.startswith("/") or ".." in shard.split("/"):
            raise ValueError(f"it refers to {shard!r}, which is outside of the folder")
    return shards


def missing_shard(folder: str, name: str) -> StorageNotFound:
    """Return the error for a missing shard of an index."""
    return StorageNotFound(
        f"{folder} lacks the shard {name} that its index lists", hint="download the checkpoint again"
    )


def _ending(names: Iterable[str], suffixes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name.endswith(suffixes))


class FileState(NamedTuple):
    """Identity and last modification of a local file."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


_cache: dict[tuple[FileState, bool], bytes] = {}


def state_of(path: Path) -> FileState:
    """Return the state of a regular file, following links. Raises StorageError subclasses."""
    try:
        return _checked_state(path, path.stat())
    except FileNotFoundError as error:
        if path.is_symlink():
            raise StorageNotFound(
                f"{path} is a broken link: {os.readlink(path)} does not exist",
                hint="download the checkpoint again",
            ) from None
        raise storage_error(path, error) from None
    except OSError as error:
        raise storage_error(path, error) from None


def digest_of_file(path: Path, state: FileState) -> bytes:
    """Digest a file by its size, header and sampled blocks. Thread-safe.

    Raises StorageChanged if the file differs from `state` before or after the read, StorageCorrupt if it is
    named safetensors but is not, and other StorageErrors.
    """
    key = state, path.name.endswith(SAFETENSORS)
    with _cache_lock:
        cached = _cache.get(key)
    if cached is not None:
        return cached
    digest = read_unchanged(path, state, lambda read: sampled_digest(str(path), state.size, read))
    if time.time_ns() - state.ctime_ns >= MIN_CACHE_AGE_NS:
        with _cache_lock:
            while len(_cache) >= MAX_CACHED:
                del _cache[next(iter(_cache))]
            _cache[key] = digest
    return digest


def read_unchanged(path: Path, state: FileState, use: Callable[[ReadBytes], bytes]) -> bytes:
    """Return the result of `use` for the file's bytes. Raises the same errors as `digest_of_file`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise StorageChanged(f"{path} was removed during the read") from None
    except OSError as error:
        raise storage_error(path, error) from None
    try:
        _check_unchanged(path, state, descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

        def read(offset: int, length: int) -> bytes:
            block = os.pread(descriptor, length, offset)
            while len(block) < length:  # pread may return less
                more = os.pread(descriptor, length - len(block), offset + len(block))
                if not more:
                    raise StorageChanged(f"{path} was truncated during the read")
                block += more
            return block

        result = use(read)
        _check_unchanged(path, state, descriptor)
        return result
    except OSError as error:
        raise storage_error(path, error) from None
    finally:
        os.close(descriptor)


def sampled_digest(uri: str, size: int, read: ReadBytes, samples: int = SAMPLES) -> bytes:
    """Digest a file's size, its header and its sampled blocks. Raises StorageCorrupt, or the errors of
    `read`.
    """
    head = HEAD_BYTES
    if uri.endswith(SAFETENSORS):
        head = _header_bytes(uri, size, read)
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    for offset, length in sampled_ranges(size, head, samples):
        digest.update(read(offset, length))
    return digest.digest()


def sampled_ranges(size: int, head: int, samples: int = SAMPLES) -> list[tuple[int, int]]:
    """Return offset and length of each range to read: the complete file up to `MAX_FULLY_READ_BYTES`.

    For a larger file: the first `head` bytes, a block at a page boundary in each of `samples` equal parts,
    chosen by a hash of the size and the part's number, and the last block.
    """
    if size <= MAX_FULLY_READ_BYTES:
        return [(0, size)]
    pages = -(-size // BLOCK_BYTES)
    hashed = hashlib.shake_256(f"rfork-samples-v1:{size}".encode()).digest(8 * samples)
    ranges = [(0, min(head, size))]
    for number, (chosen,) in enumerate(struct.iter_unpack("<Q", hashed)):
        first, end = number * pages // samples, (number + 1) * pages // samples
        offset = (first + chosen % (end - first)) * BLOCK_BYTES
        ranges.append((offset, min(BLOCK_BYTES, size - offset)))
    ranges.append((size - BLOCK_BYTES, BLOCK_BYTES))
    return ranges


def _header_bytes(uri: str, size: int, read: ReadBytes) -> int:
    front = read(0, min(size, 9))
    if len(front) == 9 and front[8:] == b"{":
        end = 8 + int.from_bytes(front[:8], "little")
        if end <= min(size, 8 + MAX_HEADER_BYTES):
            return end
        if end <= 8 + MAX_HEADER_BYTES:
            raise StorageCorrupt(
                f"{uri} is truncated: {size} bytes, but its header alone has {end}", hint=_repair_hint(b"")
            )
    raise StorageCorrupt(f"{uri} is not a safetensors file", hint=_repair_hint(front))


def _repair_hint(front: bytes) -> str:
    if front and LFS_POINTER.startswith(front):
        return "it is a Git LFS pointer: run `git lfs pull`"
    return "download the checkpoint again"


def _check_unchanged(path: Path, state: FileState, descriptor: int) -> None:
    if _checked_state(path, os.fstat(descriptor)) != state:
        raise StorageChanged(f"{path} changed during the read")


def _checked_state(path: Path, status: os.stat_result) -> FileState:
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(f"{path} is not a regular file")
    return FileState(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
