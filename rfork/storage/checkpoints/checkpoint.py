"""A checkpoint of safetensors files in any store, loaded into an existing module.

The last fallback before the caller's own loader: it needs neither peer nor planner. Most checkpoints can also
be read chunk by chunk; see `rfork.storage.checkpoints.chunked`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from rfork import settings as options
from rfork.errors import CheckpointError
from rfork.settings import StorageSettings
from rfork.storage.formats.detect import open_checkpoint
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.location import Location
from rfork.storage.module_io.assignment import assign


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were present and complete when it was opened. Keeps no file open."""

    uri: str
    names: frozenset[str]
    settings: StorageSettings
    _requested_uri: str = field(repr=False)  # includes the query of a presigned URL, which is a secret

    @classmethod
    def open(cls, uri: str | Path, settings: StorageSettings | None = None) -> Checkpoint:
        """Find the files at a URI or path (see `formats.detect.open_source`) and check their headers.

        Raises CheckpointError if something is missing, or if it is a snapshot, whose bytes would not be
        verified; StorageCorrupt if a file is truncated or malformed; and other StorageErrors.
        """
        chosen = settings or options.load(StorageSettings)
        with closing(_opened(uri, chosen)) as source:
            return cls(Location.parse(uri).uri, frozenset(source.locations), chosen, str(uri))

    def source(self) -> SafetensorsSource:
        """Open the tensor source again; the caller closes it. Raises the same errors as `open`."""
        return _opened(self._requested_uri, self.settings)

    def load_into(self, module: nn.Module, progress: Callable[[int], None] | None = None) -> None:
        """Load the module's parameters and persistent buffers, like torch's strict `load_state_dict`.

        Converts dtypes where they differ. `progress` receives byte counts. Raises CheckpointError if a tensor
        is missing, unknown or has another shape, before anything is written (except by modules that load
        their own state); StorageError subclasses if a file cannot be read: the content of the module is then
        undefined.
        """
        with closing(self.source()) as source:
            assigned = assign(module, source)
            assigned.require_all()
            assigned.load_own(source, strict=True, progress=progress)
            assigned.fill(source, progress)


def _opened(uri: str | Path, settings: StorageSettings) -> SafetensorsSource:
    source = open_checkpoint(uri, settings)
    if any(shard.layout is not None for shard in source.shards):
        source.close()
        raise CheckpointError(
            f"{source.uri} is an rfork snapshot: pass it as snapshot=",
            hint="loaded as a checkpoint, its bytes would not be verified against their digests",
        )
    return source
