"""Artifacts in storage: written as a snapshot, one for each key, and taken from there. On either side."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from rfork import settings as options
from rfork.artifacts.cache_types import cache_dirs
from rfork.artifacts.client import MIN_TIMEOUT_S, install_image, other_keys, validate_layout
from rfork.artifacts.key import ArtifactKey, local_key, name_of
from rfork.artifacts.pack import Packed, pack
from rfork.artifacts.report import ArtifactReport
from rfork.artifacts.server import DISABLED_MESSAGE, ENABLE_HINT
from rfork.errors import (
    DeadlineExceeded,
    RforkError,
    SettingsError,
    SourceCorrupt,
    StorageCorrupt,
    StorageError,
    StorageNotFound,
    UserError,
)
from rfork.image.buffer_views import allocate_buffer
from rfork.image.capture import image_from_tensors
from rfork.image.memory import Image
from rfork.image.safetensors_header import layout_of
from rfork.logs import logger
from rfork.settings import ArtifactSettings, StorageSettings
from rfork.source.image_state import compute_manifest
from rfork.storage.abandonable_call import AbandonableCall
from rfork.storage.location import Location
from rfork.storage.snapshots.files import is_file, open_files, snapshot_location
from rfork.storage.snapshots.snapshot import Snapshot
from rfork.storage.snapshots.writer import WriteReport, write_snapshot

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
) -> tuple[WriteReport, Packed]:
    """Write the JIT caches of this machine to storage (file:///…, s3://…): a folder has one file a key.

    Runs in the process that calls it, and asks no planner. `uri` is the folder, or a ``….safetensors``;
    `model` is noted beside them; `engine` is its name and version where it is not installed here. `artifacts`
    and `storage` are settings, those of the environment where none are given; `progress` is told bytes as
    they go.

    Raises SettingsError where no kinds are named, StorageNotFound where their folders hold nothing, and what
    `write_snapshot` raises.
    """
    artifact_settings = artifacts or options.load(ArtifactSettings)
    wanted = cache_dirs(artifact_settings)
    if not wanted:
        raise SettingsError(DISABLED_MESSAGE, hint=ENABLE_HINT)
    key = local_key(engine)
    packed = pack(wanted, key, artifact_settings)
    if packed is None:
        folders = ", ".join(str(cache_dir.folder) for cache_dir in wanted)
        raise StorageNotFound(f"no files in {folders}", hint="save them once the engine has compiled something")
    written = write_snapshot(
        packed.image,
        compute_manifest(packed.image),
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
    artifact_settings = artifacts or options.load(ArtifactSettings)
    chosen = storage or options.load(StorageSettings)
    began = time.monotonic()
    wanted = cache_dirs(artifact_settings)
    report = ArtifactReport(ANY_MODEL, "")
    if not wanted:
        return replace(report, reason=f"{DISABLED_MESSAGE}: {ENABLE_HINT}")
    key = local_key(engine)
    report = replace(report, key=key.id)
    named = uri_of(uri, key)
    deadline = began + artifact_settings.deadline_s
    left = max(deadline - time.monotonic(), MIN_TIMEOUT_S)
    bounded = chosen.model_copy(update={"timeout_s": min(chosen.timeout_s, left)})

    def read() -> tuple[Image, str]:
        folder, name = snapshot_location(named)
        try:
            files = open_files(folder, name, bounded)
        except StorageNotFound as missing:
            others = _other_keys_hint(folder, key, bounded) if not is_file(uri) else ""
            raise StorageNotFound(f"{missing}; {others}" if others else str(missing)) from None
        layout = layout_of(files.head)
        with closing(Snapshot(files, layout, bounded)) as snapshot:
            validate_layout(artifact_settings, wanted)(layout)
            _, tensors = allocate_buffer(layout)
            image = image_from_tensors(tensors)
            snapshot.fill(image, progress=check_deadline)
            return image, snapshot.uri

    def check_deadline(count: int) -> None:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(timeout_message)
        if progress is not None:
            progress(count)

    timeout_message = f"the {artifact_settings.deadline_s:g} s for taking artifacts are over"
    try:
        # Storage may hang for longer than is left: then the read is left behind, with its memory.
        reading = AbandonableCall(named, read, lambda _: None)
        try:
            image, source = reading.result(deadline)
        except StorageError:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(timeout_message) from None
            raise
        report = install_image(image, wanted, key, artifact_settings, deadline, replace(report, source=source))
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


def _other_keys_hint(folder: Location, key: ArtifactKey, settings: StorageSettings) -> str:
    """What lies there for other machines, as far as storage tells."""
    from rfork.storage.snapshots.repository import Repository

    try:
        found = Repository(folder, settings).contents().snapshots
    except (StorageError, SettingsError) as error:
        log.debug("not listed", folder=folder.uri, because=str(error))
        return ""
    return other_keys((one.manifest_file.model or "" for one in found if one.manifest_file is not None), key)
