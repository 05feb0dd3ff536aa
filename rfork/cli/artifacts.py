"""`rfork artifacts`: JIT caches of engines, listed, saved, loaded, given to and taken from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rfork import settings as options
from rfork.cli.console import configure_logs, err, out, print_json, reported
from rfork.cli.options import BindOption, EgressOption, HostOption, JsonOption, PlannerOption
from rfork.cli.progress import Bar, sources_note
from rfork.settings import ArtifactSettings, Settings, redacted
from rfork.signals import stopped_by_signal, wait_until
from rfork.wire import ForkProgress

if TYPE_CHECKING:
    from rfork.artifacts.giving import ArtifactGiver
    from rfork.artifacts.report import ArtifactReport

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help=(
        "JIT caches of engines and libraries (Triton, torch.compile, FlashInfer, DeepGEMM, vLLM, SGLang).\n\n"
        "They are programs: off unless named (RFORK_ARTIFACTS_KINDS, --kinds), and whoever gives them can "
        "run what it likes where they are taken."
    ),
)

ModelOption = Annotated[
    str,
    typer.Option(
        "--model", metavar="NAME", help="Model that they were compiled for, as those who give it say."
    ),
]
KindsOption = Annotated[
    str | None,
    typer.Option(
        "--kinds",
        metavar="KINDS",
        help="Caches, comma separated, or all [env: RFORK_ARTIFACTS_KINDS]",
        show_default=False,
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="Name and version of the engine, where it is not installed here.",
        show_default=False,
    ),
]
UriArgument = Annotated[
    str, typer.Argument(metavar="URI", help="A folder that holds one file for each key, or a ….safetensors.")
]
DeadlineOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Most seconds it may take [env: RFORK_ARTIFACTS_DEADLINE_S]",
        show_default=False,
    ),
]


@app.command("ls")
def ls(kinds: KindsOption = None, engine: EngineOption = None, as_json: JsonOption = False) -> None:
    """List the caches of this machine, and the key that they are given under."""
    with reported(as_json=as_json):
        told = options.load(ArtifactSettings, kinds=kinds)
        from rfork.artifacts.key import key_of_here
        from rfork.artifacts.kinds import places
        from rfork.artifacts.packing import found_in

        key = key_of_here(engine)
        rows = []
        for place in places(told, known=True):
            sizes = [found.size for found in found_in(place)]
            rows.append((place, len(sizes), sum(sizes), place.trouble()))
        if as_json:
            caches = [
                {
                    "kind": place.kind.name,
                    "folder": str(place.folder),
                    "files": files,
                    "bytes": size,
                    "bound": place.kind.bound,
                    "trouble": trouble,
                }
                for place, files, size, trouble in rows
            ]
            print_json({"key": key.id, "description": key.description, "caches": caches})
            return
        out.print(f"key {key.id}: {key.description}", markup=False)
        for place, files, size, trouble in rows:
            what = trouble or (f"{files} files, {size / 1e6:.1f} MB" if files else "nothing")
            bound = "; only fits where it lies at this place" if place.kind.bound and files else ""
            out.print(f"{place.kind.name}: {place.folder}: {what}{bound}", markup=False)


@app.command("save")
def save(
    uri: UriArgument,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="Name of the model, for the records.", show_default=False
        ),
    ] = None,
    kinds: KindsOption = None,
    engine: EngineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the caches of this machine to storage (a path, file:///…, s3://…)."""
    with reported(as_json=as_json):
        told = _settings(kinds, None, as_json=as_json)
        from rfork import artifacts
        from rfork.artifacts.stored import ANY_MODEL

        written, packed = artifacts.save(uri, model=model or ANY_MODEL, engine=engine, artifacts=told)
        if as_json:
            print_json(
                {
                    "uri": written.uri,
                    "files": packed.files,
                    "bytes": packed.bytes,
                    "bytes_written": written.written,
                    "left_out": packed.left_out,
                }
            )
        else:
            size = f"{packed.files} files, {packed.bytes / 1e6:.1f} MB"
            out.print(f"{written.uri}: {size} written{_left_out(packed.left_out)}", markup=False)


