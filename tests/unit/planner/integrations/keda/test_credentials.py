"""The scaler's certificate, read anew at each handshake."""

from __future__ import annotations

import pytest

from rfork import grpc_credentials as credentials
from rfork.grpc_credentials import Files
from rfork.settings import TlsSettings


def test_a_broken_renewal_is_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """However many handshakes there are meanwhile; one that is broken again later is told again."""
    files: list[Files | None] = [None, None, (b"key", b"chain", None), None]

    def read_files(_: TlsSettings) -> Files:
        if (found := files.pop(0)) is None:
            raise OSError("half a renewal")
        return found

    monkeypatch.setattr(credentials, "_read", read_files)
    reloader = credentials._Renewal(TlsSettings(), (b"key", b"chain", None))
    assert ([None] * 4, 2) == ([reloader() for _ in range(4)], len(caplog.records))
