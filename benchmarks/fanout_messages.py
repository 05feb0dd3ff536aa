"""What `benchmarks.fanout` and its nodes say to each other: one JSON object a line, on a Unix socket.

A node does one command after the other and answers each with one line. Unix sockets do not belong to a
network namespace, so what is said here takes nothing from the links that are measured.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Verb = Literal["prepare", "seed", "fork", "check", "rest", "listen", "give", "take"]
ProgressPoint = tuple[float, int]
"""Time (`time.monotonic`, the same clock in every process of a machine) and bytes verified by then."""


@dataclass(frozen=True)
class FanoutCommand:
    """What a node is to do.

    prepare: build the module, its memory empty, or `filled` with the weights; seed: give it to the forks
    of `model`, and answer once the planner knows; fork: fill it, where nobody holds it from `snapshot` or
    `checkpoint` (`independent`: as if there were no others), stay a seed, and answer with the times;
    check: hash it; rest: give nothing any more; listen: open a TCP port; give: send the image's size to
    whoever connects to it; take: receive that from `address`, `port`.
    """

    verb: Verb
    model: str = ""
    filled: bool = False
    address: str = ""
    port: int = 0
    snapshot: str = ""
    checkpoint: str = ""
    independent: bool = False


@dataclass(frozen=True)
class FanoutResponse:
    """What a node has done; `error` says why it could not, empty where it could."""

    error: str = ""
    began: float = 0.0
    ended: float = 0.0
    points: tuple[ProgressPoint, ...] = ()
    weights_id: str = ""
    sha256: str = ""
    port: int = 0
    replans: int = 0
    storage_bytes: int = 0


def encode_line(message: DataclassInstance) -> bytes:
    """A message, of this benchmark or of another, as it is sent."""
    return json.dumps(asdict(message)).encode() + b"\n"


def parse_command(text: bytes) -> FanoutCommand:
    """The command on a line."""
    return FanoutCommand(**json.loads(text))


def parse_response(text: bytes) -> FanoutResponse:
    """The answer on a line."""
    values = json.loads(text)
    return FanoutResponse(**{**values, "points": tuple((when, size) for when, size in values["points"])})
