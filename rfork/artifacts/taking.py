"""Taking the caches that others have filled, before the engine starts. Runs on the target.

Nothing here fails a start: what cannot be taken is compiled, and the report says why.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rfork import settings as options
from rfork.artifacts.contents import check_groups, check_layout, key_in, told_of
from rfork.artifacts.giving import HOW, OFF
from rfork.artifacts.key import ArtifactKey, key_of_here, key_of_name, name_of, prefix_of
from rfork.artifacts.kinds import KINDS, Place, places
from rfork.artifacts.report import ArtifactReport
from rfork.artifacts.unpacking import Unpacked, unpack
from rfork.control.client import PlannerClient
from rfork.errors import (
    DeadlinePassed,
    LayoutMismatch,
    NoSource,
    RforkError,
    SettingsError,
    StorageError,
    UserError,
)
from rfork.fork.fetching import CheckLayout, fetch_reported
from rfork.fork.progress import OnProgress
from rfork.fork.report import short
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.settings import ArtifactSettings, Settings
from rfork.wire import InstanceReport

log = logger(__name__)

LEAST_S = 0.1
"""A time that is over is given as so many seconds to what must have some."""
MOST_HOLDERS = 3
"""Images that are tried one after the other: each holds other files, and any of them helps."""


def fetch(
    *,
    model: str,
    planner: str | None = None,
    engine: str | None = None,
    settings: Settings | None = None,
    artifacts: ArtifactSettings | None = None,
    on_progress: OnProgress | None = None,
) -> ArtifactReport:
    """Take the JIT caches that instances of `model` with this machine's key give. Runs on the target.

    Call it before the engine starts, in a process of its own where the engine forks its workers: it
    initialises CUDA where there is a GPU. `planner` (URL) overrides `settings`; these and `artifacts` (which
    kinds, where they lie, how much) are those of the environment where none are given. `engine` is its name
    and version where it is not installed here. `on_progress` is as for `rfork.fork`. Off, nobody there,
    another key, no time left: each is a report with its reason, not an error. Raises UserError kinds alone,
    for settings that cannot be used.
    """
    chosen = settings or options.load(Settings)
    if planner is not None:
        chosen = chosen.model_copy(update={"planner": planner})
    told = artifacts or options.load(ArtifactSettings)
    began = time.monotonic()
    wanted = places(told)
    if not wanted:
        return ArtifactReport(model, "", reason=f"{OFF}: {HOW}")
    key = key_of_here(engine)
    report = ArtifactReport(model, key.id)
    try:
        report = _fetch(model, key, wanted, chosen, told, began, on_progress)
    except UserError:
        raise
    except RforkError as error:
        report = replace(report, reason=f"{error.kind}: {error}")
    report = replace(report, seconds=round(time.monotonic() - began, 3))
    log.info("artifacts", report=report.line())
    return report


def place_image(
    image: Image,
    wanted: Sequence[Place],
    key: ArtifactKey,
    settings: ArtifactSettings,
    deadline: float,
    report: ArtifactReport,
) -> ArtifactReport:
    """Unpack an image whose bytes are right, from wherever it came: checked for what it says it is.

    What fails on this side's disk, or is over before all is in place, is the report's reason: another source
    would not help. Raises SourceCorrupt for what is no image of artifacts, LayoutMismatch for one of another
    key.
    """
    check(settings, wanted)(image.layout)
    told = told_of(image)
    if differences := key.differences(key_in(told)):
        raise LayoutMismatch(f"these artifacts were made for another machine: {'; '.join(differences)}")
    check_groups(image)
    done, failed = Unpacked(), ""
    try:
        unpack(image, told, wanted, deadline, done)
    except (StorageError, DeadlinePassed) as error:
        failed = f"{error.kind}: {error}"
    return replace(
        report,
        files=done.files,
        bytes=done.bytes,
        there=done.there,
        kept=done.kept,
        source=report.source if done.files or not failed else None,
        reason="; ".join(filter(None, (failed, *done.passed_over))) or None,
    )


def check(settings: ArtifactSettings, wanted: Sequence[Place]) -> CheckLayout:
    """Refuses a layout before its bytes are asked for."""
    kinds = {**KINDS, **{place.kind.name: place.kind for place in wanted}}
    return lambda layout: check_layout(layout, kinds, settings.most_files, settings.most_bytes)


def other_keys(names: Iterable[str], key: ArtifactKey) -> str:
    """Of what is given under other keys: the one that differs least, and in what."""
    others = {other for name in names if (other := key_of_name(name)) is not None and other != key}
    if not others:
        return ""
    nearest = min(others, key=lambda other: (len(key.differences(other)), other.id))
    more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
    return f"only for another machine{more}: {'; '.join(key.differences(nearest))}"


def _fetch(
    model: str,
    key: ArtifactKey,
    wanted: Sequence[Place],
    settings: Settings,
    told: ArtifactSettings,
    began: float,
    on_progress: OnProgress | None,
) -> ArtifactReport:
    if settings.planner is None:
        raise SettingsError("no planner is set", hint="set RFORK_PLANNER or pass planner=")
    report = ArtifactReport(model, key.id)
    deadline = began + told.deadline_s
    left = max(deadline - time.monotonic(), LEAST_S)
    with _connect(_bounded(settings, left)) as planner:
        holders = _holders(planner, model, key, told.most_bytes)
    last: RforkError | None = None
    for holder in holders:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        # One that died a moment ago is still listed: then another's image does as well.
        try:
            image, source = _image(holder, _bounded(settings, left), on_progress, check(told, wanted))
            report = replace(report, source=source)
            return place_image(image, wanted, key, told, deadline, report)
        except UserError:
            raise
        except RforkError as error:
            log.info("artifacts not taken", holder=short(holder.instance_id), because=str(error))
            last = error
    raise last or NoSource(f"the {told.deadline_s:.0f} s for taking artifacts are over")


def _image(
    holder: InstanceReport, settings: Settings, on_progress: OnProgress | None, refuse: CheckLayout
) -> tuple[Image, str]:
    """The holder's image, and who gave it."""
    image, _, fork = fetch_reported(holder, lambda: _connect(settings), settings, on_progress, refuse)
    return image, ", ".join(f"{short(share.source_id)}@{share.host}" for share in fork.sources)


