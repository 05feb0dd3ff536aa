"""The http transport over TLS: which clients are admitted and which servers are trusted."""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from rfork.errors import SourceUnavailable
from rfork.image.chunks import MIB
from rfork.net.tls import client_context
from rfork.settings import InstanceSettings
from rfork.transport.http import HttpTransport
from tests.integration.http_transport.pairs import SIZES, pair, url_of
from tests.transport_contract import TransportPair, content, soon


def test_mutual_tls_transfers_the_right_bytes(authority: trustme.CA) -> None:
    """With a certificate on both sides, many small and large tensors arrive unchanged."""
    with pair(sizes=(3 * MIB, *(1000,) * 300, 5)) as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
        assert content(made.source) == content(made.target)
        assert "https" == urlsplit(url_of(made.exporter.endpoint())).scheme


def test_a_server_without_ca_accepts_any_client(authority: trustme.CA, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a certificate but no authority the server uses plain TLS: clients need no certificate."""
    with monkeypatch.context() as server_side:
        server_side.delenv("RFORK_TLS_CA")
        made = TransportPair.create(HttpTransport(InstanceSettings()), SIZES)
    monkeypatch.delenv("RFORK_TLS_CERTIFICATE")
    monkeypatch.delenv("RFORK_TLS_KEY")
    made.connect().read(0, 1000, soon())
    made.close()
    assert content(made.source, 0, 1000) == content(made.target, 0, 1000)


def test_mutual_tls_rejects_clients_without_a_certificate(
    authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client without a certificate gets no byte, and the server keeps running."""
    with pair() as made:
        with monkeypatch.context() as bare:
            bare.delenv("RFORK_TLS_CERTIFICATE")
            bare.delenv("RFORK_TLS_KEY")
            with pytest.raises(SourceUnavailable):
                made.connect().read(0, 1000, soon())
        made.connect().read(0, 1000, soon())
        assert content(made.source, 0, 1000) == content(made.target, 0, 1000)


def test_a_server_of_another_authority_is_not_trusted(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that trusts another authority does not even send its token."""
    with pair() as made:
        trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
        monkeypatch.setenv("RFORK_TLS_CA", str(tmp_path / "other.pem"))
        with pytest.raises(SourceUnavailable, match="certificate"):
            made.connect()


def test_unusable_tls_files_make_it_unavailable(authority: trustme.CA, tmp_path: Path) -> None:
    """`availability` names the file that cannot be used."""
    (tmp_path / "key.pem").write_text("not a key")
    availability = HttpTransport(InstanceSettings()).availability()
    assert not availability.usable
    assert "RFORK_TLS_CERTIFICATE" in availability.reason


def test_http_requires_tls_1_2() -> None:
    """The client offers nothing older than TLS 1.2."""
    assert ssl.TLSVersion.TLSv1_2 == client_context(InstanceSettings().tls).minimum_version
