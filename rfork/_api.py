"""rfork for any `nn.Module`: `fork` fills one from a running instance, `seed` gives one to others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from torch import nn

from rfork import settings as options
from rfork.engines.argument_checks import (
    check_callable,
    check_deadline,
    check_model_name,
    check_module,
    check_patterns,
    check_rank,
    check_uri,
)
from rfork.engines.replica import replica_of
from rfork.engines.version_selection import CurrentVersion, choose_version, version_of_files
from rfork.errors import SettingsError, UnsupportedTensor
from rfork.image.capture import capture
from rfork.image.manifest import Manifest
from rfork.peer.client import PeerClient
from rfork.planner_client.client import PlannerClient
from rfork.receiver.fallback import Fallback, checkpoint_fallback, loader_fallback, snapshot_fallback
from rfork.receiver.progress import OnProgress
from rfork.receiver.report import ForkReport
from rfork.receiver.session import ForkSession
from rfork.schema import Rank
from rfork.settings import InstanceSettings, StorageSettings
from rfork.source.image_state import compute_manifest
from rfork.source.seed import InstanceIdentity, Seed
from rfork.transport.selection import select_transports
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
    """Fill `module` with the weights of a running instance of `model`, in place. Runs on the target.

    The module must be built as the seeds' were, in its final layout; its weights may hold anything. It gets
    weights of one version: `version`, else that of `checkpoint`, else that of the snapshot. Without any of
    these it takes over the version that is served, if there is exactly one (`ForkReport.version`); where
    several are, it loads by itself. All ranks that have one `replica` get one version; ranks whose processes
    share torch.distributed's default group agree by themselves.
    While it is filled, and from then on, this process gives the weights onwards: `ForkReport.seed`
    is that giving side, open until it is closed or the process ends. An engine that serves from here on
    tells it of each step (`Seed.serving`), so that forks of this instance do not slow it down.

    What this instance could read by itself is, best first: `snapshot` (a file, or the folder that holds one
    for each rank), else that which the settings name; `checkpoint` (safetensors files), and
    `loader(module)`. Both are paths, or URIs of any storage. Where no instance has the
    weights, the planner elects one of those that wait to read them, for all: this one may be it, and
    `ForkReport.storage_bytes` says what it read. A loader is run on the calling thread. With the
    setting `cold_start` ``independent`` nobody is waited for. When nothing else works, or the deadline
    passed, each of these ways is tried here in that order. A loader has to fill all parameters and
    persistent buffers. With the setting `required`, `checkpoint` and `loader` are not used.

    `planner` (URL) and `deadline` (seconds) override `settings`, which are those of the environment where
    none are given. `rank` says which part of a model this process holds; without one, all of it. Tensors
    whose names match a pattern in `exclude` (of `fnmatch`) are neither read nor given. `on_progress` is told
    how it goes, and the image's size in bytes, about four times a second, on a thread of rfork's.

    Raises AllSourcesFailed when nothing worked, and UserError kinds for what the caller got wrong; the
    module's content is then undefined. It is never half filled and returned as a success.
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
        storage = options.load(StorageSettings)
        fallbacks.append(checkpoint_fallback(checkpoint, storage))
        files = partial(version_of_files, checkpoint, settings=storage)
    if loader is not None:
        fallbacks.append(loader_fallback(loader))
    return fork_with_fallbacks(
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
) -> ForkReport:
    """As `fork`, for the other engines: what follows the snapshot is given as `ways`, best first.

    `files` computes the version of the files that they read; None: they have no version of their own. With
    the setting `required` only the snapshot is read.
    """
    check_model_name(model)
    check_rank(rank)
    check_patterns(exclude)
    named, rank = snapshot or settings.snapshot, rank or Rank()
    if settings.fail_if_not_forked and settings.planner is None and named is None:
        raise SettingsError(
            "neither a planner nor a snapshot is set, and RFORK_FAIL_IF_NOT_FORKED is",
            hint="set RFORK_PLANNER or RFORK_SNAPSHOT",
        )
    fallbacks, storage = (
        [] if settings.fail_if_not_forked else list(later_fallbacks),
        options.load(StorageSettings),
    )
    version, current_version = choose_version(settings.version, files, named, storage)
    if named is not None:
        fallbacks.insert(0, snapshot_fallback(named, exclude, rank, storage, version))
    return ForkSession(
        module,
        InstanceIdentity.of(model, rank, settings.replica, version=version, replica=replica_of(settings, rank)),
        settings,
        select_transports(settings),
        planner=PlannerClient.of(settings) if settings.planner is not None else None,
        dial=lambda address, token: PeerClient(address, token, settings.tls),
        fallbacks=fallbacks,
        on_progress=on_progress,
        exclude=exclude,
        current_version=current_version,
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
    """Give `module`'s weights to whoever the planner sends, while the block runs. Runs on the source.

    The weights must not change inside the block but in one of ``with giving.updating():``, whose end
    digests them anew and gives them from then on (`Seed.updating`). On leaving, readers get
    `settings.drain_s` seconds to finish.

    Forks meet it under the name `model` and `version`. Without a version (and the setting of that name) the
    weights are named after their bytes; of a model of several ranks, after the `replica`, which has to be
    equal on all of them. `planner` (URL) overrides `settings`, which are those of the
    environment where none are given; `rank` says which part of a model this is, without one all of it;
    tensors whose names match a pattern in `exclude` (of `fnmatch`) are not given, and a fork has to exclude
    them too.

    Who serves meanwhile puts each step of that into ``with giving.serving():``: readers are then held back
    as far as the steps would take longer for them (`InstanceSettings.max_latency_ratio`).

    Raises UnsupportedTensor for a tensor that has no bytes to give, and where there is none at all; PortInUse
    where a port of the settings is taken. A planner that does not answer is no error: it is told later.
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
        raise UnsupportedTensor("(all)", "the module has no tensor with bytes, so there is nothing to seed")
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
        select_transports(chosen),
        manifest=manifest,
        planner=PlannerClient.of(chosen) if chosen.planner is not None else None,
    ) as served_seed:
        yield served_seed


def _named(manifest: Manifest, rank: Rank, replica: str | None) -> str:
    """Return a version for weights of which nothing is known but their bytes. Raises SettingsError."""
    if is_single(rank):
        return of_weights(manifest.weights_id)
    if replica is None:
        raise SettingsError(
            "the ranks of a seed need one version, and this one has none",
            hint="pass version= (or RFORK_VERSION), or replica=, equal on all ranks",
        )
    return unnamed(replica)


def resolve_settings(settings: InstanceSettings | None, **overrides: object) -> InstanceSettings:
    """These settings, or those of the environment, with what was given (not None) on top.

    Raises SettingsError for a value that cannot be used, also of settings that were made without a check.
    """
    if settings is None:
        return options.load(InstanceSettings, **overrides)
    return options.checked(InstanceSettings, settings, **overrides)
