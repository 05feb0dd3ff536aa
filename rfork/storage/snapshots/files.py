"""What a snapshot consists of in storage: its names, its manifest, and its data as one blob.

The data of a rank is one safetensors file, ``model-rank-000.safetensors``; in the shared form its header and
chunks lie in a folder of chunks instead, each under the name of its digest, and no file of that name exists.
Either way the manifest beside it, ``model-rank-000.safetensors.manifest.json``, is written last, and says
which it is. Runs wherever weights are read or written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rfork.errors import CheckpointError, StorageCorrupt, StorageNotFound
from rfork.image.chunks import Chunks
from rfork.image.digest import digest_bytes
from rfork.image.layout import Layout
from rfork.image.manifest import Manifest
from rfork.image.safetensors_header import weights_id_of
from rfork.schema import Rank
from rfork.schema.types import HexId, ModelName, WeightsVersion
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.blob import HEAD_BYTES, Blob, BlobStore, read_range
from rfork.storage.location import Location
from rfork.storage.snapshots.chunked_blob import ChunkedBlob

DATA_SUFFIX = ".safetensors"
MANIFEST_SUFFIX = ".manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
SHARED_CHUNKS_PATH = "../chunks/"
"""Where shared chunks lie, seen from a revision's folder: one folder for all revisions of a model."""

CHUNKS_FOLDER: Final = re.compile(r"(\.\./)*[A-Za-z0-9_][A-Za-z0-9_.-]*/")
"""Right below a folder that the snapshot lies in: all who share chunks lie below that one."""

ChunksFolder = Annotated[str, Field(max_length=1024, pattern=f"^{CHUNKS_FOLDER.pattern}$")]


class ManifestFile(BaseModel):
    """The JSON file beside a snapshot."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["rfork-manifest-v1"] = "rfork-manifest-v1"
    model: ModelName | None = Field(None, description="what it is a snapshot of, where the writer knew")
    version: WeightsVersion | None = Field(
        None, description="version of the weights, of all ranks together; none: not recorded"
    )
    rank: Rank = Rank()
    layout_id: HexId
    weights_id: HexId
    image_bytes: int = Field(ge=0)
    header_bytes: int = Field(ge=8, description="where the data section starts in the file")
    header: HexId = Field(description="digest of the header")
    digests: tuple[HexId, ...] = Field(description="one a chunk, in chunk order")
    chunks: ChunksFolder | None = Field(
        None, description="folder of the shared chunks, seen from this file; none: one file holds all"
    )

    @model_validator(mode="after")
    def _check_consistent(self) -> Self:
        if len(self.digests) != len(Chunks.of(self.image_bytes)):
            raise ValueError(f"{len(self.digests)} digests for {self.image_bytes} bytes")
        return self

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Digest and bytes of the header and of each chunk: what the file consists of, in its order."""
        cut = Chunks.of(self.image_bytes)
        named = zip(self.digests, (end - begin for begin, end in cut), strict=True)
        return ((self.header, self.header_bytes), *named)

    @property
    def objects(self) -> tuple[tuple[str, int], ...]:
        """The same by the names that they have, or would have, in the folder of chunks."""
        return tuple((object_name(digest, length), length) for digest, length in self.parts)

    def manifest(self, layout: Layout) -> Manifest:
        """As the manifest of a layout; raises StorageCorrupt where the file does not fit it, or itself."""
        if (self.layout_id, self.image_bytes) != (layout.layout_id, layout.image_bytes):
            raise StorageCorrupt("the manifest is of another layout than its snapshot")
        manifest = Manifest(layout, tuple(bytes.fromhex(digest) for digest in self.digests))
        if manifest.weights_id != self.weights_id:
            raise StorageCorrupt("the manifest's digests do not hash to its weights_id")
        return manifest


@dataclass(frozen=True, slots=True)
class SnapshotFiles:
    """A snapshot that is open: its manifest, its header, and its data, whole, in either form."""

    uri: str
    manifest_file: ManifestFile
    head: bytes
    data: Blob


def snapshot_name(rank: Rank) -> str:
    """The name of a rank's file in a folder: ``model-rank-%03d.safetensors``, or ``speculative-rank-…``.

    The number is ``pp * tp_size + tp``. Where expert parallelism cuts other than along `tp`, ``-ep-%03d``
    follows: no two ranks of a replica share a name.
    """
    role = "model" if rank.role == "main" else rank.role
    along = rank.ep == rank.tp * rank.ep_size // rank.tp_size
    expert = "" if along else f"-ep-{rank.ep:03d}"
    return f"{role}-rank-{rank.pp * rank.tp_size + rank.tp:03d}{expert}{DATA_SUFFIX}"


