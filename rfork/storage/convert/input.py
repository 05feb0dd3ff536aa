"""What a conversion reads: whose rank's, and whether its bytes are right."""

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
from rfork.storage.snapshots.verify import Verifier
from rfork.storage.tensorizer.encryption import Secret
from rfork.storage.tensorizer.file_set import SUFFIX, is_template
from rfork.storage.tensors import TensorSource

_of_a_rank = re.compile(
    rf"(?P<rank>(model|draft)-rank-\d+(-ep-\d+)?)(-\d{{5}}-of-\d{{5}})?"
    rf"({re.escape(DATA_SUFFIX)}({re.escape(MANIFEST_SUFFIX)})?|{re.escape(SUFFIX)})"
)


def rank_from_number(number: int) -> Rank:
    """A rank of that number, as far as names tell it. Raises SettingsError for one that no replica has."""
    try:
        return Rank(tp=number, tp_size=number + 1)
    except ValidationError:
        raise SettingsError(f"{number} is no rank") from None


@contextmanager
def open_input(
    source: str, settings: StorageSettings, rank: Rank | None, unlock: Secret | None
) -> Iterator[tuple[TensorSource, Rank | None]]:
    """The tensors of `source`, of that rank where it is a folder with several, and what is known of its rank.

    Raises SettingsError where several ranks lie there and none is named, or one is and `source` is one file.
    """
    location = Location.parse(source)
    of_one = location.name.endswith((SUFFIX, DATA_SUFFIX, INDEX_SUFFIX)) and not is_template(source)
    if of_one and rank is not None:
        raise SettingsError(f"{location.uri} is one rank's by its name", hint="name its folder, or no rank")
    key, password = (unlock.key, unlock.password) if unlock is not None else (None, None)
    with closing(open_source(source, settings, rank, key=key, password=password)) as input_source:
        if not of_one and rank is None:
            _refuse_several(Location.parse(input_source.uri), settings)
        yield input_source, _manifest_rank(input_source, settings) or rank


def verify(
    source: str,
    input_source: TensorSource,
    settings: StorageSettings,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Compare a snapshot's bytes with its manifest; what has none is taken as it is.

    Raises StorageCorrupt, and what the store raises. That a file is replaced between this and the reading
    ends the latter: it was opened before.
    """
    location = Location.parse(source)
    # A signature is of one object: the manifest beside it cannot be asked for.
    if location.query or not isinstance(input_source, SafetensorsSource) or input_source.layout is None:
        return
    folder, name = snapshot_location(input_source.uri)
    try:
        result = Verifier(settings, progress).verify(SnapshotEntry(folder, name, None))
    except CheckpointError:  # there is no manifest
        return
    if result.mismatches:
        raise StorageCorrupt(
            f"{result.mismatches[0]} ({len(result.mismatches)} such)",
            hint="`rfork snapshot verify` names all that is damaged; a converted file would seem right",
        )


def _manifest_rank(input_source: TensorSource, settings: StorageSettings) -> Rank | None:
    """The rank that a snapshot's manifest says it is of."""
    location = Location.parse(input_source.uri)
    if not isinstance(input_source, SafetensorsSource) or input_source.layout is None or location.query:
        return None
    try:
        manifest_file = read_entry(*snapshot_location(input_source.uri), settings).manifest_file
    except (
        StorageNotFound,
        StorageCorrupt,
        StorageAccessDenied,
    ):  # no snapshot, or one that `verify` speaks of
        return None
    return manifest_file.rank if manifest_file is not None else None


def _refuse_several(chosen: Location, settings: StorageSettings) -> None:
    if not _of_a_rank.fullmatch(chosen.name):
        return
    with closing(registry.open_store(chosen.parent, settings)) as store:
        try:
            found = [match["rank"] for entry in store.list() if (match := _of_a_rank.fullmatch(entry.name))]
        except (SettingsError, StorageAccessDenied):  # storage that cannot be listed
            return
    ranks = sorted(set(found))
    if len(ranks) > 1:
        raise SettingsError(
            f"{chosen.parent.uri} holds {len(ranks)} ranks: {ranks[0]}, {ranks[1]}" + " …" * (len(ranks) > 2),
            hint="say which (--rank), or name its file",
        )
