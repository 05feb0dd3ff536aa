"""Received descriptors that are not needed."""

from __future__ import annotations

import errno
import os

import pytest

from rfork.transport.same_host.connection import close_all


def test_an_error_while_closing_does_not_leak_other_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a client's file may fail (for example with FUSE); the remaining descriptors are still closed."""
    closed: list[int] = []

    def close(descriptor: int) -> None:
        closed.append(descriptor)
        if descriptor == 7:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", close)
        close_all([7, 8, 9])
    assert [7, 8, 9] == closed
