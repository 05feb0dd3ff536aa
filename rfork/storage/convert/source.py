"""What a conversion reads: whose rank's, and whether its bytes are right."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from pydantic import ValidationError

from rfork.errors import CheckpointError, SettingsError, StorageCorrupt, StorageDenied, StorageMissing
from rfork.settings import StorageSettings
from rfork.storage import stores
from rfork.storage.formats.choice import INDEX_SUFFIX, open_source
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.location import Location
from rfork.storage.snapshots.files import DATA_SUFFIX, MANIFEST_SUFFIX, place_of
from rfork.storage.snapshots.found import Found, found_at
from rfork.storage.snapshots.verifying import Verifier
from rfork.storage.tensorizer.crypt import Secret
from rfork.storage.tensorizer.names import SUFFIX, is_template
from rfork.storage.tensors import TensorSource
from rfork.wire import Rank

_of_a_rank = re.compile(
    rf"(?P<rank>(model|draft)-rank-\d+(-ep-\d+)?)(-\d{{5}}-of-\d{{5}})?"
    rf"({re.escape(DATA_SUFFIX)}({re.escape(MANIFEST_SUFFIX)})?|{re.escape(SUFFIX)})"
)


def numbered(number: int) -> Rank:
    """A rank of that number, as far as names tell it. Raises SettingsError for one that no replica has."""
    try:
        return Rank(tp=number, tp_size=number + 1)
    except ValidationError:
        raise SettingsError(f"{number} is no rank") from None


@contextmanager
def opened(
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
    with closing(open_source(source, settings, rank, key=key, password=password)) as held:
        if not of_one and rank is None:
            _refuse_several(Location.parse(held.uri), settings)
        yield held, _told_rank(held, settings) or rank


def verify(
    source: str, held: TensorSource, settings: StorageSettings, progress: Callable[[int], None] | None = None
) -> None:
    """Compare a snapshot's bytes with its manifest; what has none is taken as it is.

    Raises StorageCorrupt, and what the store raises. That a file is replaced between this and the reading
    ends the latter: it was opened before.
    """
    location = Location.parse(source)
    # A signature is of one object: the manifest beside it cannot be asked for.
    if location.query or not isinstance(held, SafetensorsSource) or held.layout is None:
        return
    folder, name = place_of(held.uri)
    try:
        result = Verifier(settings, progress).verify(Found(folder, name, None))
    except CheckpointError:  # there is no manifest
        return
    if result.damage:
        raise StorageCorrupt(
            f"{result.damage[0]} ({len(result.damage)} such)",
            hint="`rfork snapshot verify` names all that is damaged; a converted file would seem right",
        )


def _told_rank(held: TensorSource, settings: StorageSettings) -> Rank | None:
    """The rank that a snapshot's manifest says it is of."""
    location = Location.parse(held.uri)
    if not isinstance(held, SafetensorsSource) or held.layout is None or location.query:
        return None
    try:
        told = found_at(*place_of(held.uri), settings).told
    except (StorageMissing, StorageCorrupt, StorageDenied):  # no snapshot, or one that `verify` speaks of
        return None
    return told.rank if told is not None else None


def _refuse_several(chosen: Location, settings: StorageSettings) -> None:
    if not _of_a_rank.fullmatch(chosen.name):
        return
    with closing(stores.open_store(chosen.parent, settings)) as store:
        try:
            found = [match["rank"] for entry in store.list() if (match := _of_a_rank.fullmatch(entry.name))]
        except (SettingsError, StorageDenied):  # storage that cannot be listed
            return
    ranks = sorted(set(found))
    if len(ranks) > 1:
        raise SettingsError(
            f"{chosen.parent.uri} holds {len(ranks)} ranks: {ranks[0]}, {ranks[1]}" + " …" * (len(ranks) > 2),
            hint="say which (--rank), or name its file",
        )
