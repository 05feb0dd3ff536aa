"""Snapshots in storage: names, manifest, data as one blob, and a description that does not read the data.

The data of a rank is one safetensors file, ``model-rank-000.safetensors``. In the shared form, that file does
not exist: its header and chunks are stored in a folder of chunks, named by their digests. In both forms, the
manifest next to it, ``model-rank-000.safetensors.manifest.json``, is written last, and specifies the form.
Runs wherever weights are read or written.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from rfork.errors import CheckpointError, SettingsError, StorageAccessDenied, StorageCorrupt, StorageNotFound
from rfork.image.chunks import Chunks
from rfork.image.digest import digest_bytes
from rfork.image.layout import Layout, Manifest
from rfork.image.safetensors_header import weights_id_of
from rfork.schema import HexId, ModelName, Rank, WeightsVersion
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.blob import HEAD_BYTES, Blob, BlobStore, read_range, size_of
from rfork.storage.location import Location
from rfork.storage.snapshots.chunked_blob import ChunkedBlob

DATA_SUFFIX = ".safetensors"
MANIFEST_SUFFIX = ".manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
SHARED_CHUNKS_PATH = "../chunks/"
"""Folder of shared chunks, relative to a revision's folder: one for all revisions of a model."""

CHUNKS_FOLDER: Final = re.compile(r"(\.\./)*[A-Za-z0-9_][A-Za-z0-9_.-]*/")
"""Must be directly below an ancestor of the snapshot's folder: all snapshots that share chunks are below that
one.
"""

ChunksFolder = Annotated[str, Field(max_length=1024, pattern=f"^{CHUNKS_FOLDER.pattern}$")]

RANK_FILE_PATTERN: Final = re.compile(r"(.*/)?(model|speculative)-rank-[0-9]{3,}(-ep-[0-9]{3,})?\.safetensors")


class ManifestFile(BaseModel):
    """Content of the JSON manifest of a snapshot."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["rfork-manifest-v1"] = "rfork-manifest-v1"
    model: ModelName | None = Field(None, description="model of the snapshot, if the writer knew it")
    version: WeightsVersion | None = Field(
        None, description="version of the weights, common to all ranks; none: not recorded"
    )
    rank: Rank = Rank()
    layout_id: HexId
    weights_id: HexId
    image_bytes: int = Field(ge=0)
    header_bytes: int = Field(ge=8, description="offset of the data section in the file")
    header: HexId = Field(description="digest of the header")
    digests: tuple[HexId, ...] = Field(description="one per chunk, in chunk order")
    chunks: ChunksFolder | None = Field(
        None, description="folder of the shared chunks, relative to this file; none: a single file"
    )

    @model_validator(mode="after")
    def _check_consistent(self) -> Self:
        if len(self.digests) != len(Chunks.of(self.image_bytes)):
            raise ValueError(f"{len(self.digests)} digests for {self.image_bytes} bytes")
        return self

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Digest and size of the header and of each chunk, in file order."""
        sizes = (end - begin for begin, end in Chunks.of(self.image_bytes))
        return ((self.header, self.header_bytes), *zip(self.digests, sizes, strict=True))

    @property
    def objects(self) -> tuple[tuple[str, int], ...]:
        """Object name and size of each part, as in the folder of chunks."""
        return tuple((object_name(digest, length), length) for digest, length in self.parts)

    def manifest(self, layout: Layout) -> Manifest:
        """Return the manifest for a layout; raises StorageCorrupt if it does not match the layout, or is
        inconsistent.
        """
        if (self.layout_id, self.image_bytes) != (layout.layout_id, layout.image_bytes):
            raise StorageCorrupt("the manifest has another layout than its snapshot")
        manifest = Manifest(layout, tuple(bytes.fromhex(digest) for digest in self.digests))
        if manifest.weights_id != self.weights_id:
            raise StorageCorrupt("the manifest's digests do not match its weights_id")
        return manifest


@dataclass(frozen=True, slots=True)
class SnapshotFiles:
    """An open snapshot: manifest, header, and the data as one blob, in either form."""

    uri: str
    manifest_file: ManifestFile
    head: bytes
    data: Blob


def snapshot_name(rank: Rank) -> str:
    """Return the name of a rank's file in a folder: ``model-rank-%03d.safetensors``, or
    ``speculative-rank-…``.

    The number is ``pp * tp_size + tp``. If expert parallelism does not follow `tp`, ``-ep-%03d`` is appended,
    so that all ranks of a replica have different names.
    """
    role = "model" if rank.role == "main" else rank.role
    along = rank.ep == rank.tp * rank.ep_size // rank.tp_size
    expert = "" if along else f"-ep-{rank.ep:03d}"
    return f"{role}-rank-{rank.pp * rank.tp_size + rank.tp:03d}{expert}{DATA_SUFFIX}"


