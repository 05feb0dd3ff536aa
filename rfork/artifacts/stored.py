"""Artifacts in storage: written as a snapshot, one for each key, and taken from there. On either side."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from rfork import settings as options
from rfork.artifacts.giving import HOW, OFF
from rfork.artifacts.key import ArtifactKey, key_of_here, name_of
from rfork.artifacts.kinds import places
from rfork.artifacts.packing import Packed, pack
from rfork.artifacts.report import ArtifactReport
from rfork.artifacts.taking import LEAST_S, check, other_keys, place_image
from rfork.errors import (
    DeadlinePassed,
    RforkError,
    SettingsError,
    SourceCorrupt,
    StorageCorrupt,
    StorageError,
    StorageMissing,
    UserError,
)
from rfork.image.arena import allocate
from rfork.image.capture import image_of
from rfork.image.memory import Image
from rfork.image.safetensors_header import layout_of
from rfork.logs import logger
from rfork.seed.holding import seal
from rfork.settings import ArtifactSettings, StorageSettings
from rfork.storage.attempt import Attempt
from rfork.storage.location import Location
from rfork.storage.snapshots.files import is_file, open_files, place_of
from rfork.storage.snapshots.snapshot import Snapshot
from rfork.storage.snapshots.writer import Written, write_snapshot

log = logger(__name__)

ANY_MODEL = "any"
"""What artifacts are a part of where nobody said: a cache on a machine is often that of all its models."""


def uri_of(uri: str, key: ArtifactKey) -> str:
    """Where artifacts of this key lie: in a folder under the name of the key; a file is that file."""
    return uri if is_file(uri) else Location.parse(uri).folder.child(f"artifacts-{key.id}.safetensors").uri


def save(
    uri: str,
    *,
    model: str = ANY_MODEL,
    engine: str | None = None,
    artifacts: ArtifactSettings | None = None,
    storage: StorageSettings | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Written, Packed]:
    """Write the JIT caches of this machine to storage (file:///…, s3://…): a folder has one file a key.

    Runs in the process that calls it, and asks no planner. `uri` is the folder, or a ``….safetensors``;
    `model` is noted beside them; `engine` is its name and version where it is not installed here. `artifacts`
    and `storage` are settings, those of the environment where none are given; `progress` is told bytes as
    they go.

    Raises SettingsError where no kinds are named, StorageMissing where their folders hold nothing, and what
    `write_snapshot` raises.
    """
    told = artifacts or options.load(ArtifactSettings)
    wanted = places(told)
    if not wanted:
        raise SettingsError(OFF, hint=HOW)
    key = key_of_here(engine)
    packed = pack(wanted, key, told)
    if packed is None:
        folders = ", ".join(str(place.folder) for place in wanted)
        raise StorageMissing(
            f"no files in {folders}", hint="save them once the engine has compiled something"
        )
    written = write_snapshot(
        packed.image,
        seal(packed.image),
        uri_of(uri, key),
        model=name_of(model, key),
        progress=progress,
        settings=storage,
    )
    return written, packed


def load(
    uri: str,
    *,
    engine: str | None = None,
    artifacts: ArtifactSettings | None = None,
    storage: StorageSettings | None = None,
    progress: Callable[[int], None] | None = None,
) -> ArtifactReport:
    """Take the JIT caches that were saved there for a machine as this one; else as `rfork.artifacts.fetch`.

    Runs in the process that calls it, and asks no planner; `uri`, `engine`, `artifacts`, `storage` and
    `progress` are as for `rfork.artifacts.save`. Nothing there, another key, damaged files, storage that does
    not answer: a report with its reason. Raises UserError kinds alone.
    """
    told = artifacts or options.load(ArtifactSettings)
    chosen = storage or options.load(StorageSettings)
    began = time.monotonic()
    wanted = places(told)
    report = ArtifactReport(ANY_MODEL, "")
    if not wanted:
        return replace(report, reason=f"{OFF}: {HOW}")
    key = key_of_here(engine)
    report = replace(report, key=key.id)
    named = uri_of(uri, key)
    deadline = began + told.deadline_s
    left = max(deadline - time.monotonic(), LEAST_S)
    bounded = chosen.model_copy(update={"timeout_s": min(chosen.timeout_s, left)})

    def read() -> tuple[Image, str]:
        folder, name = place_of(named)
        try:
            files = open_files(folder, name, bounded)
        except StorageMissing as missing:
            others = _others(folder, key, bounded) if not is_file(uri) else ""
            raise StorageMissing(f"{missing}; {others}" if others else str(missing)) from None
        layout = layout_of(files.head)
        with closing(Snapshot(files, layout, bounded)) as snapshot:
            check(told, wanted)(layout)
            _, tensors = allocate(layout)
            image = image_of(tensors)
            snapshot.fill(image, progress=arrived)
            return image, snapshot.uri

    def arrived(count: int) -> None:
        if time.monotonic() > deadline:
            raise DeadlinePassed(over)
        if progress is not None:
            progress(count)

    over = f"the {told.deadline_s:g} s for taking artifacts are over"
    try:
        # Storage may hang for longer than is left: then the read is left behind, with its memory.
        reading = Attempt(named, read, lambda _: None)
        try:
            image, source = reading.result(deadline)
        except StorageError:
            if time.monotonic() >= deadline:
                raise DeadlinePassed(over) from None
            raise
        report = place_image(image, wanted, key, told, deadline, replace(report, source=source))
    except SourceCorrupt as error:
        wrong = StorageCorrupt(f"{named}: {error}")
        report = replace(report, reason=f"{wrong.kind}: {wrong}")
    except UserError:
        raise
    except RforkError as error:
        report = replace(report, reason=f"{error.kind}: {error}")
    report = replace(report, seconds=round(time.monotonic() - began, 3))
    log.info("artifacts", report=report.line())
    return report


def _others(folder: Location, key: ArtifactKey, settings: StorageSettings) -> str:
    """What lies there for other machines, as far as storage tells."""
    from rfork.storage.snapshots.repository import Repository

    try:
        found = Repository(folder, settings).contents().snapshots
    except (StorageError, SettingsError) as error:
        log.debug("not listed", folder=folder.uri, because=str(error))
        return ""
    return other_keys((one.told.model or "" for one in found if one.told is not None), key)
