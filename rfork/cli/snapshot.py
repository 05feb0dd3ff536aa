"""`rfork snapshot`: write, list, verify and remove snapshots."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rfork import settings as options
from rfork.cli import snapshot_admin
from rfork.cli.completion import complete_model
from rfork.cli.console import configure_logs, handle_errors, out, print_json
from rfork.cli.options import JsonOption, PlannerOption, VersionOption, model_name
from rfork.cli.progress import Bar, sources_note
from rfork.cli.transformers_progress import show_loading
from rfork.errors import SettingsError, StorageChanged, UserError
from rfork.planner_client.client import PlannerClient
from rfork.settings import InstanceSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rfork.image.manifest import Manifest
    from rfork.image.memory import Image
    from rfork.schema import ForkProgress, InstanceReport, Rank
    from rfork.storage.snapshots.writer import WriteReport

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help=(
        "Write, list, verify and remove snapshots.\n\n"
        "A snapshot is one safetensors file per rank, in the layout that is served, with the digest of every "
        "chunk. An instance that finds no source reads it (RFORK_SNAPSHOT=URI)."
    ),
)
app.command("ls")(snapshot_admin.ls)
app.command("verify")(snapshot_admin.verify)
app.command("rm")(snapshot_admin.rm)


@dataclass(frozen=True)
class _WriteResult:
    """A written rank."""

    model: str
    rank: Rank
    version: str | None
    written: WriteReport
    seconds: float

    def line(self) -> str:
        written, reused = self.written.written / 1e9, self.written.reused_bytes / 1e9
        also = f", {reused:.3f} GB already stored" if reused else ""
        return (
            f"{self.written.uri}: {written:.3f} GB written{also} in {self.seconds:.1f} s; "
            + (f"version {self.version}, " if self.version else "")
            + f"weights {self.written.weights_id}"
        )

    def to_json(self) -> dict[str, str | int | float | None]:
        return {
            "uri": self.written.uri,
            "model": self.model,
            "rank": self.rank.key,
            "version": self.version,
            "weights_id": self.written.weights_id,
            "bytes_written": self.written.written,
            "bytes_reused": self.written.reused_bytes,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class _Destination:
    """Location and form of the snapshots to write."""

    uri: str
    shared: bool
    check: bool

    def validate(self) -> None:
        """Raise errors that depend only on the URI now, before weights are loaded."""
        from rfork.storage.snapshots.destination import validate_destination

        validate_destination(self.uri)

    def write(self, image: Image, manifest: Manifest, rank: Rank, model: str, version: str | None) -> _WriteResult:
        from rfork.storage.snapshots.writer import write_snapshot

        began = time.monotonic()
        done, total = 0, image.layout.image_bytes
        with Bar(f"write {model}") as bar:

            def show(count: int) -> None:
                nonlocal done
                done += count
                bar.update(done, total)

            written = write_snapshot(
                image,
                manifest,
                self.uri,
                rank=rank,
                model=model,
                version=version,
                shared=self.shared,
                check=self.check,
                progress=show,
            )
        return _WriteResult(model, rank, version, written, time.monotonic() - began)


@app.command("write")
def write(
    uri: Annotated[
        str,
        typer.Argument(
            metavar="URI",
            help="Destination folder (a path, file:///…, s3://…), or a ….safetensors file for one rank.",
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Write the weights of this running model.",
            autocompletion=complete_model,
            show_default=False,
        ),
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
            "--rank",
            min=0,
            metavar="N",
            help="Write only this rank, numbered pp * tp_size + tp; repeatable.",
        ),
    ] = None,
    shared: Annotated[
        bool,
        typer.Option("--shared", help="Store chunks by their digest, so that ranks and revisions share equal chunks."),
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="With --shared: read existing chunks, and replace damaged ones.",
        ),
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
                "no weights selected",
                hint="pass --name MODEL for a running model, or --from MODEL_DIR",
            )
        if source is not None and rank:
            raise SettingsError(
                "--rank cannot be combined with --from: a folder is loaded as one rank", hint="use --rank with --name"
            )
        if check and not shared:
            raise SettingsError("--check requires --shared", hint="without --shared everything is rewritten")
        destination = _Destination(uri, shared, check)
        destination.validate()
        if source is not None:
            results = [_from_folder(source, name, chosen.version, destination)]
        else:
            results = _from_fleet(name or "", rank or (), destination, chosen)
        if as_json:
            print_json({"snapshots": [each.to_json() for each in results]})
        else:
            for each in results:
                out.print(each.line(), markup=False)


def _from_folder(folder: Path, name: str | None, version: str | None, destination: _Destination) -> _WriteResult:
    from rfork.engines.transformers import loaded_model
    from rfork.engines.version_selection import version_of_files
    from rfork.image.capture import capture
    from rfork.schema import Rank
    from rfork.source.image_state import compute_manifest

    model, before = model_name(folder, name), version_of_files(folder)
    with show_loading(f"load {model}"):
        image = capture(loaded_model(folder))
    if before != version_of_files(folder):
        raise StorageChanged(f"{folder} changed while its weights were loaded", hint="write the snapshot again")
    return destination.write(image, compute_manifest(image), Rank(), model, version or before)


def _from_fleet(
    name: str, numbers: Sequence[int], destination: _Destination, settings: InstanceSettings
) -> list[_WriteResult]:
    from rfork.engines.model_ranks import fetch, sources_by_rank
    from rfork.storage.snapshots.files import snapshot_location, snapshot_name

    with PlannerClient.of(settings) as client:
        instances = _select_ranks(sources_by_rank(client, name, settings.version), numbers, name)
    names = [snapshot_location(destination.uri, instance.rank)[1] for instance in instances]
    if len(set(names)) < len(names):
        raise SettingsError(
            f"{destination.uri} is one file, and {name} has {len(names)} ranks",
            hint="use a folder, or select one rank (--rank)",
        )
    results = []
    for instance in instances:
        rank_name = snapshot_name(instance.rank).removesuffix(".safetensors")
        with Bar(f"fetch {name} {rank_name}") as bar:

            def show(progress: ForkProgress, image_bytes: int, bar: Bar = bar) -> None:
                bar.update(min(progress.bytes_read, image_bytes), image_bytes, sources_note(progress.sources))

            image, manifest, _ = fetch(instance, settings, show)
        results.append(destination.write(image, manifest, instance.rank, name, instance.version))
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
