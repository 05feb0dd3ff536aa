"""Fetches JIT caches from other instances before the engine starts. Runs on the target.

A failure never prevents a start: missing code is compiled, and the report contains the reason.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from rfork import settings as options
from rfork.artifacts.cache_types import CACHE_TYPES, DISABLED_MESSAGE, ENABLE_HINT, CacheDir, cache_dirs
from rfork.artifacts.key import ArtifactKey, local_key, name_of, parse_name, prefix_of
from rfork.artifacts.metadata import MAX_FILES, check_groups, check_layout, read_metadata
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
from rfork.receiver.planner_requests import OnProgress
from rfork.receiver.report import short_id
from rfork.receiver.session import CheckLayout
from rfork.receiver.session import fetch as fetch_image
from rfork.schema import InstanceReport
from rfork.settings import ArtifactSettings, InstanceSettings


@dataclass(frozen=True, slots=True)
class ArtifactReport:
    """Result of fetching the caches for one start. Sizes in bytes, times in seconds.

    `model` is the requested name, `key` the id of the compatibility key (GPU, versions), `seconds` the
    duration of the call. `files` and `bytes` count what was installed; `already_present` files existed
    before, `kept_existing` files existed with other content, which was kept. `source` is the instance or the
    URI they came from, or None if nothing was fetched. `reason` is then the cause, else the caches that were
    skipped.
    """

    model: str
    key: str
    files: int = 0
    bytes: int = 0
    already_present: int = 0
    kept_existing: int = 0
    seconds: float = 0.0
    source: str | None = None
    reason: str | None = None

    def to_dict(self) -> dict[str, str | int | float | None]:
        """Return all values, ready for JSON."""
        return asdict(self)

    def line(self) -> str:
        """Return the report on one line."""
        if self.source is None:
            return f"no artifacts installed after {self.seconds:.2f} s: {self.reason}"
        also = f", {self.already_present} already present" if self.already_present else ""
        also += f", {self.kept_existing} existing kept" if self.kept_existing else ""
        also += f"; {self.reason}" if self.reason else ""
        return (
            f"{self.files} artifact files ({self.bytes / 1e6:.1f} MB) from {self.source} in {self.seconds:.2f} s{also}"
        )


log = logger(__name__)

FETCH_DEADLINE_S = 120.0
"""Time for which fetching artifacts may delay the start of an engine."""
MIN_TIMEOUT_S = 0.1
"""Minimum timeout in seconds, for calls that need one after the deadline has passed."""
MAX_SOURCES = 3
"""Maximum number of images tried in turn. They contain different files, and any of them helps."""


def fetch(
    *,
    model: str,
    planner: str | None = None,
    engine: str | None = None,
    settings: InstanceSettings | None = None,
    artifacts: ArtifactSettings | None = None,
    deadline_s: float = FETCH_DEADLINE_S,
    on_progress: OnProgress | None = None,
) -> ArtifactReport:
    """Fetch the JIT caches that instances of `model` serve for this machine's key. Runs on the target.

    Call it before the engine starts, and in a separate process if the engine forks its workers, because it
    initialises CUDA on machines with a GPU. `planner` (URL) overrides `settings`. `settings` and `artifacts`
    (cache types, folders, limits) default to the environment's. `engine` is the engine's name and version if
    it is not installed here. `deadline_s` limits the call, in seconds. `on_progress` is that of `rfork.fork`.
    If artifacts are disabled, or there is no source, only other keys, or no time left, the report contains
    the reason. Raises only UserError types, for invalid settings.
    """
    chosen = settings or options.load(InstanceSettings)
    if planner is not None:
        chosen = chosen.model_copy(update={"planner": planner})
    artifact_settings = artifacts or options.load(ArtifactSettings)

    def run(key: ArtifactKey, selected: Sequence[CacheDir], began: float) -> ArtifactReport:
        deadline = began + deadline_s
        with _connect(_with_timeout(chosen, max(deadline - time.monotonic(), MIN_TIMEOUT_S))) as client:
            instances = _instances_with(client, model, key, artifact_settings.max_bytes)
        last_error: RforkError | None = None
        for instance in instances:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            # A source that has just died is still listed; the next image may serve as well.
            try:
                check = validate_layout(artifact_settings, selected)
                image, _, fork = fetch_image(instance, _with_timeout(chosen, left_s), on_progress, check)
                sources = ", ".join(f"{short_id(share.source_id)}@{share.host}" for share in fork.sources)
                report = ArtifactReport(model, key.id, source=sources)
                return install_image(image, selected, key, artifact_settings, deadline, report)
            except UserError:
                raise
            except RforkError as error:
                log.info("failed to fetch artifacts", source=short_id(instance.instance_id), reason=str(error))
                last_error = error
        raise last_error or NoSource(f"the deadline of {deadline_s:g} s passed before any artifacts were received")

    return report_of("fetch", model, engine, artifact_settings, run)


def report_of(
    action: str,
    model: str,
    engine: str | None,
    settings: ArtifactSettings,
    run: Callable[[ArtifactKey, Sequence[CacheDir], float], ArtifactReport],
) -> ArtifactReport:
    """Return the report of `run`, with the reason if it fails, and the duration. Raises only UserError types.

    `run` receives this machine's key, the selected caches, and the time at which the call began.
    """
    began = time.monotonic()
    selected = cache_dirs(settings)
    if not selected:
        return ArtifactReport(model, "", reason=f"{DISABLED_MESSAGE}; {ENABLE_HINT}")
    key = local_key(engine)
    try:
        report = run(key, selected, began)
    except UserError:
        raise
    except RforkError as error:
        report = ArtifactReport(model, key.id, reason=f"{error.kind}: {error}")
    report = replace(report, seconds=round(time.monotonic() - began, 3))
    log.info(f"{action} of artifacts finished", report=report.line())
    return report


def install_image(
    image: Image,
    selected: Sequence[CacheDir],
    key: ArtifactKey,
    settings: ArtifactSettings,
    deadline: float,
    report: ArtifactReport,
) -> ArtifactReport:
    """Unpack a verified image from any source, after checking that it is a valid image of artifacts.

    If the local disk fails or the deadline passes, the reason is in the report, because another source would
    not help. Raises SourceCorrupt if it is not an image of artifacts, and LayoutMismatch if it has another
    key.
    """
    validate_layout(settings, selected)(image.layout)
    metadata = read_metadata(image)
    if differences := key.differences(ArtifactKey.parse(metadata.key)):
        raise LayoutMismatch(f"these artifacts were built for another machine: {'; '.join(differences)}")
    check_groups(image)
    done, failed = Unpacked(), ""
    try:
        unpack(image, metadata, selected, deadline, done)
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


def validate_layout(settings: ArtifactSettings, selected: Sequence[CacheDir]) -> CheckLayout:
    """Return a check that rejects a layout before its bytes are requested."""
    cache_types = {**CACHE_TYPES, **{cache_dir.cache_type.name: cache_dir.cache_type for cache_dir in selected}}
    return lambda layout: check_layout(layout, cache_types, MAX_FILES, settings.max_bytes)


def other_keys(names: Iterable[str], key: ArtifactKey) -> str:
    """Describe the most similar of the other keys that are served, and its differences."""
    others = {other for name in names if (other := parse_name(name)) is not None and other != key}
    if not others:
        return ""
    nearest = min(others, key=lambda other: (len(key.differences(other)), other.id))
    more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
    return f"only for another machine{more}: {'; '.join(key.differences(nearest))}"


def _with_timeout(settings: InstanceSettings, left_s: float) -> InstanceSettings:
    """Return settings for a fork of at most `left_s` seconds that uses neither the ports nor the spool of the weights.

    Programs are always verified, whatever the settings for weights are.
    """
    return settings.model_copy(
        update={
            "deadline_s": left_s,
            "no_source_timeout_s": min(settings.no_source_timeout_s, left_s),
            "source_idle_timeout_s": min(settings.source_idle_timeout_s, left_s),
            "planner_timeout_s": min(settings.planner_timeout_s, left_s),
            "verify_chunks": True,
            "resume_dir": None,
            "peer_port": 0,
            "http_port": 0,
        }
    )


def _instances_with(planner: PlannerClient, model: str, key: ArtifactKey, max_bytes: int) -> list[InstanceReport]:
    """Return one instance per image with this key, largest images first. Raises NoSource."""
    complete = [
        view.report
        for view in planner.instances()
        if view.report.model.startswith(prefix_of(model))
        and view.report.state == "serving"
        and view.report.weights_id is not None
    ]
    name = name_of(model, key)
    named = [report for report in complete if report.model == name]
    fitting = [report for report in named if report.image_bytes <= max_bytes]
    if named and not fitting:
        min_bytes = min(report.image_bytes for report in named)
        raise NoSource(
            f"the artifacts of {model} have {min_bytes} bytes, more than RFORK_ARTIFACTS_MAX_BYTES ({max_bytes}) of "
            "this instance"
        )
    if not fitting:
        others = other_keys((report.model for report in complete), key)
        raise NoSource(f"no instance serves artifacts of {model}" + (f" for this machine: {others}" if others else ""))
    instance_counts = Counter(report.layout_id for report in fitting)
    one_per_image = {report.layout_id: report for report in fitting}.values()
    ranked = sorted(one_per_image, key=lambda report: (-report.image_bytes, -instance_counts[report.layout_id]))
    return ranked[:MAX_SOURCES]


def _connect(settings: InstanceSettings) -> PlannerClient:
    if settings.planner is None:
        raise SettingsError("no planner is set", hint="set RFORK_PLANNER, or pass --planner URL (in Python planner=)")
    return PlannerClient.of(settings)
