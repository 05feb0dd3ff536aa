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
NEVER: Final = (
    f"{STAGING}*", "*.lock", "lock", "locks", ".locks", "*.tmp", "tmp", "tmp.pid_*", "tmp_*", "*.log",
    "*.pid", ".nfs*", "__pycache__", "*.pyc", ".last_used",
)  # fmt: skip
"""Names of files and folders that are left out everywhere: locks, files that are being written, logs."""
ALL: Final = "all"
OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
KIND_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True)
class Kind:
    """One cache. Of what lies in `folder` no file travels one part of whose path matches `never`.

    `bound`: its entries hold absolute paths, so it is only taken where it lies at the same place. `whole`: a
    folder that has files already is one unit, into which no other files are mixed. `last`: top folders that
    refer to the others, so that they are put in place after them. `holds_entries`: folders that are no entry
    but hold some (``*`` is any one name); see `entry_of`.
    """

    name: str
    folder: Callable[[ArtifactSettings], Path]
    never: tuple[str, ...] = ()
    bound: bool = False
    whole: bool = False
    last: tuple[str, ...] = ()
    holds_entries: tuple[str, ...] = ()

    def entry_of(self, path: str) -> str:
        """The entry that a file is a part of, which travels whole or not at all: what one compilation wrote.

        It is the top folder, or the first one below folders that hold entries. A file in none is one itself.
        """
        parts = path.split("/")
        held = [pattern.split("/") for pattern in self.holds_entries]
        depth = 1
        while depth < len(parts) and any(_fits(parts[:depth], names) for names in held):
            depth += 1
        return "/".join(parts[:depth])

    def leaves_out(self, part: str) -> bool:
        """Whether a file or folder of that name stays where it is."""
        return any(fnmatchcase(part, pattern) for pattern in (*NEVER, *self.never))


@dataclass(frozen=True)
class Place:
    """A kind and its folder on this machine, absolute; the folder may not exist."""

    kind: Kind
    folder: Path

    def trouble(self) -> str | None:
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
        if found.st_mode & OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
            return f"others can write to it (mode {stat.S_IMODE(found.st_mode):o}): chmod go-w"
        return None


KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind(
            "triton",
            lambda told: told.triton_cache_dir or (told.triton_home or told.home) / ".triton" / "cache",
        ),
        Kind(
            "inductor",
            lambda told: told.torchinductor_cache_dir,
            never=("precompiled_headers",),
            last=("fxgraph", "aotautograd"),
            holds_entries=("fxgraph", "fxgraph/*", "aotautograd", "triton", "triton/*"),
        ),
        # Ninja's files name sources, headers and outputs by absolute paths.
        Kind(
            "flashinfer",
            lambda told: (told.flashinfer_workspace_base or told.home) / ".cache" / "flashinfer",
            bound=True,
            whole=True,
            holds_entries=("*", "*/*", "*/*/*"),  # release/architecture/cached_ops/operation
        ),
        Kind(
            "deep_gemm",
            lambda told: told.dg_jit_cache_dir or told.home / ".deep_gemm",
            whole=True,
            holds_entries=("cache",),
        ),
        Kind(
            "sglang_deep_gemm",
            lambda told: told.sglang_dg_cache_dir or told.home / ".cache" / "deep_gemm",
            whole=True,
            holds_entries=("cache",),
        ),
        # Saved graphs are found again by absolute paths: https://github.com/vllm-project/vllm/issues/52154
        Kind(
            "vllm",
            lambda told: _vllm(told) / "torch_compile_cache",
            bound=True,
            holds_entries=("torch_aot_compile",),
        ),
        Kind(
            "sglang",
            lambda told: (told.sglang_cache_dir or told.home / ".cache" / "sglang") / "torch_compile_cache",
            bound=True,
        ),
        Kind(
            "tvm_ffi",
            lambda told: told.tvm_ffi_cache_dir or told.home / ".cache" / "tvm-ffi",
            bound=True,
            whole=True,
        ),
    )
}


def places(settings: ArtifactSettings, *, known: bool = False) -> list[Place]:
    """Where the kinds lie that the settings name; with `known`, all there are where they name none.

    Raises SettingsError for a kind that is not known and has no folder.
    """
    moved = dict(settings.folders)
    for name in moved:
        if not KIND_NAME.fullmatch(name):
            raise SettingsError(
                f"RFORK_ARTIFACTS_FOLDERS: {name!r} is no name of a kind", hint="a-z, 0-9 and _"
            )
    everything = ALL in settings.kinds or (known and not settings.kinds)
    names = dict.fromkeys((*KINDS, *moved) if everything else settings.kinds)
    return [_place(name, moved.get(name), settings) for name in names]


def _place(name: str, moved: Path | None, settings: ArtifactSettings) -> Place:
    kind = KINDS.get(name)
    if kind is None:
        if moved is None:
            raise SettingsError(
                f"RFORK_ARTIFACTS_KINDS: {name!r} is not known",
                hint=f"one of {', '.join((*KINDS, ALL))}, or give it a folder (RFORK_ARTIFACTS_FOLDERS)",
            )
        # Nothing is known of it, so nothing is presumed.
        kind = Kind(name, lambda told: Path(), bound=True, whole=True)
    folder = moved if moved is not None else kind.folder(settings)
    try:
        folder = folder.expanduser()
    except RuntimeError:
        raise SettingsError(
            f"{kind.name}: {folder}: no home is known of that user",
            hint="set HOME, or name its folder (RFORK_ARTIFACTS_FOLDERS)",
        ) from None
    return Place(kind, Path(os.path.abspath(folder)))


def _fits(parts: list[str], names: list[str]) -> bool:
    return len(parts) == len(names) and all(map(fnmatchcase, parts, names))


def _vllm(told: ArtifactSettings) -> Path:
    return told.vllm_cache_root or (told.xdg_cache_home or told.home / ".cache") / "vllm"
