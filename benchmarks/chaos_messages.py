"""What `benchmarks.chaos` and its nodes say to each other: one JSON object a line, on a Unix socket.

A node does one command after the other and answers each with one line; while it forks it also says how
far it is (verb "progress"). Unix sockets do not belong to a network namespace: a host whose link is cut
still hears its commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from pydantic import TypeAdapter

Verb = Literal["prepare", "store", "seed", "snapshot", "fork", "check", "rest", "census", "look"]
ResponseVerb = Verb | Literal["progress"]
ForkOutcome = Literal["forked", "fallback", "failed", "unclean"]


@dataclass(frozen=True)
class ChaosCommand:
    """What a node is to do.

    prepare: build the module of `size` bytes, empty or, with `weights`, filled with those; store: write
    them as a checkpoint and a snapshot into `folder`; seed: give the module to the forks of `model`, and
    answer once the planner at `planner` knows; snapshot: write the module to `folder`; fork: fill it;
    check: hash it; rest: give nothing any more, and drop the module; census: count what is open in the
    process; look: say what the planner knows of `model`.

    A fork may read `checkpoint` (a folder) and `snapshot` (a URI), from a disk of `disk_rate` bytes a
    second (0: as fast as it is), and keeps what it has in `resume` (a folder; empty: it does not).
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
    """A fork under way as the planner tells it: on which host, and on which hosts its sources are."""

    host: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class ChaosResponse:
    """What a node has done; `error` says why it could not, empty where it could.

    `verified` is a share of the image; `repeated` bytes that were asked for again; `threads` the names
    of Python's threads; `forks` and `instances` what the planner holds for a model: forks under way, and
    the hosts of its instances.
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
    """A process that the nursery is to make, in the network namespace of a host.

    `process_type` node obeys commands; planner serves until it is killed. Its output goes to `log`.
    """

    process_type: Literal["node", "planner"]
    name: str
    namespace: str
    log: str
    environment: Mapping[str, str] = field(default_factory=dict)


COMMAND_ADAPTER: Final = TypeAdapter(ChaosCommand)
RESPONSE_ADAPTER: Final = TypeAdapter(ChaosResponse)
SPAWN_ADAPTER: Final = TypeAdapter(SpawnRequest)
