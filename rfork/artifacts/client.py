"""Taking the caches that others have filled, before the engine starts. Runs on the target.

Nothing here fails a start: what cannot be taken is compiled, and the report says why.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rfork import settings as options
from rfork.artifacts.cache_types import CACHE_TYPES, CacheDir, cache_dirs
from rfork.artifacts.key import ArtifactKey, local_key, name_of, parse_name, prefix_of
from rfork.artifacts.metadata import check_groups, check_layout, key_of, read_metadata
from rfork.artifacts.report import ArtifactReport
from rfork.artifacts.server import DISABLED_MESSAGE, ENABLE_HINT
from rfork.artifacts.unpack import Unpacked, unpack
from rfork.errors import (
    DeadlineExceeded,
    LayoutMismatch,
    NoSource,
    RforkError,
    SettingsError,
    StorageError,
    UserError,
)
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.planner_client.client import PlannerClient
from rfork.receiver.fetch import CheckLayout, fetch_with_report
from rfork.receiver.progress import OnProgress
from rfork.receiver.report import short_id
from rfork.schema import InstanceReport
from rfork.settings import ArtifactSettings, InstanceSettings

log = logger(__name__)

MIN_TIMEOUT_S = 0.1
"""A time that is over is given as so many seconds to what must have some."""
MAX_SOURCES = 3
"""Images that are tried one after the other: each holds other files, and any of them helps."""


def fetch(
    *,
    model: str,
    planner: str | None = None,
    engine: str | None = None,
    settings: InstanceSettings | None = None,
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
    chosen = settings or options.load(InstanceSettings)
    if planner is not None:
        chosen = chosen.model_copy(update={"planner": planner})
    artifact_settings = artifacts or options.load(ArtifactSettings)
    began = time.monotonic()
    wanted = cache_dirs(artifact_settings)
    if not wanted:
        return ArtifactReport(model, "", reason=f"{DISABLED_MESSAGE}: {ENABLE_HINT}")
    key = local_key(engine)
    report = ArtifactReport(model, key.id)
    try:
        report = _fetch(model, key, wanted, chosen, artifact_settings, began, on_progress)
    except UserError:
        raise
    except RforkError as error:
        report = replace(report, reason=f"{error.kind}: {error}")
    report = replace(report, seconds=round(time.monotonic() - began, 3))
    log.info("artifacts", report=report.line())
    return report


def install_image(
    image: Image,
    wanted: Sequence[CacheDir],
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
    validate_layout(settings, wanted)(image.layout)
    metadata = read_metadata(image)
    if differences := key.differences(key_of(metadata)):
        raise LayoutMismatch(f"these artifacts were made for another machine: {'; '.join(differences)}")
    check_groups(image)
    done, failed = Unpacked(), ""
    try:
        unpack(image, metadata, wanted, deadline, done)
    except (StorageError, DeadlineExceeded) as error:
        failed = f"{error.kind}: {error}"
    return replace(
        report,
        files=done.files,
        bytes=done.bytes,
        already_present=done.already_present,
        kept_existing=done.kept_existing,
        source=report.source if done.files or not failed else None,
        reason="; ".join(filter(None, (failed, *done.skipped))) or None,
    )


def validate_layout(settings: ArtifactSettings, wanted: Sequence[CacheDir]) -> CheckLayout:
    """Refuses a layout before its bytes are asked for."""
    cache_types = {**CACHE_TYPES, **{cache_dir.cache_type.name: cache_dir.cache_type for cache_dir in wanted}}
    return lambda layout: check_layout(layout, cache_types, settings.max_files, settings.max_bytes)


def other_keys(names: Iterable[str], key: ArtifactKey) -> str:
    """Of what is given under other keys: the one that differs least, and in what."""
    others = {other for name in names if (other := parse_name(name)) is not None and other != key}
    if not others:
        return ""
    nearest = min(others, key=lambda other: (len(key.differences(other)), other.id))
    more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
    return f"only for another machine{more}: {'; '.join(key.differences(nearest))}"


def _fetch(
    model: str,
    key: ArtifactKey,
    wanted: Sequence[CacheDir],
    settings: InstanceSettings,
    artifact_settings: ArtifactSettings,
    began: float,
    on_progress: OnProgress | None,
) -> ArtifactReport:
    if settings.planner is None:
        raise SettingsError("no planner is set", hint="set RFORK_PLANNER or pass planner=")
    report = ArtifactReport(model, key.id)
    deadline = began + artifact_settings.deadline_s
    left = max(deadline - time.monotonic(), MIN_TIMEOUT_S)
    with _connect(_with_timeout(settings, left)) as planner:
        holders = _sources(planner, model, key, artifact_settings.max_bytes)
    last_error: RforkError | None = None
    for holder in holders:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        # One that died a moment ago is still listed: then another's image does as well.
        try:
            image, source = _image(
                holder, _with_timeout(settings, left), on_progress, validate_layout(artifact_settings, wanted)
            )
            report = replace(report, source=source)
            return install_image(image, wanted, key, artifact_settings, deadline, report)
        except UserError:
            raise
        except RforkError as error:
            log.info("artifacts not taken", holder=short_id(holder.instance_id), because=str(error))
            last_error = error
    raise last_error or NoSource(f"the {artifact_settings.deadline_s:.0f} s for taking artifacts are over")


def _image(
    holder: InstanceReport, settings: InstanceSettings, on_progress: OnProgress | None, refuse: CheckLayout
) -> tuple[Image, str]:
    """The holder's image, and who gave it."""
    image, _, fork = fetch_with_report(holder, lambda: _connect(settings), settings, on_progress, refuse)
    return image, ", ".join(f"{short_id(share.source_id)}@{share.host}" for share in fork.sources)


