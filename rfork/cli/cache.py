"""`rfork cache`: list, save, load and share the JIT caches of engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from rfork import settings as options
from rfork.addresses import redacted
from rfork.cli.console import Bar, configure_logs, err, handle_errors, print_result, warn
from rfork.cli.formatters import plural
from rfork.cli.options import BindOption, EgressOption, HostOption, JsonOption, PlannerOption
from rfork.settings import ArtifactSettings, InstanceSettings
from rfork.shutdown import shutdown_on_signal, wait_for_shutdown

if TYPE_CHECKING:
    from rfork.artifacts.server import ArtifactServer

RESCAN_INTERVAL_S: Final = 30.0

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help=(
        "JIT caches of engines and libraries (Triton, torch.compile, FlashInfer, DeepGEMM, vLLM, SGLang).\n\n"
        "Caches contain programs: a malicious source can run code on this machine. They are off unless enabled "
        "with RFORK_ARTIFACTS_KINDS or --kinds."
    ),
)

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Model that the caches were compiled for, as named by the instances that serve them.",
    ),
]
CacheTypesOption = Annotated[
    str | None,
    typer.Option(
        "--kinds",
        metavar="KINDS",
        help="Caches to use, comma separated (`rfork cache ls` lists them), or all [env: RFORK_ARTIFACTS_KINDS]",
        show_default=False,
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="Name and version of the engine, if it is not installed here.",
        show_default=False,
    ),
]
UriArgument = Annotated[
    str,
    typer.Argument(
        metavar="URI", help="Folder with one file per key (a path, file:///…, s3://…), or a ….safetensors file."
    ),
]
DeadlineOption = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Maximum duration in seconds [default: 120]", min=0.1, show_default=False),
]


@app.command("ls")
def ls(kinds: CacheTypesOption = None, engine: EngineOption = None, as_json: JsonOption = False) -> None:
    """List the caches on this machine, and their key."""
    with handle_errors(as_json=as_json):
        artifact_settings = options.load(ArtifactSettings, kinds=kinds)
        from rfork.artifacts.cache_types import cache_dirs
        from rfork.artifacts.key import local_key
        from rfork.artifacts.pack import found_in

        key = local_key(engine)
        caches, lines = [], [f"key {key.id}: {key.description}"]
        for cache_dir in cache_dirs(artifact_settings, all_known=True):
            cache_type, problem = cache_dir.cache_type, cache_dir.problem()
            sizes = [found.size for found in found_in(cache_dir)]
            caches.append(
                {
                    "type": cache_type.name,
                    "folder": str(cache_dir.folder),
                    "files": len(sizes),
                    "bytes": sum(sizes),
                    "path_bound": cache_type.path_bound,
                    "problem": problem,
                }
            )
            content = f"{plural(len(sizes), 'file')}, {sum(sizes) / 1e6:.1f} MB" if sizes else "no files"
            bound = "; usable only at this path" if cache_type.path_bound and sizes else ""
            lines.append(f"{cache_type.name}: {cache_dir.folder}: {problem or content}{bound}")
        result = {"key": key.id, "description": key.description, "caches": caches}
        print_result(result, "\n".join(lines), as_json=as_json)


@app.command("save")
def save(
    uri: UriArgument,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Name of the model, recorded in the file.", show_default=False),
    ] = None,
    kinds: CacheTypesOption = None,
    engine: EngineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the caches of this machine to storage."""
    with handle_errors(as_json=as_json):
        artifact_settings = _settings(kinds, as_json=as_json)
        from rfork import artifacts
        from rfork.artifacts.storage import ANY_MODEL

        written, packed = artifacts.save(uri, model=model or ANY_MODEL, engine=engine, artifacts=artifact_settings)
        result = {
            "uri": written.uri,
            "files": packed.files,
            "bytes": packed.bytes,
            "bytes_written": written.written,
            "skipped": packed.skipped,
        }
        size = f"{plural(packed.files, 'file')}, {packed.bytes / 1e6:.1f} MB"
        print_result(result, f"{written.uri}: {size} written{_skipped_text(packed.skipped)}", as_json=as_json)


