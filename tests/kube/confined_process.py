"""Becomes a container's process: ``python confined_process.py JSON``, as root.

JSON has the fields of `Confinement`. The process gets its own mount namespace with the image's root file system,
which is read-only if wanted, another user without capabilities, and no way to new privileges; then it executes
the program. The process id stays the same. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

CLONE_NEWNS: Final = 0x00020000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
SIGKILL: Final = 9
DEVICES: Final = ("null", "zero", "random", "urandom")
LIBC: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Confinement:
    """Properties of a process that a container runtime sets, as far as tests check them."""

    root: str
    """Root file system of the image. Mount points are created in it."""
    command: list[str]
    user: int
    group: int
    groups: list[int]
    read_only: bool
    """Mount the root file system read-only."""
    mounts: list[tuple[str, str, bool]]
    """Directory or file, mount path in the container, read-only."""

    def to_json(self) -> str:
        """Return the argument for this program."""
        return json.dumps(asdict(self))


def confine(wanted: Confinement) -> None:
    """Confine this process. Raises OSError."""
    _check(LIBC.unshare(CLONE_NEWNS), "unshare")
    _mount("none", "/", MS_REC | MS_PRIVATE)
    root = wanted.root
    _mount(root, root, MS_BIND | MS_REC)
    devices = [(f"/dev/{name}", f"/dev/{name}", False) for name in DEVICES]
    for source, path, read_only in (*devices, *wanted.mounts):
        _mount_into(root, source, path, read_only=read_only)
    _make_mount_point(f"{root}/proc", directory=True)
    _mount("proc", f"{root}/proc", 0, "proc")
    if wanted.read_only:
        _mount("none", root, MS_REMOUNT | MS_BIND | MS_RDONLY)
    os.chroot(root)
    os.chdir("/")
    for capability in range(64):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups(wanted.groups)
    os.setresgid(wanted.group, wanted.group, wanted.group)
    os.setresuid(wanted.user, wanted.user, wanted.user)
    _check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    # After the user changed, which resets it.
    _check(LIBC.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "pdeathsig")


def _mount_into(root: str, source: str, path: str, *, read_only: bool) -> None:
    target = resolve_in(root, path)
    _make_mount_point(target, directory=Path(source).is_dir())
    _mount(source, target, MS_BIND)
    if read_only:
        _mount("none", target, MS_REMOUNT | MS_BIND | MS_RDONLY)


def resolve_in(root: str, path: str) -> str:
    """Return the path below `root`, with the image's symbolic links (`/var/run`) followed inside of it."""
    found, left = root, [part for part in path.split("/") if part]
    while left:
        candidate = os.path.join(found, left.pop(0))
        if not os.path.islink(candidate):
            found = candidate
            continue
        link = os.readlink(candidate)
        left = [part for part in link.split("/") if part] + left
        if ".." in left:
            raise ValueError(f"{candidate} links to {link}: only links without .. are followed")
        found = root if os.path.isabs(link) else found
    return found


def _make_mount_point(path: str, *, directory: bool) -> None:
    """Create it, as container runtimes do in the writable layer."""
    if directory:
        os.makedirs(path, exist_ok=True)
    elif not os.path.lexists(path):
        Path(path).touch()


def _mount(source: str, target: str, flags: int, file_system: str = "none") -> None:
    _check(LIBC.mount(source.encode(), target.encode(), file_system.encode(), flags, None), f"mount {target}")


def _check(result: int, action: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{action}: {os.strerror(code)}")


if __name__ == "__main__":
    wanted = Confinement(**json.loads(sys.argv[1]))
    confine(wanted)
    os.execvp(wanted.command[0], wanted.command)
