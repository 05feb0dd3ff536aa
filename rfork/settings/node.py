"""Defaults for the node's name and the Pod's namespace."""

from __future__ import annotations

import os
import socket
from pathlib import Path

FIRST_UTS = "uts:[4026531838]"
"""UTS namespace of the host itself, in every Linux kernel (PROC_UTS_INIT_INO in proc_ns.h)."""


def node_name(proc: Path = Path("/proc")) -> str:
    """Return a name that all processes of this node agree on: its host name, or its boot id inside a container.

    A container has its own host name, so two containers would not know that they share a node.
    """
    try:
        namespace = os.readlink(proc / "self/ns/uts")
        boot_id = (proc / "sys/kernel/random/boot_id").read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return socket.gethostname()
    if namespace == FIRST_UTS or not boot_id:
        return socket.gethostname()
    return f"boot-{boot_id.replace('-', '')[:16]}"


def own_namespace(file: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")) -> str:
    """Return the namespace of this process's Pod, ``default`` outside a Pod."""
    try:
        return file.read_text("utf-8").strip() or "default"
    except (OSError, UnicodeDecodeError):
        return "default"
