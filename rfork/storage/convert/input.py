"""Input of a conversion: which rank it belongs to, and verification of its bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from pydantic import ValidationError

from rfork.errors import CheckpointError, SettingsError, StorageAccessDenied, StorageCorrupt, StorageNotFound
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.formats.detect import INDEX_SUFFIX, open_source
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.location import Location
from rfork.storage.snapshots.entry import SnapshotEntry, read_entry
from rfork.storage.snapshots.files import DATA_SUFFIX, MANIFEST_SUFFIX, snapshot_location
from rfork.storage.snapshots.verifier import SnapshotVerifier
from rfork.storage.tensorizer.encryption import Secret
from rfork.storage.tensorizer.file_set import SUFFIX, is_template
from rfork.storage.tensors import TensorSource

_RANK_FILE = re.compile(
    rf"(?P<rank>(model|speculative)-rank-\d+(-ep-\d+)?)(-\d{{5}}-of-\d{{5}})?"
    rf"({re.escape(DATA_SUFFIX)}({re.escape(MANIFEST_SUFFIX)})?|{re.escape(SUFFIX)})"
)


def rank_from_number(number: int) -> Rank:
    """Return a rank with this number in file names. Raises SettingsError if the number is out of range."""
    try:
        return Rank(tp=number, tp_size=number + 1)
    except ValidationError:
        raise SettingsError(f"{number} is not a valid rank") from None


@contextmanager
def open_input(
    source: str, settings: StorageSettings, rank: Rank | None, unlock: Secret | None
) -> Iterator[tuple[TensorSource, Rank | None]]:
    """Yield the tensors of `source` (of `rank` if it is a folder with several) and its rank, if known.

    Raises SettingsError if a folder contains several ranks and `rank` is None, or if `source` is a single
    file and `rank` is set.
    """
    location = Location.parse(source)
    of_one = location.name.endswith((SUFFIX, DATA_SUFFIX, INDEX_SUFFIX)) and not is_template(source)
    if of_one and rank is not None:
        raise SettingsError(
            f"{location.uri} already names the file of one rank", hint="pass its folder, or omit --rank"
        )
    key, password = (unlock.key, unlock.password) if unlock is not None else (None, None)
    with closing(open_source(source, settings, rank, key=key, password=password)) as input_source:
        if not of_one and rank is None:
            _reject_several(Location.parse(input_source.uri), settings)
        yield input_source, _manifest_rank(input_source, settings) or rank


def verify(
    source: str,
    input_source: TensorSource,
    settings: StorageSettings,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Compare a snapshot's bytes with its manifest. Other sources are accepted unchecked.

    Raises StorageCorrupt, and the store's errors. If a file is replaced after this check, reading it fails,
    because it was opened before.
    """
    location = Location.parse(source)
    # A signature is valid for one object only, so the manifest cannot be requested.
    if location.query or not isinstance(input_source, SafetensorsSource) or input_source.layout is None:
        return
    folder, name = snapshot_location(input_source.uri)
    try:
        result = SnapshotVerifier(settings, progress).verify(SnapshotEntry(folder, name, None))
    except CheckpointError:  # there is no manifest
        return
    if result.mismatches:
        raise StorageCorrupt(
            f"{result.mismatches[0]} ({len(result.mismatches)} in total)",
            hint="run `rfork snapshot verify` to list all damage; a converted file would appear intact",
        )


def _manifest_rank(input_source: TensorSource, settings: StorageSettings) -> Rank | None:
    """Return the rank recorded in a snapshot's manifest."""
    location = Location.parse(input_source.uri)
    if not isinstance(input_source, SafetensorsSource) or input_source.layout is None or location.query:
        return None
    try:
        manifest_file = read_entry(*snapshot_location(input_source.uri), settings).manifest_file
    except (
        StorageNotFound,
        StorageCorrupt,
        StorageAccessDenied,
    ):  # not a snapshot, or `verify` reports the problem
        return None
    return manifest_file.rank if manifest_file is not None else None


def _reject_several(chosen: Location, settings: StorageSettings) -> None:
    if not _RANK_FILE.fullmatch(chosen.name):
        return
    with closing(registry.open_store(chosen.parent, settings)) as store:
        try:
            ranks_found = [match["rank"] for entry in store.list() if (match := _RANK_FILE.fullmatch(entry.name))]
        except (SettingsError, StorageAccessDenied):  # storage that cannot be listed
            return
    ranks = sorted(set(ranks_found))
    if len(ranks) > 1:
        raise SettingsError(
            f"{chosen.parent.uri} contains {len(ranks)} ranks: {ranks[0]}, {ranks[1]}" + " …" * (len(ranks) > 2),
            hint="select one with --rank, or pass its file",
        )