@app.command("load")
def load(
    uri: UriArgument,
    kinds: CacheTypesOption = None,
    engine: EngineOption = None,
    deadline: DeadlineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load caches saved by a machine like this one. Not an error if there are none: the engine compiles."""
    with handle_errors(as_json=as_json):
        artifact_settings = _settings(kinds, as_json=as_json)
        from rfork import artifacts
        from rfork.artifacts.client import FETCH_DEADLINE_S

        report = artifacts.load(
            uri, engine=engine, artifacts=artifact_settings, deadline_s=deadline or FETCH_DEADLINE_S
        )
        print_result(report.to_dict(), report.line(), as_json=as_json)


@app.command("pull")
def pull(
    model: ModelOption,
    planner: PlannerOption = None,
    kinds: CacheTypesOption = None,
    engine: EngineOption = None,
    deadline: DeadlineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy caches from running instances before the engine starts. Not an error if there are none."""
    with handle_errors(as_json=as_json):
        artifact_settings = _settings(kinds, as_json=as_json)
        chosen = options.load(InstanceSettings, planner=planner)
        from rfork import artifacts
        from rfork.artifacts.client import FETCH_DEADLINE_S

        with Bar(f"cache of {model}") as bar:
            report = artifacts.fetch(
                model=model,
                engine=engine,
                settings=chosen,
                artifacts=artifact_settings,
                deadline_s=deadline or FETCH_DEADLINE_S,
                on_progress=bar.show_fork,
            )
        print_result(report.to_dict(), report.line(), as_json=as_json)


@app.command("seed")
def seed(
    model: ModelOption,
    planner: PlannerOption = None,
    kinds: CacheTypesOption = None,
    engine: EngineOption = None,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds between checks for new files.", min=0.1)
    ] = RESCAN_INTERVAL_S,
    bind: BindOption = None,
    host: HostOption = None,
    egress_rate: EgressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the caches of this machine until interrupted.

    Files compiled in the meantime are served too.
    """
    with handle_errors(as_json=as_json):
        artifact_settings = _settings(kinds, as_json=as_json)
        chosen = options.load(
            InstanceSettings, planner=planner, bind=bind, node_name=host, max_egress_bytes_per_s=egress_rate
        )
        from rfork.artifacts import ArtifactServer, local_key

        if chosen.planner is None:
            warn("no planner is set, so no instance can find these caches (set RFORK_PLANNER)")
        stopped = shutdown_on_signal()
        with ArtifactServer(model, local_key(engine), chosen, artifact_settings) as server:
            while not stopped.is_set():
                if server.refresh():
                    _print_served(server, chosen, as_json=as_json)
                wait_for_shutdown(stopped, for_s=interval)
            err.print("closing: waiting for readers")


def _settings(kinds: str | None, *, as_json: bool) -> ArtifactSettings:
    """Load the settings and configure logging."""
    instance = options.load(InstanceSettings)
    configure_logs(instance, as_json=as_json, brief=True)
    return options.load(ArtifactSettings, kinds=kinds)


def _print_served(server: ArtifactServer, settings: InstanceSettings, *, as_json: bool) -> None:
    seed, packed = server.seed, server.packed
    if seed is None or packed is None:
        return
    if settings.planner is not None and not seed.wait_registered(settings.planner_timeout_s):
        warn(f"planner {redacted(settings.planner)} is not reachable yet; retrying")
    report = seed.report()
    ready = {"event": "ready", "files": packed.files, "bytes": packed.bytes, "skipped": packed.skipped}
    print_result(
        {**ready, **report.model_dump(mode="json")},
        f"serving {plural(packed.files, 'file')} ({packed.bytes / 1e6:.1f} MB) at {report.address} over "
        f"{', '.join(report.transports)}{_skipped_text(packed.skipped)}; registered as model {report.model}",
        as_json=as_json,
    )


def _skipped_text(counts: dict[str, int]) -> str:
    counts_text = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    return f"; skipped: {counts_text}" if counts_text else ""
