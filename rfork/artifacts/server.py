"""Giving the caches of this machine: packed, and seeded as an image of their own. Runs on the source."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rfork import settings as options
from rfork.artifacts.cache_types import cache_dirs
from rfork.artifacts.key import VERSION, ArtifactKey, local_key, name_of
from rfork.artifacts.pack import TRANSIENT_REASONS, Packed, found_in, pack
from rfork.errors import SettingsError, StorageNotFound
from rfork.logs import logger
from rfork.planner_client.client import PlannerClient
from rfork.settings import ArtifactSettings, InstanceSettings
from rfork.source.image_state import compute_manifest
from rfork.source.seed import InstanceIdentity, Seed
from rfork.transport.selection import select_transports

log = logger(__name__)

Listing = frozenset[tuple[str, int, int]]
"""Name, size in bytes, and time of change of each file."""
DISABLED_MESSAGE = "artifacts are off"
ENABLE_HINT = "they are programs: name those that you trust the fleet with in RFORK_ARTIFACTS_KINDS (or all)"


class ArtifactServer:
    """Gives the caches as they are, and anew when they have grown. Use as a context manager.

    New files make another layout, which a seed cannot take on: `refresh` starts a second seed with all files,
    then closes the first, whose readers may finish. Until there is a first file it gives nothing.
    """

    def __init__(self, model: str, key: ArtifactKey, settings: InstanceSettings, artifacts: ArtifactSettings) -> None:
        """Raises SettingsError where no kinds are named."""
        self._cache_dirs = cache_dirs(artifacts)
        if not self._cache_dirs:
            raise SettingsError(DISABLED_MESSAGE, hint=ENABLE_HINT)
        self.name = name_of(model, key)
        self.packed: Packed | None = None
        self._key = key
        # The weights' own seed may have the ports of the settings.
        ports = {"peer_port": artifacts.peer_port, "http_port": artifacts.http_port}
        self._settings = settings.model_copy(update=ports)
        self._artifacts = artifacts
        self._seed: Seed | None = None
        self._listed: Listing | None = None

    @property
    def seed(self) -> Seed | None:
        """What gives now; None until there is something to give."""
        return self._seed

    def refresh(self) -> bool:
        """Pack again, and give that where it is not what is given already; whether it is new.

        Takes as long as `ArtifactSettings.quiet_period_s` and reading all files, where any is another or changed
        since the last time. Raises what starting a seed does.
        """
        listed = frozenset(found[2:] for cache_dir in self._cache_dirs for found in found_in(cache_dir))
        if listed == self._listed:
            return False
        packed = pack(self._cache_dirs, self._key, self._artifacts)
        if packed is None:
            return False
        published = self._publish(packed)
        # What was left out for being at work may be done the next time, and look the same.
        self._listed = None if TRANSIENT_REASONS & packed.skipped.keys() else listed
        return published

    def _publish(self, packed: Packed) -> bool:
        """Give that where it is not what is given already; whether it is new."""
        manifest = compute_manifest(packed.image)
        before = self._seed
        if before is not None and before.manifest is not None:
            if before.manifest.weights_id == manifest.weights_id:
                return False
            if self._artifacts.peer_port or self._artifacts.http_port:
                self.close()  # there is one such port
                before = None
        seed = Seed(
            packed.image,
            InstanceIdentity(self.name, version=VERSION),
            self._settings,
            select_transports(self._settings),
            manifest=manifest,
            planner=PlannerClient.of(self._settings) if self._settings.planner is not None else None,
        ).start()
        self._seed, self.packed = seed, packed
        log.info("artifacts are given", files=packed.files, megabytes=round(packed.bytes / 1e6, 1))
        if before is not None:
            seed.wait_registered(self._settings.planner_timeout_s)
            before.close(self._settings.drain_timeout_s)
        return True

    def close(self, drain_s: float | None = None) -> None:
        """Stop giving; readers may finish within `drain_s` (the settings' own)."""
        if self._seed is not None:
            self._seed.close(self._settings.drain_timeout_s if drain_s is None else drain_s)
            self._seed = None

    def __enter__(self) -> ArtifactServer:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self.close(None if exc_type is None else 0.0)


@contextlib.contextmanager
def seed(
    *,
    model: str,
    planner: str | None = None,
    engine: str | None = None,
    settings: InstanceSettings | None = None,
    artifacts: ArtifactSettings | None = None,
) -> Iterator[Seed]:
    """Give the JIT caches of this machine, as they are now, while the block runs. Runs on the source.

    Whoever the planner lets in gets programs that it will run: see docs/artifacts.md. `engine` is its name
    and version where it is not installed here. Initialises CUDA where there is a GPU (`local_key`).
    Instances of `model` meet here; `planner` (URL) overrides `settings`; these and `artifacts` (which kinds,
    where they lie, how much) are those of the environment where none are given.

    Raises SettingsError where no kinds are named, StorageNotFound where their folders hold nothing.
    """
    chosen = settings or options.load(InstanceSettings)
    if planner is not None:
        chosen = chosen.model_copy(update={"planner": planner})
    artifact_settings = artifacts or options.load(ArtifactSettings)
    with ArtifactServer(model, local_key(engine), chosen, artifact_settings) as server:
        server.refresh()
        if server.seed is None:
            raise StorageNotFound(
                f"no files in {', '.join(str(cache_dir.folder) for cache_dir in cache_dirs(artifact_settings))}",
                hint="give them once the engine has compiled something",
            )
        yield server.seed
