"""TLS between a seed and its readers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import trustme

from rfork.errors import SettingsError, SourceError
from rfork.settings import TlsSettings
from tests.integration.peer_service.seeds import SOON_S, StartSeed, client


@pytest.fixture
def pem(tmp_path: Path) -> dict[str, Path]:
    """An authority, a certificate it issued for loopback, its key, and an unrelated authority."""
    authority, other_authority = trustme.CA(), trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    blobs = {
        "ca": authority.cert_pem,
        "other_ca": other_authority.cert_pem,
        "certificate": issued.cert_chain_pems[0],
        "key": issued.private_key_pem,
    }
    for name, blob in blobs.items():
        blob.write_to_path(str(tmp_path / name))
    return {name: tmp_path / name for name in blobs}


def serve_tls(monkeypatch: pytest.MonkeyPatch, pem: dict[str, Path], *names: str) -> None:
    for name in names:
        monkeypatch.setenv(f"RFORK_TLS_{name.upper()}", str(pem[name]))


def tls_of(**files: Path) -> TlsSettings:
    """A client's own files, independent of the environment."""
    return TlsSettings(certificate=None, key=None, ca=None).model_copy(update=files)


@pytest.mark.parametrize(
    ("server", "presents_certificate", "trusts", "expected"),
    [
        (("certificate", "key"), False, "ca", True),
        (("certificate", "key"), False, "other_ca", False),
        (("certificate", "key"), False, None, False),
        (("certificate", "key", "ca"), True, "ca", True),
        (("certificate", "key", "ca"), False, "ca", False),
    ],
    ids=["TLS", "TLS, authority unknown", "TLS, client without", "mTLS", "mTLS, no certificate shown"],
)
def test_tls(
    start_seed: StartSeed,
    monkeypatch: pytest.MonkeyPatch,
    pem: dict[str, Path],
    server: tuple[str, ...],
    presents_certificate: bool,
    trusts: str | None,
    expected: bool,
) -> None:
    """A client connects if it trusts the authority and presents a certificate where one is required; no other
    client does.
    """
    serve_tls(monkeypatch, pem, *server)
    seed = start_seed()
    files = {"ca": pem[trusts]} if trusts else {}
    if presents_certificate:
        files |= {"certificate": pem["certificate"], "key": pem["key"]}
    peer = client(seed, tls=tls_of(**files))
    try:
        got = peer.full_manifest(time.monotonic() + (SOON_S if expected else 2.0)) == seed.manifest
    except SourceError:
        got = False
    finally:
        peer.close()
    assert expected == got


@pytest.mark.parametrize("invalid", ["certificate", "ca"])
def test_an_unusable_tls_file_is_named(
    start_seed: StartSeed, monkeypatch: pytest.MonkeyPatch, pem: dict[str, Path], invalid: str
) -> None:
    """A file that is no certificate is a user error, not a port in use."""
    serve_tls(monkeypatch, pem, "certificate", "key", "ca")
    pem[invalid].write_text("not a certificate")
    with pytest.raises(SettingsError, match=f"RFORK_TLS_{invalid.upper()}"):
        start_seed()
