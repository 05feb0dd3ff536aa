"""The JIT caches that are known: where each lies, and what in it must stay where it is.

Sources: `torch/_inductor/runtime/cache_dir_utils.py`, `triton/runtime/cache.py`, `flashinfer/jit/env.py` and
`core.py`, DeepGEMM's `csrc/jit/compiler.hpp`, `sglang/srt/environ.py`,
vLLM's `docs/design/torch_compile.md`. Runs on both sides.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from rfork.errors import SettingsError
from rfork.settings import ArtifactSettings

STAGING: Final = ".rfork-"
"""How the folders begin in which a cache is put together before it is moved into place."""
EXCLUDED_NAMES: Final = (
    f"{STAGING}*", "*.lock", "lock", "locks", ".locks", "*.tmp", "tmp", "tmp.pid_*", "tmp_*", "*.log",
    "*.pid", ".nfs*", "__pycache__", "*.pyc", ".last_used",
)  # fmt: skip
"""Names of files and folders that are left out everywhere: locks, files that are being written, logs."""
ALL: Final = "all"
GROUP_OTHER_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
CACHE_TYPE_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True)
class CacheType:
    """One cache. Of what lies in `folder` no file travels one part of whose path matches `excluded_patterns`.

    `path_bound`: its entries hold absolute paths, so it is only taken where it lies at the same place. `all_or_nothing`: a
    folder that has files already is one unit, into which no other files are mixed. `written_last`: top folders that
    refer to the others, so that they are put in place after them. `entry_parents`: folders that are no entry
    but hold some (``*`` is any one name); see `entry_of`.
    """

    name: str
    folder: Callable[[ArtifactSettings], Path]
    excluded_patterns: tuple[str, ...] = ()
    path_bound: bool = False
    all_or_nothing: bool = False
    written_last: tuple[str, ...] = ()
    entry_parents: tuple[str, ...] = ()

    def entry_of(self, path: str) -> str:
        """The entry that a file is a part of, which travels whole or not at all: what one compilation wrote.

        It is the top folder, or the first one below folders that hold entries. A file in none is one itself.
        """
        parts = path.split("/")
        parent_patterns = [pattern.split("/") for pattern in self.entry_parents]
        depth = 1
        while depth < len(parts) and any(_fits(parts[:depth], names) for names in parent_patterns):
            depth += 1
        return "/".join(parts[:depth])

    def excludes(self, part: str) -> bool:
        """Whether a file or folder of that name stays where it is."""
        return any(fnmatchcase(part, pattern) for pattern in (*EXCLUDED_NAMES, *self.excluded_patterns))


@dataclass(frozen=True)
class CacheDir:
    """A kind and its folder on this machine, absolute; the folder may not exist."""

    cache_type: CacheType
    folder: Path

    def problem(self) -> str | None:
        """Why nothing is read from or written to the folder, or None. A missing one is no trouble."""
        try:
            found = os.stat(self.folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            return error.strerror or str(error)
        if not stat.S_ISDIR(found.st_mode):
            return "it is no folder"
        # What somebody else can put into a folder of programs must not be spread.
        if found.st_uid != os.geteuid():
            return f"it belongs to another user ({found.st_uid})"
        if found.st_mode & GROUP_OTHER_WRITE and not found.st_mode & stat.S_ISVTX:
            return f"others can write to it (mode {stat.S_IMODE(found.st_mode):o}): chmod go-w"
        return None


CACHE_TYPES: Final = {
    cache_type.name: cache_type
    for cache_type in (
        CacheType(
            "triton",
            lambda artifact_settings: (
                artifact_settings.triton_cache_dir
                or (artifact_settings.triton_home or artifact_settings.home) / ".triton" / "cache"
            ),
        ),
        CacheType(
            "inductor",
            lambda artifact_settings: artifact_settings.torchinductor_cache_dir,
            excluded_patterns=("precompiled_headers",),
            written_last=("fxgraph", "aotautograd"),
            entry_parents=("fxgraph", "fxgraph/*", "aotautograd", "triton", "triton/*"),
        ),
        # Ninja's files name sources, headers and outputs by absolute paths.
        CacheType(
            "flashinfer",
            lambda artifact_settings: (
                (artifact_settings.flashinfer_workspace_base or artifact_settings.home) / ".cache" / "flashinfer"
            ),
            path_bound=True,
            all_or_nothing=True,
            entry_parents=("*", "*/*", "*/*/*"),  # release/architecture/cached_ops/operation
        ),
        CacheType(
            "deep_gemm",
            lambda artifact_settings: artifact_settings.dg_jit_cache_dir or artifact_settings.home / ".deep_gemm",
            all_or_nothing=True,
            entry_parents=("cache",),
        ),
        CacheType(
            "sglang_deep_gemm",
            lambda artifact_settings: (
                artifact_settings.sglang_dg_cache_dir or artifact_settings.home / ".cache" / "deep_gemm"
            ),
            all_or_nothing=True,
            entry_parents=("cache",),
        ),
        # Saved graphs are found again by absolute paths: https://github.com/vllm-project/vllm/issues/52154
        CacheType(
            "vllm",
            lambda artifact_settings: _vllm(artifact_settings) / "torch_compile_cache",
            path_bound=True,
            entry_parents=("torch_aot_compile",),
        ),
        CacheType(
            "sglang",
            lambda artifact_settings: (
                (artifact_settings.sglang_cache_dir or artifact_settings.home / ".cache" / "sglang")
                / "torch_compile_cache"
            ),
            path_bound=True,
        ),
        CacheType(
            "tvm_ffi",
            lambda artifact_settings: (
                artifact_settings.tvm_ffi_cache_dir or artifact_settings.home / ".cache" / "tvm-ffi"
            ),
            path_bound=True,
            all_or_nothing=True,
        ),
    )
}


def cache_dirs(settings: ArtifactSettings, *, all_known: bool = False) -> list[CacheDir]:
    """Where the kinds lie that the settings name; with `all_known`, all there are where they name none.

    Raises SettingsError for a kind that is not known and has no folder.
    """
    moved = dict(settings.dirs)
    for name in moved:
        if not CACHE_TYPE_NAME.fullmatch(name):
            raise SettingsError(f"RFORK_ARTIFACTS_DIRS: {name!r} is no name of a kind", hint="a-z, 0-9 and _")
    everything = ALL in settings.kinds or (all_known and not settings.kinds)
    names = dict.fromkeys((*CACHE_TYPES, *moved) if everything else settings.kinds)
    return [_cache_dir(name, moved.get(name), settings) for name in names]


def _cache_dir(name: str, moved: Path | None, settings: ArtifactSettings) -> CacheDir:
    cache_type = CACHE_TYPES.get(name)
    if cache_type is None:
        if moved is None:
            raise SettingsError(
                f"RFORK_ARTIFACTS_KINDS: {name!r} is not known",
                hint=f"one of {', '.join((*CACHE_TYPES, ALL))}, or give it a folder (RFORK_ARTIFACTS_DIRS)",
            )
        # Nothing is known of it, so nothing is presumed.
        cache_type = CacheType(name, lambda artifact_settings: Path(), path_bound=True, all_or_nothing=True)
    folder = moved if moved is not None else cache_type.folder(settings)
    try:
        folder = folder.expanduser()
    except RuntimeError:
        raise SettingsError(
            f"{cache_type.name}: {folder}: no home is known of that user",
            hint="set HOME, or name its folder (RFORK_ARTIFACTS_DIRS)",
        ) from None
    return CacheDir(cache_type, Path(os.path.abspath(folder)))


def _fits(parts: list[str], names: list[str]) -> bool:
    return len(parts) == len(names) and all(map(fnmatchcase, parts, names))


def _vllm(artifact_settings: ArtifactSettings) -> Path:
    return (
        artifact_settings.vllm_cache_root
        or (artifact_settings.xdg_cache_home or artifact_settings.home / ".cache") / "vllm"
    )
