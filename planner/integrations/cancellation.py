"""Detects a cancellation that was hidden by another error."""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task was cancelled but kept running.

    Call it where a task continues after an error: if an awaited operation fails while it is being cancelled,
    `asyncio.gather` and task groups raise only the error.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
