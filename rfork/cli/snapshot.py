"""`rfork snapshot`: write, list, verify and remove snapshots."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rfork import settings as options
from rfork.cli.console import Bar, configure_logs, err, handle_errors, out, print_json, print_result, transformers_loads
from rfork.cli.formatters import plural
from rfork.cli.options import JsonOption, PlannerOption, VersionOption, model_name
from rfork.errors import SettingsError, StorageChanged, StorageCorrupt, StorageNotFound, UserError
from rfork.planner_client.client import PlannerClient
from rfork.settings import InstanceSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rfork.image.layout import Manifest
    from rfork.image.memory import Image
    from rfork.schema import InstanceReport, Rank
    from rfork.storage.snapshots.entry import SnapshotEntry
    from rfork.storage.snapshots.repository import Listing

    WriteImage = Callable[[Image, Manifest, Rank, str, str | None], dict[str, object]]
    """Writes an image of a model's rank and version, and returns the result for JSON."""

MAX_CHUNKS_LISTED: Final = 10
"""Maximum number of damaged chunks listed individually."""

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help=(
        "Write, list, verify and remove snapshots.\n\n"
        "A snapshot is one safetensors file per rank, in the layout that is served, with the digest of every "
        "chunk. An instance that finds no source reads it (RFORK_SNAPSHOT=URI)."
    ),
)
SnapshotUriArgument = Annotated[
    str, typer.Argument(metavar="URI", help="Folder, or the ….safetensors file of one snapshot.")
]


# -- write ----------------------------------------------------------------------------------------------------


