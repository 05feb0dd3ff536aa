"""Where this process runs, where nobody says it: the node's name, the Pod's namespace."""

from __future__ import annotations

import os
import socket
from pathlib import Path

FIRST_UTS = "uts:[4026531838]"
"""The namespace of the node's own host name, in every Linux kernel (PROC_UTS_INIT_INO in proc_ns.h)."""


def node_name(proc: Path = Path("/proc")) -> str:
    """What this node is called where nobody says it: one name for all containers of a node.

    A container's host name is its own, so two of one node would not know that they share it. The boot id is
    the node's, but says nothing to people: it stands in only where the host name is not the node's.
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
    """The namespace of the Pod that this process runs in; ``default`` outside of one."""
    try:
        return file.read_text("utf-8").strip() or "default"
    except (OSError, UnicodeDecodeError):
        return "default"
