"""Public functions for any `nn.Module`: `fork` fills one from a running instance, `seed` serves one."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from torch import nn

from rfork import settings as options
from rfork.engines.arguments import (
    check_callable,
    check_deadline,
    check_model_name,
    check_module,
    check_patterns,
    check_rank,
    check_uri,
)
from rfork.engines.identity import CurrentVersion, choose_version, replica_of
from rfork.errors import ALL_TENSORS, SettingsError, UnsupportedTensor
from rfork.image.capture import capture, plain_values, recapture
from rfork.image.layout import Manifest
from rfork.image.memory import Image, compute_manifest
from rfork.receiver.fallback import Fallback, checkpoint_fallback, loader_fallback, snapshot_fallback
from rfork.receiver.planner_requests import OnProgress
from rfork.receiver.report import ForkReport
from rfork.receiver.session import ForkOptions, ForkSession, Network, OnStarted
from rfork.schema import Rank
from rfork.settings import InstanceSettings, StorageSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.weights_version import is_single, of_weights, unnamed


def fork(
    module: nn.Module,
    *,
    model: str,
    version: str | None = None,
    planner: str | None = None,
    rank: Rank | None = None,
    replica: str | None = None,
    deadline: float | None = None,
    snapshot: str | Path | None = None,
    checkpoint: str | Path | None = None,
    loader: Callable[[nn.Module], None] | None = None,
    exclude: Sequence[str] = (),
    settings: InstanceSettings | None = None,
    on_progress: OnProgress | None = None,
) -> ForkReport:
    """Fill `module` in place with the weights of a running instance of `model`. Runs on the target.

    The module must be built like the seeds', in its final layout; its weights may have any value. It receives
    weights of one version: `version`, otherwise that of `checkpoint`, otherwise that of the snapshot. Without
    any of these it adopts the served version if there is exactly one (`ForkReport.version`); if there are
    several, it uses its fallbacks. All ranks with one `replica` get one version; ranks whose processes share
    torch.distributed's default group agree on a replica automatically.

    While it is filled, and afterwards, this process serves the weights: `ForkReport.seed` is the seed, open
    until it is closed or the process ends. An engine that serves reports each step to it
    (`Seed.measure_step`), so that forks do not slow it down.

    Storage, in order of preference: `snapshot` (a file, or the folder with one for each rank), otherwise that
    of the settings; `checkpoint` (safetensors files); and `loader(module)`. The first two are paths or URIs
    of any storage. If no instance has the weights, the planner elects one of the waiting instances to read
    them for all: this one may be elected, and `ForkReport.storage_bytes` is what it read. A loader runs on
    the calling thread. With the setting `cold_start` ``independent`` each instance reads for itself. If
    nothing else works, or the deadline passes, these are used as fallbacks in that order. A loader must fill
    all parameters and persistent buffers. With the setting `fail_if_not_forked`, `checkpoint` and `loader`
    are not used.

    `planner` (URL) and `deadline` (seconds) override `settings`, which default to the environment. `rank` is
    the part of a model that this process has; by default, all of it. Tensors whose names match a pattern in
    `exclude` (of `fnmatch`) are neither read nor served. `on_progress` receives the progress and the image's
    size in bytes about four times a second, on one of rfork's threads.

    Raises AllSourcesFailed if nothing worked, and subclasses of UserError for invalid arguments; the module's
    content is then undefined. A partially filled module is never reported as a success.
    """
    check_module(module)
    check_deadline(deadline)
    for name, uri in (("snapshot", snapshot), ("checkpoint", checkpoint), ("planner", planner)):
        check_uri(name, uri)
    for name, function in (("loader", loader), ("on_progress", on_progress)):
        check_callable(name, function)
    fallbacks: list[Fallback] = []
    files: CurrentVersion | None = None
    if checkpoint is not None:
        # Imported where it is used: a fork without a checkpoint does not wait for it.
        from rfork.storage.versions.version import version_of_files

        storage = options.load(StorageSettings)
        fallbacks.append(checkpoint_fallback(checkpoint, storage))
        files = partial(version_of_files, checkpoint, settings=storage)
    if loader is not None:
        fallbacks.append(loader_fallback(loader))
    report = fork_with_fallbacks(
        module,
        model=model,
        rank=rank,
        snapshot=snapshot,
        later_fallbacks=fallbacks,
        files=files,
        exclude=exclude,
        settings=resolve_settings(settings, planner=planner, deadline_s=deadline, version=version, replica=replica),
        on_progress=on_progress,
    )
    if report.seed is not None:
        find_replaced_tensors(report.seed, module, exclude)
    return report


def fork_with_fallbacks(
    module: nn.Module,
    *,
    model: str,
    rank: Rank | None,
    snapshot: str | Path | None,
    later_fallbacks: Sequence[Fallback],
    files: CurrentVersion | None,
    exclude: Sequence[str],
    settings: InstanceSettings,
    on_progress: OnProgress | None,
    on_started: OnStarted | None = None,
) -> ForkReport:
    """Run `fork` for other engines: fallbacks after the snapshot are passed in order of preference.

    `files` computes the version of the files that they read; None: they have no version. With the setting
    `fail_if_not_forked`, only the snapshot and other instances are read. `on_started` is that of `ForkOptions`.
    """
    check_model_name(model)
    check_rank(rank)
    check_patterns(exclude)
    named, rank = snapshot or settings.snapshot, rank or Rank()
    reason = settings.fork_required_reason
    if reason is not None and settings.planner is None and named is None:
        raise SettingsError(
            f"{reason}, but neither a planner nor a snapshot is set",
            hint="set RFORK_PLANNER or RFORK_SNAPSHOT",
        )
    fallbacks, storage = (
        [each for each in later_fallbacks if reason is None or each.reads_instances],
        options.load(StorageSettings),
    )
    version, current_version = choose_version(settings.version, files, named, storage)
    if named is not None:
        fallbacks.insert(0, snapshot_fallback(named, exclude, rank, storage, version))
    return ForkSession(
        module,
        InstanceIdentity.of(model, rank, settings.replica, version=version, replica=replica_of(settings, rank)),
        settings,
        Network.of(settings),
        ForkOptions(
            fallbacks=fallbacks,
            current_version=current_version,
            exclude=exclude,
            on_progress=on_progress,
            on_started=on_started,
        ),
    ).run()


@contextlib.contextmanager
def seed(
    module: nn.Module,
    *,
    model: str,
    version: str | None = None,
    planner: str | None = None,
    rank: Rank | None = None,
    replica: str | None = None,
    exclude: Sequence[str] = (),
    settings: InstanceSettings | None = None,
) -> Iterator[Seed]:
    """Serve `module`'s weights to the readers that the planner assigns, while the block runs. Runs on the
    source.

    The weights may change only inside ``with seed.updating():``, whose end digests and serves the new ones
    (`Seed.updating`). On exit, readers get `settings.drain_timeout_s` seconds to finish.

    Forks meet it under `model` and `version`. Without a version (and the setting of that name), the version
    is derived from the weights' bytes or, for a model of several ranks, from the `replica`, which must be
    equal on all of them. `planner` (URL) overrides `settings`, which default to the environment; `rank` is
    the part of the model, by default all of it; tensors whose names match a pattern in `exclude` (of
    `fnmatch`) are not served, and a fork must exclude them too.

    A program that serves requests wraps each step in ``with seed.measure_step():``: readers are then
    throttled while steps take longer (`InstanceSettings.max_latency_ratio`).

    Raises UnsupportedTensor for a tensor without readable bytes, or if there is no tensor; PortInUse if a
    port of the settings is in use. A planner that does not respond is not an error: it is notified later.
    """
    check_module(module)
    check_model_name(model)
    check_rank(rank)
    check_patterns(exclude)
    check_uri("planner", planner)
    chosen = resolve_settings(settings, planner=planner, version=version, replica=replica)
    rank = rank or Rank()
    image = capture(module, exclude=exclude)
    if not image.layout.image_bytes:
        raise UnsupportedTensor(ALL_TENSORS, "it has no tensor with bytes, so there is nothing to seed")
    manifest, agreed = compute_manifest(image), replica_of(chosen, rank)
    with Seed(
        image,
        InstanceIdentity.of(
            model,
            rank,
            chosen.replica,
            version=chosen.version or _named(manifest, rank, agreed),
            replica=agreed,
        ),
        chosen,
        Connections.of(chosen),
        manifest=manifest,
    ) as served_seed:
        find_replaced_tensors(served_seed, module, exclude)
        del image  # an update may replace it
        yield served_seed


def find_replaced_tensors(seed: Seed, module: nn.Module, exclude: Sequence[str]) -> None:
    """Let a seed find, after each update, the tensors that were replaced in its module, and other changes.

    The seed does not keep the module alive: without it, nothing can have been replaced.
    """
    module_ref, values = weakref.ref(module), plain_values(module, exclude)

    def recaptured() -> Image:
        found, image = module_ref(), seed.image
        return image if found is None else recapture(found, image.layout, exclude=exclude, values=values)

    seed.recapture = recaptured


def _named(manifest: Manifest, rank: Rank, replica: str | None) -> str:
    """Return a version derived from the weights' bytes. Raises SettingsError."""
    if is_single(rank):
        return of_weights(manifest.weights_id)
    if replica is None:
        raise SettingsError(
            "the ranks of a seed need one version, and this one has none",
            hint="pass version= (or RFORK_VERSION), or replica=, equal on all ranks",
        )
    return unnamed(replica)


def resolve_settings(settings: InstanceSettings | None, **overrides: object) -> InstanceSettings:
    """Return settings (by default those of the environment) with the given values that are not None.

    Raises SettingsError for an invalid value, also of settings that were created without validation.
    """
    if settings is None:
        return options.load(InstanceSettings, **overrides)
    return options.checked(InstanceSettings, settings, **overrides)