def _bounded(settings: Settings, left: float) -> Settings:
    """Settings of a fork that may take so many seconds, and leaves the weights' own ports and spool alone.

    Programs are always verified, whatever the settings say of weights.
    """
    return settings.model_copy(
        update={
            "deadline_s": left,
            "patience_s": min(settings.patience_s, left),
            "stall_s": min(settings.stall_s, left),
            "planner_timeout_s": min(settings.planner_timeout_s, left),
            "verify": True,
            "resume": None,
            "peer_port": 0,
            "http_port": 0,
        }
    )


def _holders(planner: PlannerClient, model: str, key: ArtifactKey, most_bytes: int) -> list[InstanceReport]:
    """One instance for each image with this key, those with the most bytes first. Raises NoSource."""
    whole = [
        view.report
        for view in planner.instances()
        if view.report.model.startswith(prefix_of(model))
        and view.report.state == "serving"
        and view.report.weights_id is not None
    ]
    name = name_of(model, key)
    named = [report for report in whole if report.model == name]
    mine = [report for report in named if report.image_bytes <= most_bytes]
    if named and not mine:
        least = min(report.image_bytes for report in named)
        raise NoSource(
            f"artifacts of {model}, {least} bytes, are larger than RFORK_ARTIFACTS_MOST_BYTES ({most_bytes})"
        )
    if not mine:
        others = other_keys((report.model for report in whole), key)
        raise NoSource(
            f"nobody gives artifacts of {model}" + (f" for this machine, {others}" if others else "")
        )
    alike = Counter(report.layout_id for report in mine)
    one = {report.layout_id: report for report in mine}.values()
    return sorted(one, key=lambda report: (-report.image_bytes, -alike[report.layout_id]))[:MOST_HOLDERS]


def _connect(settings: Settings) -> PlannerClient:
    connected = PlannerClient.of(settings) if settings.planner is not None else None
    if connected is None:
        raise SettingsError("no planner is set", hint="set RFORK_PLANNER or pass planner=")
    return connected
