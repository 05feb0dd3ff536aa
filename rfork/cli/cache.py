"""`rfork artifacts`: JIT caches of engines, listed, saved, loaded, given to and taken from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rfork import settings as options
from rfork.cli.console import configure_logs, err, handle_errors, out, print_json
from rfork.cli.options import BindOption, EgressOption, HostOption, JsonOption, PlannerOption
from rfork.cli.progress import Bar, sources_note
from rfork.schema import ForkProgress
from rfork.settings import ArtifactSettings, InstanceSettings, redacted
from rfork.shutdown import shutdown_on_signal, wait_for_shutdown

if TYPE_CHECKING:
    from rfork.artifacts.report import ArtifactReport
    from rfork.artifacts.server import ArtifactServer

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
    typer.Option("--model", metavar="NAME", help="Model that they were compiled for, as those who give it say."),
]
CacheTypesOption = Annotated[
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
def ls(kinds: CacheTypesOption = None, engine: EngineOption = None, as_json: JsonOption = False) -> None:
    """List the caches of this machine, and the key that they are given under."""
    with handle_errors(as_json=as_json):
        artifact_settings = options.load(ArtifactSettings, kinds=kinds)
        from rfork.artifacts.cache_types import cache_dirs
        from rfork.artifacts.key import local_key
        from rfork.artifacts.pack import found_in

        key = local_key(engine)
        rows = []
        for cache_dir in cache_dirs(artifact_settings, all_known=True):
            sizes = [found.size for found in found_in(cache_dir)]
            rows.append((cache_dir, len(sizes), sum(sizes), cache_dir.problem()))
        if as_json:
            caches = [
                {
                    "kind": cache_dir.cache_type.name,
                    "folder": str(cache_dir.folder),
                    "files": files,
                    "bytes": size,
                    "bound": cache_dir.cache_type.path_bound,
                    "trouble": problem,
                }
                for cache_dir, files, size, problem in rows
            ]
            print_json({"key": key.id, "description": key.description, "caches": caches})
            return
        out.print(f"key {key.id}: {key.description}", markup=False)
        for cache_dir, files, size, problem in rows:
            what = problem or (f"{files} files, {size / 1e6:.1f} MB" if files else "nothing")
            bound = "; only fits where it lies at this place" if cache_dir.cache_type.path_bound and files else ""
            out.print(f"{cache_dir.cache_type.name}: {cache_dir.folder}: {what}{bound}", markup=False)


@app.command("save")
def save(
    uri: UriArgument,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Name of the model, for the records.", show_default=False),
    ] = None,
    kinds: CacheTypesOption = None,
    engine: EngineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the caches of this machine to storage (a path, file:///…, s3://…)."""
    with handle_errors(as_json=as_json):
        artifact_settings = _settings(kinds, None, as_json=as_json)
        from rfork import artifacts
        from rfork.artifacts.storage import ANY_MODEL

        written, packed = artifacts.save(uri, model=model or ANY_MODEL, engine=engine, artifacts=artifact_settings)
        if as_json:
            print_json(
                {
                    "uri": written.uri,
                    "files": packed.files,
                    "bytes": packed.bytes,
                    "bytes_written": written.written,
                    "left_out": packed.skipped,
                }
            )
        else:
            size = f"{packed.files} files, {packed.bytes / 1e6:.1f} MB"
            out.print(f"{written.uri}: {size} written{_left_out(packed.skipped)}", markup=False)


@app.command("load")
def load(
    uri: UriArgument,
    kinds: CacheTypesOption = None,
    engine: EngineOption = None,
    deadline: DeadlineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take caches that were saved for a machine as this one. None there is no error: the engine compiles."""
    with handle_errors(as_json=as_json):
        artifact_settings = _settings(kinds, deadline, as_json=as_json)
        from rfork import artifacts

        _print_report(artifacts.load(uri, engine=engine, artifacts=artifact_settings), as_json=as_json)


@app.command("pull")
def pull(
    model: ModelOption,
    planner: PlannerOption = None,
    kinds: CacheTypesOption = None,
    engine: EngineOption = None,
    deadline: DeadlineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take caches from instances that run, before the engine starts. None there is no error either."""
    with handle_errors(as_json=as_json):
        artifact_settings = _settings(kinds, deadline, as_json=as_json)
        chosen = options.load(InstanceSettings, planner=planner)
        from rfork import artifacts

        with Bar(f"artifacts of {model}") as bar:

            def show(progress: ForkProgress, image_bytes: int) -> None:
                bar.update(min(progress.bytes_read, image_bytes), image_bytes, sources_note(progress.sources))

            report = artifacts.fetch(
                model=model, engine=engine, settings=chosen, artifacts=artifact_settings, on_progress=show
            )
        _print_report(report, as_json=as_json)


@app.command("seed")
def seed(
    model: ModelOption,
    planner: PlannerOption = None,
    kinds: CacheTypesOption = None,
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
    with handle_errors(as_json=as_json):
        artifact_settings = _settings(kinds, None, as_json=as_json, interval=interval)
        chosen = options.load(
            InstanceSettings, planner=planner, bind=bind, node_name=host, max_egress_bytes_per_s=egress_rate
        )
        from rfork.artifacts import ArtifactServer, local_key

        if chosen.planner is None:
            err.print("[yellow]warning:[/] no planner is set, so nobody will find them (set RFORK_PLANNER)")
        stopped = shutdown_on_signal()
        with ArtifactServer(model, local_key(engine), chosen, artifact_settings) as server:
            while not stopped.is_set():
                if server.refresh():
                    _print_served(server, chosen, as_json=as_json)
                wait_for_shutdown(stopped, for_s=artifact_settings.interval_s)
            err.print("closing: readers may finish")


def _settings(
    kinds: str | None, deadline: float | None, *, as_json: bool, interval: float | None = None
) -> ArtifactSettings:
    """The settings, with logs as they say."""
    instance = options.load(InstanceSettings)
    configure_logs(instance, as_json=as_json, brief=True)
    return options.load(ArtifactSettings, kinds=kinds, deadline_s=deadline, interval_s=interval)


def _print_report(report: ArtifactReport, *, as_json: bool) -> None:
    if as_json:
        print_json(report.to_dict())
    else:
        out.print(report.line(), markup=False)


def _print_served(server: ArtifactServer, settings: InstanceSettings, *, as_json: bool) -> None:
    seed, packed = server.seed, server.packed
    if seed is None or packed is None:
        return
    if settings.planner is not None and not seed.wait_registered(settings.planner_timeout_s):
        err.print(f"[yellow]warning:[/] {redacted(settings.planner)} does not answer yet; trying on")
    report = seed.report()
    if as_json:
        ready_event = {
            "event": "ready",
            "files": packed.files,
            "bytes": packed.bytes,
            "left_out": packed.skipped,
        }
        print_json({**ready_event, **report.model_dump(mode="json")})
        return
    out.print(
        f"giving {packed.files} files ({packed.bytes / 1e6:.1f} MB) at {report.address} over "
        f"{', '.join(report.transports)}{_left_out(packed.skipped)}; {report.model}",
        markup=False,
    )


def _left_out(counts: dict[str, int]) -> str:
    counts_text = ", ".join(f"{count} {why}" for why, count in counts.items())
    return f"; left out: {counts_text}" if counts_text else ""