def _with_timeout(settings: InstanceSettings, left: float) -> InstanceSettings:
    """Settings of a fork that may take so many seconds, and leaves the weights' own ports and spool alone.

    Programs are always verified, whatever the settings say of weights.
    """
    return settings.model_copy(
        update={
            "deadline_s": left,
            "patience_s": min(settings.no_source_timeout_s, left),
            "stall_s": min(settings.source_idle_timeout_s, left),
            "planner_timeout_s": min(settings.planner_timeout_s, left),
            "verify": True,
            "resume": None,
            "peer_port": 0,
            "http_port": 0,
        }
    )


def _sources(planner: PlannerClient, model: str, key: ArtifactKey, max_bytes: int) -> list[InstanceReport]:
    """One instance for each image with this key, those with the most bytes first. Raises NoSource."""
    complete = [
        view.report
        for view in planner.instances()
        if view.report.model.startswith(prefix_of(model))
        and view.report.state == "serving"
        and view.report.weights_id is not None
    ]
    name = name_of(model, key)
    named = [report for report in complete if report.model == name]
    mine = [report for report in named if report.image_bytes <= max_bytes]
    if named and not mine:
        min_bytes = min(report.image_bytes for report in named)
        raise NoSource(
            f"artifacts of {model}, {min_bytes} bytes, are larger than RFORK_ARTIFACTS_MAX_BYTES ({max_bytes})"
        )
    if not mine:
        others = other_keys((report.model for report in complete), key)
        raise NoSource(f"nobody gives artifacts of {model}" + (f" for this machine, {others}" if others else ""))
    alike = Counter(report.layout_id for report in mine)
    one = {report.layout_id: report for report in mine}.values()
    return sorted(one, key=lambda report: (-report.image_bytes, -alike[report.layout_id]))[:MAX_SOURCES]


def _connect(settings: InstanceSettings) -> PlannerClient:
    connected = PlannerClient.of(settings) if settings.planner is not None else None
    if connected is None:
        raise SettingsError("no planner is set", hint="set RFORK_PLANNER or pass planner=")
    return connected
