"""Descriptors that came with a message and that nobody wants."""

from __future__ import annotations

import errno
import os

import pytest

from rfork.transport.unix_socket.connection import close_all


def test_one_that_cannot_be_closed_keeps_none_of_the_others_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's file may fail as it is closed (FUSE lets it): the rest would be held for ever."""
    closed: list[int] = []

    def close(descriptor: int) -> None:
        closed.append(descriptor)
        if descriptor == 7:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", close)
        close_all([7, 8, 9])
    assert [7, 8, 9] == closed
