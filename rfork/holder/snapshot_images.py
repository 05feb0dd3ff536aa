"""Images that a holder reads from snapshots, where no instance has them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from typing_extensions import Self

from rfork.errors import StorageNotFound
from rfork.image.layout import Layout
from rfork.image.safetensors_header import layout_of
from rfork.schema import ImageKey, WantedImage
from rfork.storage.snapshots.entry import (
    ManifestFile,
    SnapshotEntry,
    is_file,
    open_files,
    read_entry,
    snapshot_location,
)
from rfork.storage.snapshots.repository import Repository


@dataclass(frozen=True)
class SnapshotImages:
    """The images of the snapshots at one URI that record their model and version."""

    uri: str
    manifests: tuple[ManifestFile, ...]

    @classmethod
    def at(cls, uri: str) -> Self:
        """List the snapshots of a folder, or the one of a file. Raises StorageNotFound and other StorageError types."""
        folder, name = snapshot_location(uri)
        entries: list[SnapshotEntry] = []
        if is_file(uri):
            entries = [read_entry(folder, name)]
        else:
            repository = Repository(folder)
            entries = list(repository.entries_in(repository.contents()))
        manifests = tuple(
            entry.manifest_file
            for entry in entries
            if entry.manifest_file is not None and entry.manifest_file.model and entry.manifest_file.version
        )
        if not manifests:
            raise StorageNotFound(
                f"no snapshot with the name and version of its model found in {uri}",
                hint="write it again with `rfork snapshot write`, which records both",
            )
        return cls(uri, manifests)

    @property
    def wanted(self) -> tuple[WantedImage, ...]:
        """The images, which the holder keeps whatever the planner wants."""
        return tuple(
            WantedImage(
                model=manifest.model or "",
                version=manifest.version or "",
                rank=manifest.rank,
                layout_id=manifest.layout_id,
                image_bytes=manifest.image_bytes,
                cause="selected",
                reason=f"in snapshot {self.uri}",
            )
            for manifest in self.manifests
        )

    def layout_of(self, wanted: WantedImage) -> Layout | None:
        """Return the layout of an image if it is in the snapshots; None if it is not. Raises StorageError types."""
        if ImageKey.of(wanted) not in {ImageKey.of(image) for image in self.wanted}:
            return None
        folder, name = snapshot_location(self.uri, wanted.rank)
        files = open_files(folder, name)
        with closing(files.data):
            layout = layout_of(files.head)
        return layout if layout.layout_id == wanted.layout_id else None
