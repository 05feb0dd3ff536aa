"""A cancellation that came as something failed."""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """Raise CancelledError where this task was told to end, and has gone on all the same.

    To be asked where a task goes on after a failure: of something that fails as it is cancelled,
    `asyncio.gather` and task groups tell the failure alone.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
