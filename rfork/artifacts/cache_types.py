"""Known JIT caches: their folders, and which of their files must not be copied.

Sources: `torch/_inductor/runtime/cache_dir_utils.py`, `triton/runtime/cache.py`, `flashinfer/jit/env.py` and
`core.py`, DeepGEMM's `csrc/jit/compiler.hpp`, `sglang/srt/environ.py`, vLLM's `docs/design/torch_compile.md`.
Runs on the source and on the target.
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
from rfork.settings import ArtifactSettings, CacheDirs, load

STAGING: Final = ".rfork-"
"""Name prefix of the folders in which a cache is assembled before it is moved into place."""
EXCLUDED_NAMES: Final = (
    f"{STAGING}*", "*.lock", "lock", "locks", ".locks", "*.tmp", "tmp", "tmp.pid_*", "tmp_*", "*.log",
    "*.pid", ".nfs*", "__pycache__", "*.pyc", ".last_used",
)  # fmt: skip
"""Name patterns of files and folders that are never copied: locks, unfinished files, logs."""
ALL: Final = "all"
GROUP_OTHER_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
CACHE_TYPE_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")

DISABLED_MESSAGE: Final = "artifacts (JIT caches) are disabled"
ENABLE_HINT: Final = (
    "they are programs: set RFORK_ARTIFACTS_KINDS to those that other instances may install on this machine, or to all"
)


@dataclass(frozen=True)
class CacheType:
    """One type of JIT cache. A file is excluded if any part of its path in `folder` matches `excluded_patterns`.

    `path_bound`: entries contain absolute paths, so the cache is accepted only at the same path.
    `all_or_nothing`: a folder that already has files is one unit, to which no other files are added.
    `written_last`: top-level folders that refer to the others and are therefore moved into place last.
    `entry_parents`: folders that contain entries but are not entries themselves (``*`` matches any one name);
    see `entry_of`.
    """

    name: str
    folder: Callable[[CacheDirs], Path]
    excluded_patterns: tuple[str, ...] = ()
    path_bound: bool = False
    all_or_nothing: bool = False
    written_last: tuple[str, ...] = ()
    entry_parents: tuple[str, ...] = ()

    def entry_of(self, path: str) -> str:
        """Return the entry that a file belongs to: the output of one compilation, copied completely or not at all.

        It is the top-level folder, or the first folder below those that contain entries. A file outside such
        folders is its own entry.
        """
        parts = path.split("/")
        parent_patterns = [pattern.split("/") for pattern in self.entry_parents]
        depth = 1
        while depth < len(parts) and any(_fits(parts[:depth], names) for names in parent_patterns):
            depth += 1
        return "/".join(parts[:depth])

    def excludes(self, part: str) -> bool:
        """Return True if a file or folder of that name is excluded."""
        return any(fnmatchcase(part, pattern) for pattern in (*EXCLUDED_NAMES, *self.excluded_patterns))


@dataclass(frozen=True)
class CacheDir:
    """A cache type and its absolute folder on this machine. The folder may not exist."""

    cache_type: CacheType
    folder: Path

    def problem(self) -> str | None:
        """Return why the folder must not be read or written, or None. A missing folder is fine."""
        try:
            found = os.stat(self.folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            return error.strerror or str(error)
        if not stat.S_ISDIR(found.st_mode):
            return "it is not a folder"
        # A folder that other users can write to may contain their programs, which must not be distributed.
        if found.st_uid != os.geteuid():
            return f"it belongs to another user ({found.st_uid})"
        if found.st_mode & GROUP_OTHER_WRITE and not found.st_mode & stat.S_ISVTX:
            return f"other users can write to it (mode {stat.S_IMODE(found.st_mode):o}): run chmod go-w"
        return None


CACHE_TYPES: Final = {
    cache_type.name: cache_type
    for cache_type in (
        CacheType(
            "triton",
            lambda dirs: dirs.triton_cache_dir or (dirs.triton_home or dirs.home) / ".triton" / "cache",
        ),
        CacheType(
            "inductor",
            lambda dirs: dirs.torchinductor_cache_dir,
            excluded_patterns=("precompiled_headers",),
            written_last=("fxgraph", "aotautograd"),
            entry_parents=("fxgraph", "fxgraph/*", "aotautograd", "triton", "triton/*"),
        ),
        # Ninja's files contain absolute paths of sources, headers and outputs.
        CacheType(
            "flashinfer",
            lambda dirs: (dirs.flashinfer_workspace_base or dirs.home) / ".cache" / "flashinfer",
            path_bound=True,
            all_or_nothing=True,
            entry_parents=("*", "*/*", "*/*/*"),  # release/architecture/cached_ops/operation
        ),
        CacheType(
            "deep_gemm",
            lambda dirs: dirs.dg_jit_cache_dir or dirs.home / ".deep_gemm",
            all_or_nothing=True,
            entry_parents=("cache",),
        ),
        CacheType(
            "sglang_deep_gemm",
            lambda dirs: dirs.sglang_dg_cache_dir or dirs.home / ".cache" / "deep_gemm",
            all_or_nothing=True,
            entry_parents=("cache",),
        ),
        # Saved graphs are looked up by absolute paths: https://github.com/vllm-project/vllm/issues/52154
        CacheType(
            "vllm",
            lambda dirs: _vllm(dirs) / "torch_compile_cache",
            path_bound=True,
            entry_parents=("torch_aot_compile",),
        ),
        CacheType(
            "sglang",
            lambda dirs: (dirs.sglang_cache_dir or dirs.home / ".cache" / "sglang") / "torch_compile_cache",
            path_bound=True,
        ),
        CacheType(
            "tvm_ffi",
            lambda dirs: dirs.tvm_ffi_cache_dir or dirs.home / ".cache" / "tvm-ffi",
            path_bound=True,
            all_or_nothing=True,
        ),
    )
}


def cache_dirs(settings: ArtifactSettings, *, all_known: bool = False) -> list[CacheDir]:
    """Return the cache folders that the settings select. With `all_known` and no selection, return all known ones.

    Raises SettingsError for an unknown cache type without a configured folder.
    """
    moved = dict(settings.dirs)
    for name in moved:
        if not CACHE_TYPE_NAME.fullmatch(name):
            raise SettingsError(f"RFORK_ARTIFACTS_DIRS: invalid cache type {name!r}", hint="a-z, 0-9 and _")
    everything = ALL in settings.kinds or (all_known and not settings.kinds)
    names = dict.fromkeys((*CACHE_TYPES, *moved) if everything else settings.kinds)
    return [_cache_dir(name, moved.get(name)) for name in names]


def required_cache_dirs(settings: ArtifactSettings) -> list[CacheDir]:
    """Return the cache folders that the settings select. Raises SettingsError if there are none."""
    selected = cache_dirs(settings)
    if not selected:
        raise SettingsError(DISABLED_MESSAGE, hint=ENABLE_HINT)
    return selected


def _cache_dir(name: str, moved: Path | None) -> CacheDir:
    cache_type = CACHE_TYPES.get(name)
    if cache_type is None:
        if moved is None:
            raise SettingsError(
                f"RFORK_ARTIFACTS_KINDS: unknown cache type {name!r}",
                hint=f"use one of {', '.join((*CACHE_TYPES, ALL))}, or set its folder in RFORK_ARTIFACTS_DIRS",
            )
        # An unknown cache gets the strictest rules.
        cache_type = CacheType(name, lambda dirs: Path(), path_bound=True, all_or_nothing=True)
    folder = moved if moved is not None else cache_type.folder(load(CacheDirs))
    try:
        folder = folder.expanduser()
    except RuntimeError:
        raise SettingsError(
            f"{cache_type.name}: {folder}: that user has no home directory",
            hint="set HOME, or set the folder in RFORK_ARTIFACTS_DIRS",
        ) from None
    return CacheDir(cache_type, Path(os.path.abspath(folder)))


def _fits(parts: list[str], names: list[str]) -> bool:
    return len(parts) == len(names) and all(map(fnmatchcase, parts, names))


def _vllm(dirs: CacheDirs) -> Path:
    return dirs.vllm_cache_root or (dirs.xdg_cache_home or dirs.home / ".cache") / "vllm"
