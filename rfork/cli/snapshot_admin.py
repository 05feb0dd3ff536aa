"""`rfork snapshot ls`, `verify` and `rm`: manage snapshots in storage."""

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

SnapshotUriArgument = Annotated[
    str, typer.Argument(metavar="URI", help="Folder, or the ….safetensors file of one snapshot.")
]
MAX_CHUNKS_LISTED = 10
"""Maximum number of damaged chunks listed individually."""


def ls(uri: SnapshotUriArgument, as_json: JsonOption = False) -> None:
    """List the snapshots below URI, or the snapshot at URI.

    Also lists files that interrupted writers left behind.
    """
    with handle_errors(as_json=as_json):
        from rfork.storage.location import Location

        contents = _contents(uri)
        if as_json:
            print_json(
                {
                    "snapshots": [_to_json(found) for found in contents.snapshots],
                    "leftovers": [
                        {"name": left.name, "bytes": left.size, "reason": left.why} for left in contents.leftovers
                    ],
                }
            )
            return
        if not contents.snapshots:
            out.print(f"no snapshot found below {uri}", markup=False)
        below = Location.parse(uri).folder.uri
        for found in contents.snapshots:
            out.print(_line(found, below), markup=False)
        for left in contents.leftovers:
            out.print(f"leftover: {left.name} ({left.size / 1e9:.3f} GB): {left.why}", markup=False)


def verify(uri: SnapshotUriArgument, as_json: JsonOption = False) -> None:
    """Verify the digest of every chunk.

    Streams all snapshots below URI, with little memory. Exit code 6 if one is damaged.
    """
    with handle_errors(as_json=as_json):
        from rfork.storage.snapshots.verifier import SnapshotVerifier, VerifyResult

        snapshots = _contents(uri).snapshots
        if not snapshots:
            raise StorageNotFound(f"no snapshot found below {uri}")
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

            verifier = SnapshotVerifier(progress=show)
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
                word = "DAMAGED" if result.mismatches else "ok"
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
                hint="write them again, shared ones with --check; forks never use a chunk whose digest does not match",
            )


def rm(
    uri: SnapshotUriArgument,
    leftovers: Annotated[
        bool,
        typer.Option(
            "--leftovers",
            help="Keep all snapshots, and remove unneeded files below URI. Never use this during a write.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove a snapshot, or all ranks in a folder.

    Snapshots in subfolders are kept, and so are shared chunks that other snapshots need.
    """
    with handle_errors(as_json=as_json):
        from rfork.storage.location import Location
        from rfork.storage.snapshots.delete import remove_leftovers, remove_snapshots
        from rfork.storage.snapshots.files import is_file
        from rfork.storage.snapshots.repository import Repository

        if leftovers:
            if is_file(uri):
                raise SettingsError(f"{uri} is a single snapshot", hint="--leftovers requires a folder")
            removed = remove_leftovers(Repository(Location.parse(uri).folder))
            plural_noun = "leftovers"
        else:
            removed = remove_snapshots(_snapshots_at(uri))
            plural_noun = "snapshots"
        if as_json:
            print_json({plural_noun: removed.count, "bytes_freed": removed.freed, "bytes_kept": removed.retained_bytes})
        else:
            kept = f"; {removed.retained_bytes / 1e9:.3f} GB kept for other snapshots" if removed.retained_bytes else ""
            noun = plural_noun if removed.count != 1 else plural_noun.removesuffix("s")
            out.print(f"removed {removed.count} {noun}, {removed.freed / 1e9:.3f} GB freed{kept}")


def _contents(uri: str) -> Listing:
    from rfork.storage.snapshots.entry import read_entry
    from rfork.storage.snapshots.files import is_file, snapshot_location
    from rfork.storage.snapshots.repository import Listing, Repository

    folder, name = snapshot_location(uri)
    if is_file(uri):
        return Listing((read_entry(folder, name),), (), frozenset())
    return Repository(folder).contents()


def _snapshots_at(uri: str) -> list[SnapshotEntry]:
    """Return the snapshots of a file or folder, without those in subfolders."""
    from rfork.storage.snapshots.files import is_file, snapshot_location
    from rfork.storage.snapshots.repository import Repository

    folder, _ = snapshot_location(uri)
    contents = _contents(uri)
    found = list(contents.snapshots) if is_file(uri) else Repository(folder).entries_in(contents)
    if found:
        return found
    if contents.snapshots:
        raise SettingsError(
            f"{uri} has no snapshot itself, but {len(contents.snapshots)} in subfolders",
            hint=f"name one of them, e.g. {contents.snapshots[0].folder.uri}",
        )
    raise StorageNotFound(f"no snapshot found in {uri}")


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
        "problem": found.problem,
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
        f"{name}: {model}{manifest_file.rank.key}, {found.size / 1e9:.3f} GB "
        f"in {len(manifest_file.digests)} chunks, {form}, {version}weights {manifest_file.weights_id}"
        + (f"; DAMAGED: {found.problem}" if found.problem else "")
    )
