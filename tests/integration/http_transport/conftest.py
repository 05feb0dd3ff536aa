"""Fixture: servers of the http transport that use TLS."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
    """Settings under which servers present a certificate and clients trust its authority; enables mTLS."""
    made = trustme.CA()
    server_certificate = made.issue_cert("127.0.0.1")
    server_certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    for part in server_certificate.cert_chain_pems:
        part.write_to_path(tmp_path / "certificate.pem", append=True)
    made.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("certificate", "key", "ca"):
        monkeypatch.setenv(f"RFORK_TLS_{name.upper()}", str(tmp_path / f"{name}.pem"))
    return made