def manifest_name(name: str) -> str:
    """Return the name of the manifest of a file."""
    return name.partition("?")[0] + MANIFEST_SUFFIX


def object_name(digest: str, length: int) -> str:
    """Return the name of a shared object in its folder."""
    return f"{digest[:2]}/{digest}-{length}"


def snapshot_location(uri: str | Path, rank: Rank | None = None) -> tuple[Location, str]:
    """Return folder and name of the snapshot at a URI: a ``….safetensors`` file, or a rank's file in a
    folder.

    Raises SettingsError for an invalid URI.
    """
    location = Location.parse(uri)
    if is_file(uri):
        return location.parent, location.blob_name
    return location.folder, snapshot_name(rank or Rank())


def is_file(uri: str | Path) -> bool:
    """Return True if a URI refers to a file rather than a folder."""
    return Location.parse(uri).name.endswith(DATA_SUFFIX)


def chunk_folder(folder: Location, relative: str) -> Location:
    """Return the chunk folder of a manifest in `folder`; raises StorageCorrupt if it is above the root."""
    path = folder.folder.path
    while relative.startswith("../"):
        if not path.strip("/"):
            raise StorageCorrupt(f"{folder.uri} has no parent folder for {relative}")
        relative = relative.removeprefix("../")
        head, slash, _ = path[:-1].rpartition("/")
        path = head + slash
    return Location(folder.scheme, folder.host, path + relative)


def read_manifest(store: BlobStore, name: str) -> ManifestFile:
    """Read a manifest. Raises StorageNotFound, StorageCorrupt and other StorageErrors."""
    with closing(store.open(name, front=HEAD_BYTES)) as blob:
        if blob.size > MAX_MANIFEST_BYTES:
            raise StorageCorrupt(f"{blob.uri} is too large for a manifest")
        text = read_range(blob, 0, blob.size)
    try:
        return ManifestFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][:1]))
        why = f"{where}: {first['msg']}".removeprefix(": ")
        raise StorageCorrupt(f"{blob.uri} is not a manifest: {why}") from None


def open_files(folder: Location, name: str, settings: StorageSettings | None = None) -> SnapshotFiles:
    """Open a snapshot in either form: reads manifest and header, and checks that they match.

    Raises StorageNotFound (nothing there), CheckpointError (a file without a manifest), StorageCorrupt
    (truncated, or other weights than the manifest) and the store's errors.
    """
    with closing(registry.open_store(folder, settings)) as store:
        try:
            manifest_file = read_manifest(store, manifest_name(name))
        except StorageNotFound as missing:
            raise _no_manifest(store, name, missing) from None
        data = open_data(store, folder, name, manifest_file, settings)
    try:
        if data.size != manifest_file.header_bytes + manifest_file.image_bytes:
            promised = manifest_file.header_bytes + manifest_file.image_bytes
            raise StorageCorrupt(f"{data.uri} has {data.size} bytes, but {promised} according to its manifest")
        head = read_range(data, 0, manifest_file.header_bytes)
        if weights_id_of(head) != manifest_file.weights_id:
            raise StorageCorrupt(
                f"{data.uri} and its manifest belong to different weights",
                hint="it is still being written, or the writer died: write the snapshot again",
            )
        if digest_bytes([memoryview(head)]).hex() != manifest_file.header:
            raise StorageCorrupt(f"{data.uri}: the header does not match its digest")
    except BaseException:
        data.close()
        raise
    return SnapshotFiles(data.uri, manifest_file, head, data)


def open_data(
    store: BlobStore,
    folder: Location,
    name: str,
    manifest_file: ManifestFile,
    settings: StorageSettings | None = None,
) -> Blob:
    """Open the data described by a manifest in `folder` (whose store is `store`) as one safetensors file."""
    if manifest_file.chunks is None:
        return store.open(name, front=manifest_file.header_bytes)
    chunks = registry.open_store(chunk_folder(folder, manifest_file.chunks), settings)
    return ChunkedBlob(folder.child(name).uri, chunks, manifest_file.objects)


def open_safetensors(location: Location, settings: StorageSettings | None = None) -> Blob:
    """Open the safetensors file at a location, even if it only exists as shared chunks.

    For readers of tensors: if the file exists, its manifest is ignored.
    """
    folder, name = location.parent, location.blob_name
    with closing(registry.open_store(folder, settings)) as store:
        try:
            return store.open(name, front=HEAD_BYTES)
        except StorageNotFound:
            try:
                manifest_file = read_manifest(store, manifest_name(name))
            except StorageNotFound:
                manifest_file = None
            if manifest_file is None or manifest_file.chunks is None:
                raise
        return open_data(store, folder, name, manifest_file, settings)


def _no_manifest(store: BlobStore, name: str, missing: StorageNotFound) -> StorageNotFound | CheckpointError:
    uri = f"{store.uri}{name.partition('?')[0]}"
    if size_of(store, name) is None:
        return StorageNotFound(f"no snapshot at {uri}", hint=missing.hint)
    return CheckpointError(f"{uri} has no manifest, so it is not a snapshot, or an incomplete one")


