"""`rfork seed`: load a model folder and serve its weights."""

from __future__ import annotations

from rfork import settings as options
from rfork.addresses import redacted
from rfork.cli.console import (
    configure_logs,
    err,
    handle_errors,
    log_misspelt_variables,
    print_result,
    transformers_loads,
    warn,
)
from rfork.cli.formatters import plural
from rfork.cli.options import (
    BindOption,
    EgressOption,
    FolderArgument,
    HostOption,
    JsonOption,
    NameOption,
    PlannerOption,
    VersionOption,
    model_name,
)
from rfork.settings import InstanceSettings
from rfork.shutdown import shutdown_on_signal, wait_for_shutdown
from rfork.weights_version import short


def seed(
    folder: FolderArgument,
    name: NameOption = None,
    version: VersionOption = None,
    planner: PlannerOption = None,
    bind: BindOption = None,
    host: HostOption = None,
    egress_rate: EgressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a Hugging Face folder with transformers and seed it until interrupted."""
    with handle_errors(as_json=as_json):
        chosen = options.load(
            InstanceSettings,
            planner=planner,
            bind=bind,
            node_name=host,
            max_egress_bytes_per_s=egress_rate,
            version=version,
        )
        configure_logs(chosen, as_json=as_json)
        log_misspelt_variables()
        from rfork import _api as engine
        from rfork.engines.transformers import loaded_model
        from rfork.storage.versions.version import version_of_files

        if chosen.planner is None:
            warn("no planner is set, so forks cannot find this seed (set RFORK_PLANNER)")
        model, before = model_name(folder, name), version_of_files(folder)
        with transformers_loads(f"load {model}"):
            module = loaded_model(folder)
        # If files changed during the load, it is unknown which were read: derive the version from the
        # weights.
        own = before if before == version_of_files(folder) else None
        with engine.seed(module, model=model, version=chosen.version or own, settings=chosen) as served:
            if chosen.planner is not None and not served.wait_registered(chosen.planner_timeout_s):
                warn(f"planner {redacted(chosen.planner)} is not reachable yet; retrying")
            report, stopped = served.report(), shutdown_on_signal()
            size = f"{report.image_bytes / 1e9:.3f} GB, {plural(report.chunk_count, 'chunk')}"
            print_result(
                {"event": "ready", **report.model_dump(mode="json")},
                f"seed ready: {report.model} ({size}) at {report.address} over {', '.join(report.transports)}; "
                f"version {short(report.version)}, instance {report.instance_id[:8]}",
                as_json=as_json,
            )
            wait_for_shutdown(stopped)
            err.print("closing: waiting for readers")
