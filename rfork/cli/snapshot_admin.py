"""`rfork snapshot ls`, `verify` and `rm`: what to do with snapshots that lie in storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rfork.cli.console import err, escaped, handle_errors, out, print_json
from rfork.cli.options import JsonOption
from rfork.cli.progress import Bar
from rfork.errors import SettingsError, StorageCorrupt, StorageNotFound

if TYPE_CHECKING:
    from rfork.storage.snapshots.entry import SnapshotEntry
    from rfork.storage.snapshots.repository import Listing

SnapshotUriArgument = Annotated[str, typer.Argument(metavar="URI", help="A folder, or one snapshot's ….safetensors.")]
MAX_CHUNKS_LISTED = 10
"""Damaged chunks that are named one by one."""


def ls(uri: SnapshotUriArgument, as_json: JsonOption = False) -> None:
    """List the snapshots below URI, or the one that it names.

    With them, what writers that died left there.
    """
    with handle_errors(as_json=as_json):
        from rfork.storage.location import Location

        contents = _contents(uri)
        if as_json:
            print_json(
                {
                    "snapshots": [_to_json(found) for found in contents.snapshots],
                    "leftovers": [
                        {"name": left.name, "bytes": left.size, "why": left.why} for left in contents.leftovers
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


def verify(uri: SnapshotUriArgument, as_json: JsonOption = False) -> None:
    """Compare every chunk with its digest.

    Reads all snapshots below URI as streams, in little memory; exit code 6 where one is damaged.
    """
    with handle_errors(as_json=as_json):
        from rfork.storage.snapshots.verify import Verifier, VerifyResult

        snapshots = _contents(uri).snapshots
        if not snapshots:
            raise StorageNotFound(f"no snapshot lies below {uri}")
        results: list[VerifyResult] = []
        done, total = (
            0,
            sum(found.manifest_file.image_bytes for found in snapshots if found.manifest_file is not None),
        )
        with Bar("verify") as bar:

            def show(count: int) -> None:
                nonlocal done
                done += count
                bar.update(done, total)

            verifier = Verifier(progress=show)
            results.extend(verifier.verify(found) for found in snapshots)
        damage = [line for result in results for line in result.mismatches]
        if as_json:
            print_json(
                {
                    "snapshots": [
                        {
                            "uri": result.uri,
                            "weights_id": result.weights_id,
                            "chunks": result.chunks,
                            "bytes": result.nbytes,
                            "damage": list(result.mismatches),
                        }
                        for result in results
                    ]
                }
            )
        else:
            for result in results:
                word = "DAMAGED" if result.mismatches else "right"
                summary = f"{result.chunks} chunks, {result.nbytes / 1e9:.3f} GB, weights {result.weights_id}"
                out.print(f"{result.uri}: {word}: {summary}", markup=False)
        if damage:
            for line in damage[:MAX_CHUNKS_LISTED]:
                err.print(escaped(line))
            if len(damage) > MAX_CHUNKS_LISTED:
                err.print(f"and {len(damage) - MAX_CHUNKS_LISTED} more")
            bad = sum(1 for result in results if result.mismatches)
            raise StorageCorrupt(
                f"{bad} of {len(results)} snapshots are damaged",
                hint="write them again, shared ones with --check; forks take no chunk that does not match",
            )


def rm(
    uri: SnapshotUriArgument,
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
    with handle_errors(as_json=as_json):
        from rfork.storage.location import Location
        from rfork.storage.snapshots.delete import remove_leftovers, remove_snapshots
        from rfork.storage.snapshots.files import is_file
        from rfork.storage.snapshots.repository import Repository

        if leftovers:
            if is_file(uri):
                raise SettingsError(f"{uri} names one snapshot", hint="--leftovers is of a folder: name that")
            removed = remove_leftovers(Repository(Location.parse(uri).folder))
            what = "leftovers"
        else:
            removed = remove_snapshots(_snapshots_at(uri))
            what = "snapshots"
        if as_json:
            print_json({what: removed.count, "bytes_freed": removed.freed, "bytes_kept": removed.retained_bytes})
        else:
            kept = (
                f"; {removed.retained_bytes / 1e9:.3f} GB are kept for other snapshots"
                if removed.retained_bytes
                else ""
            )
            word = what if removed.count != 1 else what.removesuffix("s")
            out.print(f"removed {removed.count} {word}, {removed.freed / 1e9:.3f} GB freed{kept}")


def _contents(uri: str) -> Listing:
    from rfork.storage.snapshots.entry import read_entry
    from rfork.storage.snapshots.files import is_file, snapshot_location
    from rfork.storage.snapshots.repository import Listing, Repository

    folder, name = snapshot_location(uri)
    if is_file(uri):
        return Listing((read_entry(folder, name),), (), frozenset())
    return Repository(folder).contents()


def _snapshots_at(uri: str) -> list[SnapshotEntry]:
    """The snapshots that a file's or a folder's URI means, without those of folders below."""
    from rfork.storage.snapshots.files import is_file, snapshot_location
    from rfork.storage.snapshots.repository import Repository

    folder, _ = snapshot_location(uri)
    contents = _contents(uri)
    found = list(contents.snapshots) if is_file(uri) else Repository(folder).entries_in(contents)
    if found:
        return found
    if contents.snapshots:
        raise SettingsError(
            f"{uri} holds no snapshot itself, but {len(contents.snapshots)} in folders below",
            hint=f"name one of those, e.g. {contents.snapshots[0].folder.uri}",
        )
    raise StorageNotFound(f"no snapshot lies in {uri}")


def _to_json(found: SnapshotEntry) -> dict[str, str | int | None]:
    manifest_file = found.manifest_file
    return {
        "uri": found.uri,
        "model": manifest_file.model if manifest_file else None,
        "version": manifest_file.version if manifest_file else None,
        "rank": manifest_file.rank.key if manifest_file else None,
        "weights_id": manifest_file.weights_id if manifest_file else None,
        "bytes": found.size,
        "chunks": len(manifest_file.digests) if manifest_file else None,
        "form": _form(found),
        "shared_bytes": found.shared,
        "trouble": found.problem,
    }


def _form(found: SnapshotEntry) -> str | None:
    if found.manifest_file is None:
        return None
    return "file" if found.manifest_file.chunks is None else "shared"


def _line(found: SnapshotEntry, uri: str) -> str:
    manifest_file, name = found.manifest_file, found.uri.removeprefix(f"{uri.rstrip('/')}/")
    if manifest_file is None:
        return f"{name}: {found.problem}"
    form = "one file" if manifest_file.chunks is None else f"{found.shared / 1e9:.3f} GB of it shared"
    model = f"{manifest_file.model} " if manifest_file.model else ""
    version = f"version {manifest_file.version}, " if manifest_file.version else ""
    return (
        f"{name}: {model}{manifest_file.rank.key}, {found.size / 1e9:.3f} GB in {len(manifest_file.digests)} chunks, {form}, "
        f"{version}weights {manifest_file.weights_id}" + (f"; DAMAGED: {found.problem}" if found.problem else "")
    )