FORMAT: Final = str(ManifestFile.model_fields["format"].default).encode()


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """One snapshot in `folder`. `manifest_file` is None if the manifest cannot be read.

    `problem` describes damage that is visible without reading the data. `shared` are the bytes of its objects
    that other listed snapshots use too.
    """

    folder: Location
    name: str
    manifest_file: ManifestFile | None
    problem: str | None = None
    shared: int = 0

    @property
    def uri(self) -> str:
        """Location of its safetensors file, even if it only exists as shared chunks."""
        return self.folder.child(self.name).uri

    @property
    def size(self) -> int:
        """Size of that file in bytes."""
        return self.manifest_file.header_bytes + self.manifest_file.image_bytes if self.manifest_file is not None else 0

    @property
    def objects(self) -> dict[str, int]:
        """Path and size of each object in the shared form; empty for a single file."""
        if self.manifest_file is None or self.manifest_file.chunks is None:
            return {}
        chunks_path = chunk_folder(self.folder, self.manifest_file.chunks).path
        return {chunks_path + name: length for name, length in self.manifest_file.objects}


def read_entry(folder: Location, name: str, settings: StorageSettings | None = None) -> SnapshotEntry:
    """Return the snapshot of this name, with its `problem` (except missing shared chunks if storage cannot be
    listed).

    Raises StorageNotFound if there is none, StorageCorrupt if the file with its manifest's name belongs to
    another program, and other StorageErrors.
    """
    manifest = manifest_name(name)
    with closing(registry.open_store(folder, settings)) as store:
        try:
            manifest_file = read_manifest(store, manifest)
        except StorageNotFound as missing:
            raise _no_snapshot(store, folder, name, missing) from None
        except StorageCorrupt as error:
            if is_foreign_manifest(store, manifest, strict=False):
                raise
            return SnapshotEntry(folder, name, None, str(error))
        entry = SnapshotEntry(folder, name, manifest_file)
        sizes: dict[str, int] = {}
        if manifest_file.chunks is None:
            if (size := size_of(store, name)) is not None:
                sizes[folder.path + name] = size
            return with_problems(entry, sizes, {})
    try:
        chunks = chunk_folder(folder, manifest_file.chunks)
        with closing(registry.open_store(chunks, settings)) as objects:
            sizes = {chunks.path + blob.name: blob.size for blob in objects.list()}
    except StorageCorrupt as error:
        return SnapshotEntry(folder, name, None, str(error))
    except StorageNotFound:
        pass
    except (SettingsError, StorageAccessDenied):
        return entry
    return with_problems(entry, sizes, Counter(entry.objects))


def _no_snapshot(store: BlobStore, folder: Location, name: str, missing: StorageNotFound) -> StorageNotFound:
    hint = missing.hint
    if size_of(store, name) is not None:
        hint = "this file has no manifest: it is a plain safetensors file, or an incomplete snapshot"
    return StorageNotFound(f"no snapshot at {folder.child(name).uri.partition('?')[0]}", hint=hint)


def is_foreign_manifest(store: BlobStore, manifest: str, *, strict: bool) -> bool:
    """Return True if an unreadable manifest belongs to another program, rather than being damaged.

    With `strict`, a file that is not JSON counts as damaged.
    """
    if RANK_FILE_PATTERN.fullmatch(manifest.removesuffix(MANIFEST_SUFFIX)):
        return False
    with closing(store.open(manifest)) as blob:
        text = read_range(blob, 0, min(blob.size, MAX_MANIFEST_BYTES))
    if FORMAT in text:
        return False
    if strict:
        try:
            json.loads(text)
        except ValueError:
            return False
    return True


def with_problems(entry: SnapshotEntry, sizes: Mapping[str, int], users: Mapping[str, int]) -> SnapshotEntry:
    """Return the entry with the problems that sizes reveal, and its shared bytes."""
    if entry.manifest_file is None:
        return entry
    problem = None
    if entry.manifest_file.chunks is None:
        size = sizes.get(entry.folder.path + entry.name)
        if size is None:
            problem = "the data is missing"
        elif size != entry.size:
            problem = f"the data has {size} bytes instead of {entry.size}"
        return SnapshotEntry(entry.folder, entry.name, entry.manifest_file, problem)
    objects = entry.objects
    damaged = [path for path, length in objects.items() if sizes.get(path) != length]
    if damaged:
        first = damaged[0].rpartition("/")[2]
        problem = f"{len(damaged)} of {len(objects)} chunks are missing or truncated, first {first}"
    shared = sum(length for path, length in objects.items() if users[path] > 1)
    return SnapshotEntry(entry.folder, entry.name, entry.manifest_file, problem, shared)