@app.command("load")
def load(
    uri: UriArgument,
    kinds: KindsOption = None,
    engine: EngineOption = None,
    deadline: DeadlineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take caches that were saved for a machine as this one. None there is no error: the engine compiles."""
    with reported(as_json=as_json):
        told = _settings(kinds, deadline, as_json=as_json)
        from rfork import artifacts

        _tell(artifacts.load(uri, engine=engine, artifacts=told), as_json=as_json)


@app.command("pull")
def pull(
    model: ModelOption,
    planner: PlannerOption = None,
    kinds: KindsOption = None,
    engine: EngineOption = None,
    deadline: DeadlineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take caches from instances that run, before the engine starts. None there is no error either."""
    with reported(as_json=as_json):
        told = _settings(kinds, deadline, as_json=as_json)
        chosen = options.load(Settings, planner=planner)
        from rfork import artifacts

        with Bar(f"artifacts of {model}") as bar:

            def show(progress: ForkProgress, image_bytes: int) -> None:
                bar.update(min(progress.bytes_read, image_bytes), image_bytes, sources_note(progress.sources))

            report = artifacts.fetch(
                model=model, engine=engine, settings=chosen, artifacts=told, on_progress=show
            )
        _tell(report, as_json=as_json)


@app.command("seed")
def seed(
    model: ModelOption,
    planner: PlannerOption = None,
    kinds: KindsOption = None,
    engine: EngineOption = None,
    interval: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds between looks for new files [env: RFORK_ARTIFACTS_INTERVAL_S]",
            show_default=False,
        ),
    ] = None,
    bind: BindOption = None,
    host: HostOption = None,
    egress_rate: EgressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give the caches of this machine until interrupted, and what is compiled meanwhile too."""
    with reported(as_json=as_json):
        told = _settings(kinds, None, as_json=as_json, interval=interval)
        chosen = options.load(Settings, planner=planner, bind=bind, host=host, egress_rate=egress_rate)
        from rfork.artifacts import ArtifactGiver, key_of_here

        if chosen.planner is None:
            err.print("[yellow]warning:[/] no planner is set, so nobody will find them (set RFORK_PLANNER)")
        stopped = stopped_by_signal()
        with ArtifactGiver(model, key_of_here(engine), chosen, told) as giver:
            while not stopped.is_set():
                if giver.refresh():
                    _tell_given(giver, chosen, as_json=as_json)
                wait_until(stopped, for_s=told.interval_s)
            err.print("closing: readers may finish")


def _settings(
    kinds: str | None, deadline: float | None, *, as_json: bool, interval: float | None = None
) -> ArtifactSettings:
    """The settings, with logs as they say."""
    instance = options.load(Settings)
    configure_logs(instance, as_json=as_json, brief=True)
    return options.load(ArtifactSettings, kinds=kinds, deadline_s=deadline, interval_s=interval)


def _tell(report: ArtifactReport, *, as_json: bool) -> None:
    if as_json:
        print_json(report.to_dict())
    else:
        out.print(report.line(), markup=False)


def _tell_given(giver: ArtifactGiver, settings: Settings, *, as_json: bool) -> None:
    seed, packed = giver.seed, giver.packed
    if seed is None or packed is None:
        return
    if settings.planner is not None and not seed.wait_acknowledged(settings.planner_timeout_s):
        err.print(f"[yellow]warning:[/] {redacted(settings.planner)} does not answer yet; trying on")
    report = seed.report()
    if as_json:
        told = {"event": "ready", "files": packed.files, "bytes": packed.bytes, "left_out": packed.left_out}
        print_json({**told, **report.model_dump(mode="json")})
        return
    out.print(
        f"giving {packed.files} files ({packed.bytes / 1e6:.1f} MB) at {report.address} over "
        f"{', '.join(report.transports)}{_left_out(packed.left_out)}; {report.model}",
        markup=False,
    )


def _left_out(counts: dict[str, int]) -> str:
    told = ", ".join(f"{count} {why}" for why, count in counts.items())
    return f"; left out: {told}" if told else ""
