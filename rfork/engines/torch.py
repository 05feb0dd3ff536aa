"""rfork for any `nn.Module`: `fork` fills one from a running instance, `seed` gives one to others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import nn

from rfork import settings as options
from rfork.control.client import PlannerClient
from rfork.engines.call_checks import (
    check_callable,
    check_deadline,
    check_model_name,
    check_module,
    check_patterns,
    check_rank,
    check_uri,
)
from rfork.errors import SettingsError, UnsupportedTensor
from rfork.fork.fallback import Fallback, checkpoint_fallback, loader_fallback, snapshot_fallback
from rfork.fork.progress import OnProgress
from rfork.fork.report import ForkReport
from rfork.fork.session import ForkSession
from rfork.image.capture import capture
from rfork.peer.client import PeerClient
from rfork.seed.holding import seal
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings, StorageSettings
from rfork.transport.choice import choose
from rfork.wire import Rank


def fork(
    module: nn.Module,
    *,
    model: str,
    planner: str | None = None,
    rank: Rank | None = None,
    deadline: float | None = None,
    snapshot: str | Path | None = None,
    checkpoint: str | Path | None = None,
    loader: Callable[[nn.Module], None] | None = None,
    exclude: Sequence[str] = (),
    settings: Settings | None = None,
    on_progress: OnProgress | None = None,
) -> ForkReport:
    """Fill `module` with the weights of a running instance of `model`, in place. Runs on the target.

    The module must be built as the seeds' were, in its final layout; its weights may hold anything.
    While it is filled, and from then on, this process gives the weights onwards: `ForkReport.seed`
    is that giving side, open until it is closed or the process ends. An engine that serves from here on
    tells it of each step (`Seed.serving`), so that forks of this instance do not slow it down.

    What this instance could read by itself is, best first: `snapshot` (a file, or the folder that holds one
    for each rank), else that which the settings name; `checkpoint` (safetensors files), and
    `loader(module)`. Both are paths, or URIs of any storage. Where no instance holds the
    weights, the planner elects one of those that wait to read them, for all: this one may be it, and
    `ForkReport.storage_bytes` says what it read. A loader is run on the calling thread. With the
    setting `cold_start` ``own`` nobody is waited for. When nothing else works, or the deadline
    passed, each of these ways is tried here in that order. A loader has to fill all parameters and
    persistent buffers. With the setting `required`, `checkpoint` and `loader` are not used.

    `planner` (URL) and `deadline` (seconds) override `settings`, which are those of the environment where
    none are given. `rank` says which part of a model this process holds; without one, all of it. Tensors
    whose names match a pattern in `exclude` (of `fnmatch`) are neither read nor given. `on_progress` is told
    how it goes, and the image's size in bytes, about four times a second, on a thread of rfork's.

    Raises NothingLeft when nothing worked, and UserError kinds for what the caller got wrong; the
    module's content is then undefined. It is never half filled and returned as a success.
    """
    check_module(module)
    check_deadline(deadline)
    for name, uri in (("snapshot", snapshot), ("checkpoint", checkpoint), ("planner", planner)):
        check_uri(name, uri)
    for name, function in (("loader", loader), ("on_progress", on_progress)):
        check_callable(name, function)
    ways = []
    if checkpoint is not None:
        ways.append(checkpoint_fallback(checkpoint, options.load(StorageSettings)))
    if loader is not None:
        ways.append(loader_fallback(loader))
    return run_fork(
        module,
        model=model,
        rank=rank,
        snapshot=snapshot,
        ways=ways,
        exclude=exclude,
        settings=settings_of(settings, planner=planner, deadline_s=deadline),
        on_progress=on_progress,
    )


def run_fork(
    module: nn.Module,
    *,
    model: str,
    rank: Rank | None,
    snapshot: str | Path | None,
    ways: Sequence[Fallback],
    exclude: Sequence[str],
    settings: Settings,
    on_progress: OnProgress | None,
) -> ForkReport:
    """As `fork`, for rooms of engines: what follows the snapshot is given as `ways`, best first.

    With the setting `required` only the snapshot does.
    """
    check_model_name(model)
    check_rank(rank)
    check_patterns(exclude)
    named = snapshot or settings.snapshot
    if settings.required and settings.planner is None and named is None:
        raise SettingsError(
            "neither a planner nor a snapshot is set, and RFORK_REQUIRED is",
            hint="set RFORK_PLANNER or RFORK_SNAPSHOT",
        )
    fallbacks = [] if settings.required else list(ways)
    if named is not None:
        fallbacks.insert(0, snapshot_fallback(named, exclude, rank, options.load(StorageSettings)))
    return ForkSession(
        module,
        Identity.of(model, rank or Rank(), settings.replica),
        settings,
        choose(settings),
        planner=PlannerClient.of(settings) if settings.planner is not None else None,
        dial=lambda address, token: PeerClient(address, token, settings.tls),
        fallbacks=fallbacks,
        on_progress=on_progress,
        exclude=exclude,
    ).run()


@contextlib.contextmanager
def seed(
    module: nn.Module,
    *,
    model: str,
    planner: str | None = None,
    rank: Rank | None = None,
    exclude: Sequence[str] = (),
    settings: Settings | None = None,
) -> Iterator[Seed]:
    """Give `module`'s weights to whoever the planner sends, while the block runs. Runs on the source.

    The weights must not change inside the block but in one of ``with giving.updating():``, whose end
    digests them anew and gives them from then on (`Seed.updating`). On leaving, readers get
    `settings.drain_s` seconds to finish.

    Forks meet it under the name `model`. `planner` (URL) overrides `settings`, which are those of the
    environment where none are given; `rank` says which part of a model this is, without one all of it;
    tensors whose names match a pattern in `exclude` (of `fnmatch`) are not given, and a fork has to exclude
    them too.

    Who serves meanwhile puts each step of that into ``with giving.serving():``: readers are then held back
    as far as the steps would take longer for them (`Settings.latency_setpoint`).

    Raises UnsupportedTensor for a tensor that has no bytes to give, and where there is none at all; PortInUse
    where a port of the settings is taken. A planner that does not answer is no error: it is told later.
    """
    check_module(module)
    check_model_name(model)
    check_rank(rank)
    check_patterns(exclude)
    check_uri("planner", planner)
    chosen = settings_of(settings, planner=planner)
    image = capture(module, exclude=exclude)
    if not image.layout.image_bytes:
        raise UnsupportedTensor("(all)", "the module has no tensor with bytes, so there is nothing to seed")
    with Seed(
        image,
        Identity.of(model, rank or Rank(), chosen.replica),
        chosen,
        choose(chosen),
        manifest=seal(image),
        planner=PlannerClient.of(chosen) if chosen.planner is not None else None,
    ) as giving:
        yield giving


def settings_of(settings: Settings | None, **overrides: object) -> Settings:
    """These settings, or those of the environment, with what was given (not None) on top.

    Raises SettingsError for a value that cannot be used, also of settings that were made without a check.
    """
    if settings is None:
        return options.load(Settings, **overrides)
    return options.checked(Settings, settings, **overrides)