@app.command("write")
def write(
    uri: Annotated[
        str,
        typer.Argument(
            metavar="URI", help="Destination folder (a path, file:///…, s3://…), or a ….safetensors file for one rank."
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Write the weights of this running model.", show_default=False),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="MODEL_DIR",
            help="Write the weights of this Hugging Face folder, loaded with transformers.",
            show_default=False,
        ),
    ] = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(
            "--rank", min=0, metavar="N", help="Write only this rank, numbered pp * tp_size + tp; repeatable."
        ),
    ] = None,
    shared: Annotated[
        bool,
        typer.Option("--shared", help="Store chunks by their digest, so that ranks and revisions share equal chunks."),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="With --shared: read existing chunks, and replace damaged ones.")
    ] = False,
    version: VersionOption = None,
    planner: PlannerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a snapshot of a running model (--name) or of a model folder (--from).

    The weights of a running model are read over the network, like in a fork.
    """
    with handle_errors(as_json=as_json):
        chosen = options.load(InstanceSettings, planner=planner, version=version)
        configure_logs(chosen, as_json=as_json, brief=True)
        if name is None and source is None:
            raise SettingsError(
                "no weights selected", hint="pass --name MODEL for a running model, or --from MODEL_DIR"
            )
        if source is not None and rank:
            raise SettingsError(
                "--rank cannot be combined with --from: a folder is loaded as one rank", hint="use --rank with --name"
            )
        if check and not shared:
            raise SettingsError("--check requires --shared", hint="without --shared everything is rewritten")
        from rfork.storage.snapshots.writer import validate_destination

        validate_destination(uri)  # before weights are loaded
        write_image = partial(_write_image, uri, shared, check)
        if source is not None:
            results = [_write_folder(source, name, chosen.version, write_image)]
        else:
            results = _write_fleet(uri, name or "", rank or (), write_image, chosen)
        if as_json:
            print_json({"snapshots": results})
        else:
            for each in results:
                out.print(_written_line(each))


def _write_image(
    uri: str, shared: bool, check: bool, image: Image, manifest: Manifest, rank: Rank, model: str, version: str | None
) -> dict[str, object]:
    from rfork.storage.snapshots.writer import write_snapshot

    began = time.monotonic()
    with Bar(f"write {model}") as bar:
        written = write_snapshot(
            image,
            manifest,
            uri,
            rank=rank,
            model=model,
            version=version,
            shared=shared,
            check=check,
            progress=lambda count: bar.add(count, image.layout.image_bytes),
        )
    return {
        "uri": written.uri,
        "model": model,
        "rank": rank.key,
        "version": version,
        "weights_id": written.weights_id,
        "bytes_written": written.written,
        "bytes_reused": written.reused_bytes,
        "seconds": round(time.monotonic() - began, 3),
    }


def _written_line(result: dict[str, object]) -> str:
    written, reused, seconds = (float(str(result[key])) for key in ("bytes_written", "bytes_reused", "seconds"))
    also = f", {reused / 1e9:.3f} GB already stored" if reused else ""
    version = f"version {result['version']}, " if result["version"] else ""
    return (
        f"{result['uri']}: {written / 1e9:.3f} GB written{also} in {seconds:.1f} s; "
        f"{version}weights {result['weights_id']}"
    )


def _write_folder(folder: Path, name: str | None, version: str | None, write_image: WriteImage) -> dict[str, object]:
    from rfork.engines.transformers import loaded_model
    from rfork.image.capture import capture
    from rfork.image.memory import compute_manifest
    from rfork.schema import Rank
    from rfork.storage.versions.version import version_of_files

    model, before = model_name(folder, name), version_of_files(folder)
    with transformers_loads(f"load {model}"):
        image = capture(loaded_model(folder))
    if before != version_of_files(folder):
        raise StorageChanged(f"{folder} changed while its weights were loaded", hint="write the snapshot again")
    return write_image(image, compute_manifest(image), Rank(), model, version or before)


def _write_fleet(
    uri: str, name: str, numbers: Sequence[int], write_image: WriteImage, settings: InstanceSettings
) -> list[dict[str, object]]:
    from rfork.engines.model_ranks import sources_by_rank
    from rfork.receiver.session import fetch
    from rfork.storage.snapshots.entry import snapshot_location, snapshot_name

    with PlannerClient.of(settings) as client:
        instances = _select_ranks(sources_by_rank(client, name, settings.version), numbers, name)
    names = [snapshot_location(uri, instance.rank)[1] for instance in instances]
    if len(set(names)) < len(names):
        raise SettingsError(
            f"{uri} is one file, and {name} has {len(names)} ranks", hint="use a folder, or select one rank (--rank)"
        )
    results = []
    for instance in instances:
        rank_name = snapshot_name(instance.rank).removesuffix(".safetensors")
        with Bar(f"fetch {name} {rank_name}") as bar:
            image, manifest, _ = fetch(instance, settings, bar.show_fork)
        results.append(write_image(image, manifest, instance.rank, name, instance.version))
        del image
    return results


def _select_ranks(instances: Sequence[InstanceReport], numbers: Sequence[int], name: str) -> list[InstanceReport]:
    """Return the ranks with these numbers, main and speculative; all ranks if there are no numbers."""
    numbers_available = {_rank_number(instance.rank) for instance in instances}
    if missing := sorted(set(numbers) - numbers_available):
        raise UserError(
            f"{name} has no rank {missing[0]}",
            hint=f"available ranks: {', '.join(map(str, sorted(numbers_available)))}",
        )
    return [instance for instance in instances if not numbers or _rank_number(instance.rank) in numbers]


def _rank_number(rank: Rank) -> int:
    """Return the number of a rank in its replica, as counted by ``--rank``."""
    return rank.pp * rank.tp_size + rank.tp


# -- list, verify and remove ----------------------------------------------------------------------------------


@app.command("ls")
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
                    "snapshots": [_entry_to_dict(found) for found in contents.snapshots],
                    "leftovers": [
                        {"name": left.name, "bytes": left.size, "reason": left.why} for left in contents.leftovers
                    ],
                }
            )
            return
        if not contents.snapshots:
            out.print(f"no snapshot found below {uri}")
        below = Location.parse(uri).folder.uri
        for found in contents.snapshots:
            out.print(_entry_line(found, below))
        for left in contents.leftovers:
            out.print(f"leftover: {left.name} ({left.size / 1e9:.3f} GB): {left.why}")


@app.command("verify")
def verify(uri: SnapshotUriArgument, as_json: JsonOption = False) -> None:
    """Verify the digest of every chunk.

    Streams all snapshots below URI, with little memory. Exit code 6 if one is damaged.
    """
    with handle_errors(as_json=as_json):
        from rfork.storage.snapshots.verifier import SnapshotVerifier

        snapshots = _contents(uri).snapshots
        if not snapshots:
            raise StorageNotFound(f"no snapshot found below {uri}")
        total = sum(found.manifest_file.image_bytes for found in snapshots if found.manifest_file is not None)
        with Bar("verify") as bar:
            verifier = SnapshotVerifier(progress=lambda count: bar.add(count, total))
            results = [verifier.verify(found) for found in snapshots]
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
                summary = f"{plural(result.chunks, 'chunk')}, {result.nbytes / 1e9:.3f} GB, weights {result.weights_id}"
                out.print(f"{result.uri}: {word}: {summary}")
        if damage:
            for line in damage[:MAX_CHUNKS_LISTED]:
                err.print(line)
            if len(damage) > MAX_CHUNKS_LISTED:
                err.print(f"and {len(damage) - MAX_CHUNKS_LISTED} more")
            bad = sum(1 for result in results if result.mismatches)
            raise StorageCorrupt(
                f"{plural(len(results), 'snapshot')} checked, {bad} damaged",
                hint="write them again, shared ones with --check; forks never use a chunk whose digest does not match",
            )


@app.command("rm")
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
        from rfork.storage.snapshots.entry import is_file
        from rfork.storage.snapshots.repository import Repository, remove_leftovers, remove_snapshots

        if leftovers and is_file(uri):
            raise SettingsError(f"{uri} is a single snapshot", hint="--leftovers requires a folder")
        if leftovers:
            noun, removed = "leftover", remove_leftovers(Repository(Location.parse(uri).folder))
        else:
            noun, removed = "snapshot", remove_snapshots(_snapshots_at(uri))
        kept = f"; {removed.retained_bytes / 1e9:.3f} GB kept for other snapshots" if removed.retained_bytes else ""
        print_result(
            {f"{noun}s": removed.count, "bytes_freed": removed.freed, "bytes_kept": removed.retained_bytes},
            f"removed {plural(removed.count, noun)}, {removed.freed / 1e9:.3f} GB freed{kept}",
            as_json=as_json,
        )


def _contents(uri: str) -> Listing:
    from rfork.storage.snapshots.entry import is_file, read_entry, snapshot_location
    from rfork.storage.snapshots.repository import Listing, Repository

    folder, name = snapshot_location(uri)
    if is_file(uri):
        return Listing((read_entry(folder, name),), (), frozenset())
    return Repository(folder).contents()


def _snapshots_at(uri: str) -> list[SnapshotEntry]:
    """Return the snapshots of a file or folder, without those in subfolders."""
    from rfork.storage.snapshots.entry import is_file, snapshot_location
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


def _entry_to_dict(found: SnapshotEntry) -> dict[str, object]:
    manifest_file = found.manifest_file
    return {
        "uri": found.uri,
        "model": manifest_file.model if manifest_file else None,
        "version": manifest_file.version if manifest_file else None,
        "rank": manifest_file.rank.key if manifest_file else None,
        "weights_id": manifest_file.weights_id if manifest_file else None,
        "bytes": found.size,
        "chunks": len(manifest_file.digests) if manifest_file else None,
        "form": ("file" if manifest_file.chunks is None else "shared") if manifest_file else None,
        "shared_bytes": found.shared,
        "problem": found.problem,
    }


def _entry_line(found: SnapshotEntry, uri: str) -> str:
    manifest_file, name = found.manifest_file, found.uri.removeprefix(f"{uri.rstrip('/')}/")
    if manifest_file is None:
        return f"{name}: {found.problem}"
    form = "one file" if manifest_file.chunks is None else f"{found.shared / 1e9:.3f} GB of it shared"
    model = f"{manifest_file.model} " if manifest_file.model else ""
    version = f"version {manifest_file.version}, " if manifest_file.version else ""
    return (
        f"{name}: {model}{manifest_file.rank.key}, {found.size / 1e9:.3f} GB "
        f"in {plural(len(manifest_file.digests), 'chunk')}, {form}, {version}weights {manifest_file.weights_id}"
        + (f"; DAMAGED: {found.problem}" if found.problem else "")
    )
