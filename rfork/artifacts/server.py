"""Serves the JIT caches of this machine, packed as an image with its own seed. Runs on the source."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rfork import settings as options
from rfork.artifacts.cache_types import cache_dirs, required_cache_dirs
from rfork.artifacts.key import VERSION, ArtifactKey, local_key, name_of
from rfork.artifacts.pack import TRANSIENT_REASONS, Packed, found_in, pack
from rfork.errors import StorageNotFound
from rfork.image.memory import compute_manifest
from rfork.logs import logger
from rfork.settings import ArtifactSettings, InstanceSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed

log = logger(__name__)

Listing = frozenset[tuple[str, int, int]]
"""Name, size in bytes, and modification time of each file."""


class ArtifactServer:
    """Serves the current caches, and serves them again after they have grown. Use it as a context manager.

    New files change the layout, which a seed does not support: `refresh` starts a second seed with all files
    and then closes the first, whose readers may finish. Nothing is served before the first file exists.
    """

    def __init__(self, model: str, key: ArtifactKey, settings: InstanceSettings, artifacts: ArtifactSettings) -> None:
        """Raises SettingsError if no cache types are selected."""
        self._cache_dirs = required_cache_dirs(artifacts)
        self.name = name_of(model, key)
        self.packed: Packed | None = None
        self._key = key
        if settings.port_range_size == 1:  # the seed of the weights may use that port
            settings = settings.model_copy(update={"peer_port": 0, "http_port": 0})
        self._settings = settings
        self._artifacts = artifacts
        self._seed: Seed | None = None
        self._listed: Listing | None = None

    @property
    def seed(self) -> Seed | None:
        """The current seed; None while there is nothing to serve."""
        return self._seed

    def refresh(self) -> bool:
        """Pack again and serve the result if it has changed. Returns True if it has.

        If a file was added or changed, this takes `ArtifactSettings.quiet_period_s` plus the time to read all
        files. Raises the exceptions of starting a seed.
        """
        listed = frozenset(found[2:] for cache_dir in self._cache_dirs for found in found_in(cache_dir))
        if listed == self._listed:
            return False
        packed = pack(self._cache_dirs, self._key, self._artifacts)
        if packed is None:
            return False
        published = self._publish(packed)
        # A file skipped while it was written may be complete next time with an equal listing.
        self._listed = None if TRANSIENT_REASONS & packed.skipped.keys() else listed
        return published

    def _publish(self, packed: Packed) -> bool:
        """Serve the image if it differs from the current one. Returns True if it does."""
        manifest = compute_manifest(packed.image)
        before = self._seed
        if before is not None and before.manifest is not None and before.manifest.weights_id == manifest.weights_id:
            return False
        seed = Seed(
            packed.image,
            InstanceIdentity(self.name, version=VERSION),
            self._settings,
            Connections.of(self._settings),
            manifest=manifest,
        ).start()
        self._seed, self.packed = seed, packed
        log.info("serving artifacts", files=packed.files, megabytes=round(packed.bytes / 1e6, 1))
        if before is not None:
            seed.wait_registered(self._settings.planner_timeout_s)
            before.close(self._settings.drain_timeout_s)
        return True

    def close(self, drain_s: float | None = None) -> None:
        """Stop serving. Readers may finish within `drain_s` seconds (default: the setting)."""
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
    """Serve the current JIT caches of this machine for the duration of the block. Runs on the source.

    Any instance that the planner admits receives programs and will run them: see docs/artifacts.md. `engine`
    is the engine's name and version if it is not installed here. Initialises CUDA on machines with a GPU
    (`local_key`). Sources and targets find each other by `model`. `planner` (URL) overrides `settings`.
    `settings` and `artifacts` (cache types, folders, limits) default to the environment's.

    Raises SettingsError if no cache types are selected, and StorageNotFound if their folders contain no
    files.
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
                hint="serve artifacts after the engine has compiled its kernels",
            )
        yield server.seed
