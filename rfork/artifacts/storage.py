"""Artifacts in storage, written as one snapshot per key and loaded from there. Runs on both sides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing

from rfork import settings as options
from rfork.artifacts.cache_types import CacheDir, required_cache_dirs
from rfork.artifacts.client import (
    FETCH_DEADLINE_S,
    MIN_TIMEOUT_S,
    ArtifactReport,
    install_image,
    other_keys,
    report_of,
    validate_layout,
)
from rfork.artifacts.key import ArtifactKey, local_key, name_of
from rfork.artifacts.pack import Packed, pack
from rfork.errors import (
    DeadlineExceeded,
    SettingsError,
    SourceCorrupt,
    StorageCorrupt,
    StorageError,
    StorageNotFound,
)
from rfork.image.capture import image_from_tensors
from rfork.image.layout import allocate_buffer
from rfork.image.memory import Image, compute_manifest
from rfork.image.safetensors_header import layout_of
from rfork.logs import logger
from rfork.settings import ArtifactSettings, StorageSettings
from rfork.storage.abandonable_call import AbandonableCall
from rfork.storage.location import Location
from rfork.storage.snapshots.entry import is_file, open_files, snapshot_location
from rfork.storage.snapshots.snapshot import Snapshot
from rfork.storage.snapshots.writer import WriteReport, write_snapshot

log = logger(__name__)

ANY_MODEL = "any"
"""Default model name of artifacts: a machine's cache is often shared by all of its models."""


def uri_of(uri: str, key: ArtifactKey) -> str:
    """Return the URI for artifacts of this key: in a folder the file named after it, else the file itself."""
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
    """Write the JIT caches of this machine to storage (file:///…, s3://…). A folder has one file per key.

    Runs in the calling process, without a planner. `uri` is a folder or a ``….safetensors`` file. `model` is
    recorded in the snapshot. `engine` is the engine's name and version if it is not installed here.
    `artifacts` and `storage` are settings, by default the environment's. `progress` is called with the number
    of bytes written since the last call.

    Raises SettingsError if no cache types are selected, StorageNotFound if their folders contain no files,
    and the exceptions of `write_snapshot`.
    """
    artifact_settings = artifacts or options.load(ArtifactSettings)
    selected = required_cache_dirs(artifact_settings)
    key = local_key(engine)
    packed = pack(selected, key, artifact_settings)
    if packed is None:
        folders = ", ".join(str(cache_dir.folder) for cache_dir in selected)
        raise StorageNotFound(f"no files in {folders}", hint="save artifacts after the engine has compiled its kernels")
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
    deadline_s: float = FETCH_DEADLINE_S,
    progress: Callable[[int], None] | None = None,
) -> ArtifactReport:
    """Load the JIT caches saved for a machine like this one; otherwise like `rfork.artifacts.fetch`.

    Runs in the calling process, without a planner. `uri`, `engine`, `artifacts`, `storage` and `progress` are
    those of `rfork.artifacts.save`; `deadline_s` limits the call, in seconds. If nothing is stored, the key
    differs, files are damaged, or storage does not respond, the report contains the reason. Raises only
    UserError types.
    """
    artifact_settings = artifacts or options.load(ArtifactSettings)
    chosen = storage or options.load(StorageSettings)

    def run(key: ArtifactKey, selected: Sequence[CacheDir], began: float) -> ArtifactReport:
        named = uri_of(uri, key)
        deadline = began + deadline_s
        left = max(deadline - time.monotonic(), MIN_TIMEOUT_S)
        bounded = chosen.model_copy(update={"timeout_s": min(chosen.timeout_s, left)})
        timeout_message = f"the deadline of {deadline_s:g} s passed before the artifacts were read from {named}"

        def read() -> tuple[Image, str]:
            folder, name = snapshot_location(named)
            try:
                files = open_files(folder, name, bounded)
            except StorageNotFound as missing:
                others = _other_keys_hint(folder, key, bounded) if not is_file(uri) else ""
                raise StorageNotFound(f"{missing}; {others}" if others else str(missing)) from None
            layout = layout_of(files.head)
            with closing(Snapshot(files, layout, bounded)) as snapshot:
                validate_layout(artifact_settings, selected)(layout)
                _, tensors = allocate_buffer(layout)
                image = image_from_tensors(tensors)
                snapshot.fill(image, progress=check_deadline)
                return image, snapshot.uri

        def check_deadline(count: int) -> None:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(timeout_message)
            if progress is not None:
                progress(count)

        # Storage may hang beyond the deadline: the read is then abandoned with its memory.
        reading = AbandonableCall(named, read, lambda _: None)
        try:
            image, source = reading.result(deadline)
            report = ArtifactReport(ANY_MODEL, key.id, source=source)
            return install_image(image, selected, key, artifact_settings, deadline, report)
        except SourceCorrupt as error:
            raise StorageCorrupt(f"{named}: {error}") from None
        except StorageError:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(timeout_message) from None
            raise

    return report_of("load", ANY_MODEL, engine, artifact_settings, run)


def _other_keys_hint(folder: Location, key: ArtifactKey, settings: StorageSettings) -> str:
    """Describe the artifacts stored for other machines, if storage can list them."""
    from rfork.storage.snapshots.repository import Repository

    try:
        found = Repository(folder, settings).contents().snapshots
    except (StorageError, SettingsError) as error:
        log.debug("failed to list the stored artifacts", folder=folder.uri, reason=str(error))
        return ""
    return other_keys((one.manifest_file.model or "" for one in found if one.manifest_file is not None), key)
