"""Role of an engine's own weight cache daemon: a process that keeps a model's weights for engines of its host.

Its rank is a holder's image to the planner: no engine serves from it, and it is no replica. It has no scheduler, runs
no steps, and changes no weights; it only releases them, or ends.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn
from uuid import uuid4

from rfork.logs import logger

if TYPE_CHECKING:
    from torch import nn

log = logger(__name__)

_holder_id: str | None = None


def become_holder(engine: str) -> str:
    """Declare this process a weight cache daemon of an engine; return its id as a holder."""
    global _holder_id  # the engine's loader runs far below the entry point of the process
    _holder_id = f"{engine}-weight-cache-{uuid4().hex}"
    return _holder_id


def holder_id() -> str | None:
    """Return this process's id as a holder; None: it is no weight cache daemon."""
    return _holder_id


def release(module: nn.Module | None) -> None:
    """Stop serving a model and drop rfork's references to it: its memory is about to be released.

    Readers are disconnected. Failures must not stop the daemon.
    """
    from rfork.engines import served_model, weight_lifecycle

    served = served_model.served_model(module)
    if module is None or served is None:
        return
    log.info("no longer seeding: the daemon releases its weights")
    try:
        served.close(0.0)
    except Exception:
        log.exception("failed to close the seed")
    for attribute in (served_model.ATTRIBUTE, weight_lifecycle.ATTRIBUTE):
        vars(module).pop(attribute, None)


@contextmanager
def closing_seeds(max_drain_s: float) -> Iterator[None]:
    """Close the seeds of this process after the block, with at most `max_drain_s` seconds for their readers."""
    try:
        yield
    finally:
        from rfork.engines import weight_lifecycle

        weight_lifecycle.close_seeds(max_drain_s)


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit in the main thread, so that the process can close its seeds."""
    signal.signal(signal.SIGTERM, _exit)


EXIT_CODE: Final = 128 + signal.SIGTERM


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
    raise SystemExit(EXIT_CODE)
