"""The scaler's certificate is reloaded at each handshake."""

from __future__ import annotations

import pytest

from rfork.net import grpc_credentials as credentials
from rfork.net.grpc_credentials import Files
from rfork.settings import TlsSettings


def test_a_broken_renewal_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Only once for any number of handshakes. A later broken renewal is logged again."""
    files: list[Files | None] = [None, None, (b"key", b"chain", None), None]

    def read_files(_: TlsSettings) -> Files:
        if (found := files.pop(0)) is None:
            raise OSError("incomplete renewal")
        return found

    monkeypatch.setattr(credentials, "_read", read_files)
    reloader = credentials._Renewal(TlsSettings(), (b"key", b"chain", None))
    assert [None] * 4 == [reloader() for _ in range(4)]
    assert 2 == len(caplog.records)
