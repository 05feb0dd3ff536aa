"""Processes that belong to a server, read from /proc (Linux)."""

from __future__ import annotations

from pathlib import Path


def process_tree(leader_pid: int) -> list[int]:
    """Return the sorted ids of the living processes that descend from `leader_pid` or are in its session.

    The session finds workers whose parent has died; descent finds those in a separate session. Processes that
    have ended but were not reaped (zombies) are not counted.
    """
    parents: dict[int, int] = {}
    sessions: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # The program's name, in parentheses, may contain spaces and parentheses.
            state, parent, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            parents[int(entry.name)], sessions[int(entry.name)] = int(parent), int(session)
    members = {pid for pid, session in sessions.items() if session == leader_pid or pid == leader_pid}
    while joined := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= joined
    return sorted(members)
