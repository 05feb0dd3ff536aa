"""Messages between `benchmarks.chaos` and its nodes: one JSON object per line, on a Unix socket.

A node runs one command at a time and sends one response for each; while it forks it also reports progress
(verb "progress"). Unix sockets do not belong to a network namespace, so a host whose link is cut still
receives its commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from pydantic import TypeAdapter

Verb = Literal["prepare", "store", "seed", "snapshot", "fork", "check", "release", "measure", "query"]
ResponseVerb = Verb | Literal["progress"]
ForkOutcome = Literal["forked", "fallback", "failed", "unclean"]


@dataclass(frozen=True)
class ChaosCommand:
    """Command to a node.

    prepare: build the module of `size` bytes, empty or filled with `weights`; store: write the weights as a
    checkpoint and a snapshot into `folder`; seed: serve the module to forks of `model`, and respond once the
    planner at `planner` knows; snapshot: write the module to `folder`; fork: fill it; check: hash it;
    release: stop serving and drop the module; measure: count the resources of the process; query: return what
    the planner knows of `model`.

    A fork may read `checkpoint` (a folder) and `snapshot` (a URI) from a disk of `disk_rate` bytes per second
    (0: unlimited), and keeps its chunks in `resume` (a folder; empty: it keeps none).
    """

    verb: Verb
    model: str = ""
    planner: str = ""
    size: int = 0
    weights: int = 0
    folder: str = ""
    checkpoint: str = ""
    snapshot: str = ""
    disk_rate: int = 0
    resume: str = ""


@dataclass(frozen=True)
class PlannerForkInfo:
    """A running fork as reported by the planner: its host, and the hosts of its sources."""

    host: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class ChaosResponse:
    """Result of a command; `error` is empty if it succeeded.

    `verified` is a share of the image; `repeated` are bytes requested twice; `threads` are the names of
    Python threads; `forks` and `instances` are the planner's running forks and the hosts of its instances.
    """

    verb: ResponseVerb
    error: str = ""
    verified: float = 0.0
    outcome: ForkOutcome = "unclean"
    seconds: float = 0.0
    repeated: int = 0
    chunk_bytes: int = 0
    replans: int = 0
    reasons: tuple[str, ...] = ()
    sha256: str = ""
    threads: tuple[str, ...] = ()
    forks: tuple[PlannerForkInfo, ...] = ()
    instances: tuple[str, ...] = ()


@dataclass(frozen=True)
class SpawnRequest:
    """Request to the fork server to start a process in the network namespace of a host.

    A process of type node executes commands; a planner serves until it is killed. Its output goes to `log`.
    """

    process_type: Literal["node", "planner"]
    name: str
    namespace: str
    log: str
    environment: Mapping[str, str] = field(default_factory=dict)


COMMAND_ADAPTER: Final = TypeAdapter(ChaosCommand)
RESPONSE_ADAPTER: Final = TypeAdapter(ChaosResponse)
SPAWN_ADAPTER: Final = TypeAdapter(SpawnRequest)
