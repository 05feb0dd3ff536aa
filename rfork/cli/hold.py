"""`rfork hold`: keep images of weights on this host, without an engine."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from typing import Annotated

import typer

from rfork import settings as options
from rfork.cli.console import configure_logs, err, handle_errors, log_misspelt_variables, print_result
from rfork.cli.options import BindOption, EgressOption, HostOption, JsonOption, PlannerOption, bytes_in
from rfork.errors import SettingsError, reason_of
from rfork.planner_client.client import PlannerClient
from rfork.schema import ImageSelector
from rfork.settings import InstanceSettings
from rfork.shutdown import shutdown_on_signal

DEFAULT_MEMORY = "50%"
_device = re.compile(r"cpu|cuda:\d+")


def hold(
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--models",
            metavar="MODEL[@VERSION]",
            help="Keep these weights in any case; repeatable. Without VERSION: those that most instances serve.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str,
        typer.Option(
            "--memory", metavar="SIZE", help="Memory for images: a size, as 64GB, or a part of the available memory."
        ),
    ] = DEFAULT_MEMORY,
    source: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="URI", help="Snapshots to read if no instance has the weights.", show_default=False
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Keep images in this memory: cpu, or a GPU as cuda:0.")
    ] = "cpu",
    one_shot: Annotated[
        bool, typer.Option("--one-shot", help="Keep only --models, and end once an engine on this host has them.")
    ] = False,
    until_pid: Annotated[
        int | None, typer.Option("--until-pid", metavar="PID", help="End with this process.", show_default=False)
    ] = None,
    planner: PlannerOption = None,
    bind: BindOption = None,
    host: HostOption = None,
    egress_rate: EgressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep images of weights on this host without an engine, until interrupted.

    It fetches the images of the engines on this host, those announced for it, and those of --models. Engines that
    start or restart on this host map them, and other hosts fork from them.
    """
    with handle_errors(as_json=as_json), ExitStack() as resources:
        chosen = options.load(
            InstanceSettings, planner=planner, bind=bind, node_name=host, max_egress_bytes_per_s=egress_rate
        )
        configure_logs(chosen, as_json=as_json)
        log_misspelt_variables()
        selectors = tuple(_selector(text) for text in models or ())
        if one_shot and not selectors:
            raise SettingsError("--one-shot requires --models", hint="e.g. --one-shot --models org/model")
        if not _device.fullmatch(device):
            raise SettingsError(f"--device: {device!r} is not a device", hint="cpu, or a GPU as cuda:0")
        memory_bytes = _memory_bytes(memory, device)
        client = resources.enter_context(PlannerClient.of(chosen))
        # Only now: torch is loaded, which takes a second.
        from rfork.holder.announced_caches import AnnouncedCaches
        from rfork.holder.host import host_lock, raise_file_limit
        from rfork.holder.process import Holder, HolderOptions
        from rfork.holder.snapshot_images import SnapshotImages

        if not one_shot:
            resources.enter_context(host_lock(chosen))
        raise_file_limit()
        snapshots = SnapshotImages.at(source) if source is not None else None
        holder = Holder(
            chosen.model_copy(update={"snapshot": source, "version": None, "replica": None, "model": None}),
            HolderOptions(
                memory_bytes=memory_bytes,
                selectors=selectors,
                follows_host=not one_shot,
                device=device,
                until_pid=until_pid,
            ),
            client,
            layout_of=snapshots.layout_of if snapshots is not None else None,
            own_wanted=snapshots.wanted if snapshots is not None else (),
            caches=None if one_shot else AnnouncedCaches(os.environ),  # its launcher pulls them
        )
        stopped = shutdown_on_signal()
        print_result(
            {"event": "ready", **holder.report().model_dump(mode="json")},
            f"holder ready: {memory_bytes / 1e9:.3g} GB for images on {chosen.node_name}, "
            f"holder {holder.holder_id[5:13]}",
            as_json=as_json,
        )
        reason = holder.run(stopped.is_set)
        err.print(f"holder ended: {reason}")


def _selector(text: str) -> ImageSelector:
    model, at, version = text.rpartition("@")
    try:
        return ImageSelector(model=model, version=version) if at else ImageSelector(model=text)
    except ValueError:
        raise SettingsError(f"--models: {text!r} is not a model", hint="e.g. org/model or org/model@v2") from None


def _memory_bytes(text: str, device: str) -> int:
    number, percent, _ = text.strip().partition("%")
    if not percent:
        return bytes_in(text, "--memory")
    try:
        part = float(number)
    except ValueError:
        part = 0.0
    if not 0 < part <= 100:
        raise SettingsError(f"--memory: {text!r} is not a part of the memory", hint="e.g. 50% or 64GB")
    return int(_available_memory(device) * part / 100)


def _available_memory(device: str) -> int:
    if device == "cpu":
        from rfork.transport.shared_memory.memory_budget import available_memory

        return available_memory()
    import torch

    try:
        free, _ = torch.cuda.mem_get_info(device)
    except (RuntimeError, AssertionError) as error:
        raise SettingsError(f"--device: {device} cannot be used: {reason_of(error)}") from None
    return free
