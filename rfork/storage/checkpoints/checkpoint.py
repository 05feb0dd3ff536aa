"""A checkpoint of safetensors files in any store, loaded into a module that exists.

The last source but the caller's own loader: it needs no peer and no planner. Most checkpoints can also
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
    """A checkpoint whose files were all there, and whole, when it was opened; holds none of them open."""

    uri: str
    names: frozenset[str]
    settings: StorageSettings
    _requested_uri: str = field(repr=False)  # with a presigned URL's query, which is a secret

    @classmethod
    def open(cls, uri: str | Path, settings: StorageSettings | None = None) -> Checkpoint:
        """Find the files at a URI or path (see `formats.choice.open_source`) and check their headers.

        Raises CheckpointError that names what is missing, or for a snapshot: it is not verified by this way;
        StorageCorrupt for a file that is cut short or
        none, and other StorageErrors.
        """
        chosen = settings or options.load(StorageSettings)
        with closing(_opened(uri, chosen)) as source:
            return cls(Location.parse(uri).uri, frozenset(source.locations), chosen, str(uri))

    def source(self) -> SafetensorsSource:
        """Open it again, for the caller to close. Raises as `open` does."""
        return _opened(self._requested_uri, self.settings)

    def load_into(self, module: nn.Module, progress: Callable[[int], None] | None = None) -> None:
        """Load the module's parameters and persistent buffers, as torch's strict `load_state_dict` does.

        Converts the dtype where it differs. `progress` is told bytes as they come. Raises CheckpointError
        when a tensor is missing, unknown or has another shape, before the first one is written, but for what
        modules refuse that load their state themselves; StorageError kinds when a file cannot be read: the
        module's content is then undefined.
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
            f"{source.uri} is a snapshot of rfork: give it as snapshot=",
            hint="as a checkpoint none of its bytes would be checked against their digests",
        )
    return source
