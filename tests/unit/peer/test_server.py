"""Errors of the peer service's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from rfork.peer.server import _on_loop_error


@pytest.mark.parametrize(("error", "records"), [(BlockingIOError(11, "empty"), 0), (ValueError("odd"), 1)])
def test_only_the_empty_poll_of_old_grpcio_is_not_logged(
    error: Exception, records: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Before grpcio 1.80 each event loop of a process but one finds the shared socket empty, which is harmless."""
    with contextlib.closing(asyncio.new_event_loop()) as loop, caplog.at_level(logging.ERROR, "asyncio"):
        _on_loop_error(loop, {"message": "exception in a callback", "exception": error})
    assert records == len(caplog.records)
