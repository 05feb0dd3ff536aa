"""From folders to an image: the files of the chosen kinds, each whole. Runs on the source."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import torch

from rfork.artifacts.contents import Told
from rfork.artifacts.key import ArtifactKey
from rfork.artifacts.kinds import Kind, Place
from rfork.artifacts.names import META, trouble_with
from rfork.artifacts.relocation import portable
from rfork.image.capture import image_of, natural
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.settings import ArtifactSettings

log = logger(__name__)

READ_AT_ONCE: Final = 1 << 20
EXECUTABLE: Final = 0o111


class FoundFile(NamedTuple):
    """One file of a kind, as it was when its folder was listed."""

    kind: Kind
    path: Path
    name: str
    """``KIND/relative/path``."""
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Packed:
    """An image of artifacts. `files` and `bytes` count the files; `left_out` says why others are not."""

    image: Image
    files: int
    bytes: int
    left_out: dict[str, int] = field(default_factory=dict)


def found_in(place: Place, left_out: Counter[str] | None = None) -> Iterator[FoundFile]:
    """The files in a kind's folder that may travel. Links are not followed; what vanishes is passed over."""
    counted = left_out if left_out is not None else Counter[str]()
    if (trouble := place.trouble()) is not None:
        log.warning("a cache is passed over", kind=place.kind.name, folder=str(place.folder), because=trouble)
        return
    for folder, folders, files in os.walk(place.folder, followlinks=False):
        folders[:] = sorted(name for name in folders if not place.kind.leaves_out(name))
        for name in sorted(files):
            if place.kind.leaves_out(name):
                continue
            path = Path(folder, name)
            try:
                told = path.lstat()
            except OSError:
                continue
            relative = path.relative_to(place.folder).as_posix()
            if not stat.S_ISREG(told.st_mode):
                counted["no regular file"] += 1
            elif trouble_with(relative, place.kind) is not None:
                counted["a name that is not taken"] += 1
            else:
                yield FoundFile(
                    place.kind, path, f"{place.kind.name}/{relative}", told.st_size, told.st_mtime_ns
                )


def pack(places: Sequence[Place], key: ArtifactKey, settings: ArtifactSettings) -> Packed | None:
    """The image of all files in these places; None where there are none.

    A file that was changed less than `settings.settle_s` ago may still be written: it is waited for once, and
    what is younger then is left out, as is one that changes while it is read. So is what goes beyond
    `most_bytes` or `most_files`. Takes the bytes of all files in memory.
    """
    left_out: Counter[str] = Counter()
    wait_until_settled(places, settings.settle_s)
    chosen: list[FoundFile] = []
    total = 0
    newest = time.time_ns() - round(settings.settle_s * 1e9)
    for place in places:
        for found in found_in(place, left_out):
            if settings.settle_s and found.mtime_ns > newest:
                left_out["changed just now"] += 1
            elif len(chosen) >= settings.most_files or total + found.size > settings.most_bytes:
                left_out["too many or too large"] += 1
            else:
                chosen.append(found)
                total += found.size
    # In the order of the image, so that it is one run of memory.
    chosen.sort(key=lambda found: natural(found.name))
    buffer = torch.empty(total, dtype=torch.uint8)
    tensors: dict[str, torch.Tensor] = {}
    files: dict[str, tuple[bool, int]] = {}
    at = 0
    for found in chosen:
        whole = _whole(found)
        if whole is None:
            left_out["changed while it was read"] += 1
            continue
        content, executable, mtime_ns = whole
        content = portable(found.path, content)
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else buffer[:0]
        if at + len(content) <= total:
            tensor = buffer[at : at + len(content)].copy_(tensor)
        tensors[found.name] = tensor
        files[found.name] = executable, mtime_ns
        at += len(content)
    if left_out:
        log.info("artifacts left out", **{why.replace(" ", "_"): count for why, count in left_out.items()})
    if not tensors:
        return None
    told = Told(
        key=asdict(key),
        places={place.kind.name: str(place.folder) for place in places},
        files=files,
    )
    tensors[META] = torch.frombuffer(bytearray(told.model_dump_json().encode()), dtype=torch.uint8)
    return Packed(image_of(tensors), len(files), at, dict(left_out))


def wait_until_settled(places: Sequence[Place], settle_s: float) -> None:
    """Wait until no file is younger than `settle_s`, but no longer: somebody may write all the time."""
    if not settle_s:
        return
    newest = max((found.mtime_ns for place in places for found in found_in(place)), default=0)
    left = settle_s - (time.time_ns() - newest) / 1e9
    if left > 0:
        time.sleep(min(left, settle_s))


def _whole(found: FoundFile) -> tuple[bytes, bool, int] | None:
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