def manifest_name(name: str) -> str:
    """The name of the manifest beside the file of this name."""
    return name.partition("?")[0] + MANIFEST_SUFFIX


def object_name(digest: str, length: int) -> str:
    """The name of a shared object in its folder."""
    return f"{digest[:2]}/{digest}-{length}"


def snapshot_location(uri: str | Path, rank: Rank | None = None) -> tuple[Location, str]:
    """The folder and the name of the snapshot that a URI means: a ``….safetensors``, or a rank's in a folder.

    Raises SettingsError for what is no URI of storage.
    """
    location = Location.parse(uri)
    if is_file(uri):
        return location.parent, location.name + (f"?{location.query}" if location.query else "")
    return location.folder, snapshot_name(rank or Rank())


def is_file(uri: str | Path) -> bool:
    """Whether a URI means one file, and not a folder of them."""
    return Location.parse(uri).name.endswith(DATA_SUFFIX)


def chunk_folder(folder: Location, relative: str) -> Location:
    """The folder of chunks that a manifest in `folder` means; StorageCorrupt where that is outside of all."""
    path = folder.folder.path
    while relative.startswith("../"):
        if not path.strip("/"):
            raise StorageCorrupt(f"{folder.uri} has no folder above it for {relative}")
        relative = relative.removeprefix("../")
        head, slash, _ = path[:-1].rpartition("/")
        path = head + slash
    return Location(folder.scheme, folder.host, path + relative)


def read_manifest(store: BlobStore, name: str) -> ManifestFile:
    """The manifest of that name. Raises StorageNotFound, StorageCorrupt and other StorageErrors."""
    blob = store.open(name, front=HEAD_BYTES)
    try:
        if blob.size > MAX_MANIFEST_BYTES:
            raise StorageCorrupt(f"{blob.uri} is too long for a manifest")
        text = read_range(blob, 0, blob.size)
    finally:
        blob.close()
    try:
        return ManifestFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][:1]))
        why = f"{where}: {first['msg']}".removeprefix(": ")
        raise StorageCorrupt(f"{blob.uri} is not a manifest: {why}") from None


@contextmanager
def folder_store(folder: Location, settings: StorageSettings | None) -> Iterator[BlobStore]:
    """The store at a folder, for the length of the block."""
    store = registry.open_store(folder, settings)
    try:
        yield store
    finally:
        store.close()


def open_files(folder: Location, name: str, settings: StorageSettings | None = None) -> SnapshotFiles:
    """Open the snapshot of that name, whichever its form: manifest and header are read and fit one another.

    Raises StorageNotFound (nothing there), CheckpointError (a file without a manifest), StorageCorrupt (cut
    short, or of other weights than its manifest) and what the store raises.
    """
    with folder_store(folder, settings) as store:
        try:
            manifest_file = read_manifest(store, manifest_name(name))
        except StorageNotFound as missing:
            raise _no_manifest(store, name, missing) from None
        data = open_data(store, folder, name, manifest_file, settings)
    try:
        if data.size != manifest_file.header_bytes + manifest_file.image_bytes:
            promised = manifest_file.header_bytes + manifest_file.image_bytes
            raise StorageCorrupt(f"{data.uri} has {data.size} bytes, its manifest promises {promised}")
        head = read_range(data, 0, manifest_file.header_bytes)
        if weights_id_of(head) != manifest_file.weights_id:
            raise StorageCorrupt(
                f"{data.uri} and its manifest are of different weights",
                hint="somebody writes it now, or died while writing: write the snapshot again",
            )
        if digest_bytes([memoryview(head)]).hex() != manifest_file.header:
            raise StorageCorrupt(f"{data.uri}: its header does not match its digest")
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
    """The data that a manifest in `folder` (whose store is `store`) describes, as one safetensors file."""
    if manifest_file.chunks is None:
        return store.open(name, front=manifest_file.header_bytes)
    chunks = registry.open_store(chunk_folder(folder, manifest_file.chunks), settings)
    return ChunkedBlob(folder.child(name).uri, chunks, manifest_file.objects)


def open_safetensors(location: Location, settings: StorageSettings | None = None) -> Blob:
    """The safetensors file at a location, also where it only exists as shared chunks.

    For readers of tensors: what the manifest says of the bytes is not looked at where the file is there.
    """
    folder, name = location.parent, location.name + (f"?{location.query}" if location.query else "")
    with folder_store(folder, settings) as store:
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
    try:
        data = store.open(name)
    except StorageNotFound:
        return StorageNotFound(f"{store.uri}{name.partition('?')[0]}: there is no snapshot", hint=missing.hint)
    data.close()
    return CheckpointError(f"{data.uri} has no manifest beside it, so it is no snapshot, or half of one")
