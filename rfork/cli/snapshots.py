"""`rfork snapshot ls`, `verify` and `rm`: what to do with snapshots that lie in storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rfork.cli.console import err, escaped, out, print_json, reported
from rfork.cli.options import JsonOption
from rfork.cli.progress import Bar
from rfork.errors import SettingsError, StorageCorrupt, StorageMissing

if TYPE_CHECKING:
    from rfork.storage.snapshots.found import Found
    from rfork.storage.snapshots.repository import Contents

PlaceArgument = Annotated[
    str, typer.Argument(metavar="URI", help="A folder, or one snapshot's ….safetensors.")
]
MOST_NAMED = 10
"""Damaged chunks that are named one by one."""


def ls(uri: PlaceArgument, as_json: JsonOption = False) -> None:
    """List the snapshots below URI, or the one that it names.

    With them, what writers that died left there.
    """
    with reported(as_json=as_json):
        from rfork.storage.location import Location

        contents = _contents(uri)
        if as_json:
            print_json(
                {
                    "snapshots": [_told(found) for found in contents.snapshots],
                    "leftovers": [
                        {"name": left.name, "bytes": left.size, "why": left.why}
                        for left in contents.leftovers
                    ],
                }
            )
            return
        if not contents.snapshots:
            out.print(f"no snapshot lies below {uri}", markup=False)
        below = Location.parse(uri).folder.uri
        for found in contents.snapshots:
            out.print(_line(found, below), markup=False)
        for left in contents.leftovers:
            out.print(f"leftover: {left.name} ({left.size / 1e9:.3f} GB): {left.why}", markup=False)


def verify(uri: PlaceArgument, as_json: JsonOption = False) -> None:
    """Compare every chunk with its digest.

    Reads all snapshots below URI as streams, in little memory; exit code 6 where one is damaged.
    """
    with reported(as_json=as_json):
        from rfork.storage.snapshots.verifying import Verified, Verifier

        snapshots = _contents(uri).snapshots
        if not snapshots:
            raise StorageMissing(f"no snapshot lies below {uri}")
        results: list[Verified] = []
        done, total = 0, sum(found.told.image_bytes for found in snapshots if found.told is not None)
        with Bar("verify") as bar:

            def show(count: int) -> None:
                nonlocal done
                done += count
                bar.update(done, total)

            verifier = Verifier(progress=show)
            results.extend(verifier.verify(found) for found in snapshots)
        damage = [line for result in results for line in result.damage]
        if as_json:
            print_json(
                {
                    "snapshots": [
                        {
                            "uri": result.uri,
                            "weights_id": result.weights_id,
                            "chunks": result.chunks,
                            "bytes": result.nbytes,
                            "damage": list(result.damage),
                        }
                        for result in results
                    ]
                }
            )
        else:
            for result in results:
                word = "DAMAGED" if result.damage else "right"
                told = f"{result.chunks} chunks, {result.nbytes / 1e9:.3f} GB, weights {result.weights_id}"
                out.print(f"{result.uri}: {word}: {told}", markup=False)
        if damage:
            for line in damage[:MOST_NAMED]:
                err.print(escaped(line))
            if len(damage) > MOST_NAMED:
                err.print(f"and {len(damage) - MOST_NAMED} more")
            bad = sum(1 for result in results if result.damage)
            raise StorageCorrupt(
                f"{bad} of {len(results)} snapshots are damaged",
                hint="write them again, shared ones with --check; forks take no chunk that does not match",
            )


def rm(
    uri: PlaceArgument,
    leftovers: Annotated[
        bool,
        typer.Option(
            "--leftovers",
            help="Remove no snapshot, but all below URI that none needs. Not while somebody writes there.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove one snapshot, or one folder's.

    Those of all ranks in the folder, and not of folders below. Shared chunks that others need stay.
    """
    with reported(as_json=as_json):
        from rfork.storage.location import Location
        from rfork.storage.snapshots.files import is_file
        from rfork.storage.snapshots.removal import remove_leftovers, remove_snapshots
        from rfork.storage.snapshots.repository import Repository

        if leftovers:
            if is_file(uri):
                raise SettingsError(f"{uri} names one snapshot", hint="--leftovers is of a folder: name that")
            removed = remove_leftovers(Repository(Location.parse(uri).folder))
            what = "leftovers"
        else:
            removed = remove_snapshots(_named(uri))
            what = "snapshots"
        if as_json:
            print_json({what: removed.count, "bytes_freed": removed.freed, "bytes_kept": removed.kept})
        else:
            kept = f"; {removed.kept / 1e9:.3f} GB are kept for other snapshots" if removed.kept else ""
            word = what if removed.count != 1 else what.removesuffix("s")
            out.print(f"removed {removed.count} {word}, {removed.freed / 1e9:.3f} GB freed{kept}")


def _contents(uri: str) -> Contents:
    from rfork.storage.snapshots.files import is_file, place_of
    from rfork.storage.snapshots.found import found_at
    from rfork.storage.snapshots.repository import Contents, Repository

    folder, name = place_of(uri)
    if is_file(uri):
        return Contents((found_at(folder, name),), (), frozenset())
    return Repository(folder).contents()


def _named(uri: str) -> list[Found]:
    """The snapshots that a file's or a folder's URI means, without those of folders below."""
    from rfork.storage.snapshots.files import is_file, place_of
    from rfork.storage.snapshots.repository import Repository

    folder, _ = place_of(uri)
    contents = _contents(uri)
    found = list(contents.snapshots) if is_file(uri) else Repository(folder).inside(contents)
    if found:
        return found
    if contents.snapshots:
        raise SettingsError(
            f"{uri} holds no snapshot itself, but {len(contents.snapshots)} in folders below",
            hint=f"name one of those, e.g. {contents.snapshots[0].folder.uri}",
        )
    raise StorageMissing(f"no snapshot lies in {uri}")


def _told(found: Found) -> dict[str, str | int | None]:
    told = found.told
    return {
        "uri": found.uri,
        "model": told.model if told else None,
        "version": told.version if told else None,
        "rank": told.rank.key if told else None,
        "weights_id": told.weights_id if told else None,
        "bytes": found.size,
        "chunks": len(told.digests) if told else None,
        "form": _form(found),
        "shared_bytes": found.shared,
        "trouble": found.trouble,
    }


def _form(found: Found) -> str | None:
    if found.told is None:
        return None
    return "file" if found.told.chunks is None else "shared"


def _line(found: Found, uri: str) -> str:
    told, name = found.told, found.uri.removeprefix(f"{uri.rstrip('/')}/")
    if told is None:
        return f"{name}: {found.trouble}"
    form = "one file" if told.chunks is None else f"{found.shared / 1e9:.3f} GB of it shared"
    model = f"{told.model} " if told.model else ""
    version = f"version {told.version}, " if told.version else ""
    return (
        f"{name}: {model}{told.rank.key}, {found.size / 1e9:.3f} GB in {len(told.digests)} chunks, {form}, "
        f"{version}weights {told.weights_id}" + (f"; DAMAGED: {found.trouble}" if found.trouble else "")
    )
