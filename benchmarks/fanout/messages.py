"""Messages between `benchmarks.fanout` and its nodes: one JSON object per line, on a Unix socket.

A node runs one command at a time and sends one response for each. Unix sockets do not belong to a network
namespace, so the messages use no bandwidth of the measured links.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Verb = Literal["prepare", "seed", "fork", "check", "release", "listen", "send", "receive"]
ProgressPoint = tuple[float, int]
"""Time (`time.monotonic`, the same clock in every process of a machine) and bytes verified by then."""


@dataclass(frozen=True)
class FanoutCommand:
    """Command to a node.

    prepare: build the module, its memory empty, or `filled` with the weights; seed: serve it to the forks of
    `model`, and respond once the planner knows; fork: fill it, if no instance has it from `snapshot` or
    `checkpoint` (`independent`: without a planner), stay a seed, and respond with the times; check: hash it;
    release: stop serving; listen: open a TCP port; send: send the image's size to the client that connects;
    receive: receive that from `address`, `port`.
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
    """Result of a command; `error` is empty if it succeeded."""

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
    """Encode a message of this benchmark or of another."""
    return json.dumps(asdict(message)).encode() + b"\n"


def parse_command(text: bytes) -> FanoutCommand:
    """Parse a command line."""
    return FanoutCommand(**json.loads(text))


def parse_response(text: bytes) -> FanoutResponse:
    """Parse a response line."""
    values = json.loads(text)
    return FanoutResponse(**{**values, "points": tuple((when, size) for when, size in values["points"])})
