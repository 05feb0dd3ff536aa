"""Redirects of web storage, and the servers that get the token."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from pydantic import SecretStr

from rfork.errors import StorageAccessDenied, StorageError
from rfork.settings import StorageSettings
from rfork.storage.blob import read_range
from rfork.storage.location import Location
from rfork.storage.registry import open_blob
from tests.storage_faults import ErrorStatus
from tests.storage_server import StorageServer

DATA = bytes(range(256)) * 40
NAME = "model.bin"
TOKEN = "let-me-in"
SETTINGS = StorageSettings(http_token=SecretStr(TOKEN))


@pytest.fixture
def server() -> Iterator[StorageServer]:
    with StorageServer({NAME: DATA}) as made:
        yield made


@pytest.fixture
def authenticated_server() -> Iterator[StorageServer]:
    """A server that requires the token."""
    with StorageServer({NAME: DATA}, token=TOKEN) as made:
        yield made


def redirect_to(location: str, status: int = 302) -> ErrorStatus:
    return ErrorStatus(status, {"Location": location}, b"elsewhere")


def authorization_headers(server: StorageServer) -> set[str | None]:
    """Authorization headers of the server's requests."""
    return {seen.fields.get("authorization") for seen in server.requests_matching()}


def test_the_token_is_sent(authenticated_server: StorageServer) -> None:
    """A server that requires the token gets it with every request."""
    with open_blob(Location.parse(authenticated_server.url(NAME)), SETTINGS) as blob:
        assert DATA == read_range(blob, 0, blob.size)
    assert {f"Bearer {TOKEN}"} == authorization_headers(authenticated_server)


@pytest.mark.parametrize("settings", [StorageSettings(), StorageSettings(http_token=SecretStr("wrong"))])
def test_another_token_is_denied(authenticated_server: StorageServer, settings: StorageSettings) -> None:
    """Without the right token there is one request and a clear one-line error without the token."""
    with (
        pytest.raises(StorageAccessDenied) as raised,
        open_blob(Location.parse(authenticated_server.url(NAME)), settings),
    ):
        pass
    assert 1 == len(authenticated_server.requests_matching())
    assert "wrong" not in str(raised.value) + repr(raised.value)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_to_another_server_is_followed_without_the_token(
    authenticated_server: StorageServer, server: StorageServer, status: int
) -> None:
    """The other server gets requests for the same bytes without the token; later reads go to it directly."""
    authenticated_server.script.always(redirect_to(f"{server.url(NAME)}?signature=secret", status))
    with open_blob(Location.parse(authenticated_server.url(NAME)), SETTINGS) as blob:
        assert DATA == read_range(blob, 0, blob.size)
        assert DATA[7:9] == read_range(blob, 7, 2)
        assert authenticated_server.url(NAME) == blob.uri
    assert 1 == len(authenticated_server.requests_matching())
    assert 3 == len(server.requests_matching())
    assert {None} == authorization_headers(server)


def test_a_redirect_on_the_same_server_keeps_the_token(authenticated_server: StorageServer) -> None:
    """A redirect to another path of the server carries the token."""
    authenticated_server.script.then(redirect_to(f"/{NAME}"))
    with open_blob(Location.parse(authenticated_server.url("latest")), SETTINGS) as blob:
        assert DATA == read_range(blob, 0, blob.size)
    assert {f"Bearer {TOKEN}"} == authorization_headers(authenticated_server)
    assert 1 == authenticated_server.connections


@pytest.mark.parametrize(("status", "text"), [(403, b"Request has expired"), (400, b"ExpiredToken")])
def test_an_expired_redirect_is_renewed(
    authenticated_server: StorageServer, server: StorageServer, status: int, text: bytes
) -> None:
    """If the target of a redirect refuses, the first server gets the request once more."""
    authenticated_server.script.always(redirect_to(f"{server.url(NAME)}?signature=secret"))
    with open_blob(Location.parse(authenticated_server.url(NAME)), SETTINGS) as blob:
        server.script.then(ErrorStatus(status, text=text))
        assert DATA == read_range(blob, 0, blob.size)
    assert 2 == len(authenticated_server.requests_matching())
    assert [206, status, 206] == [seen.status for seen in server.requests_matching()]


def test_redirect_loops_end(authenticated_server: StorageServer) -> None:
    """Five redirects are followed, and no more."""
    authenticated_server.script.always(redirect_to(f"/{NAME}"))
    with (
        pytest.raises(StorageError, match=f"{NAME} redirects more than 5 times"),
        open_blob(Location.parse(authenticated_server.url(NAME)), SETTINGS),
    ):
        pass
    assert 6 == len(authenticated_server.requests_matching())


def test_a_redirect_from_https_to_http_is_refused(server: StorageServer, tmp_path: Path) -> None:
    """The file is not read over http, and the server there gets no request."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    settings = StorageSettings(ca=tmp_path / "ca.pem")
    with StorageServer({NAME: DATA}, tls=context) as secure:
        secure.script.always(redirect_to(f"{server.url(NAME)}?signature=secret"))
        with pytest.raises(StorageError) as raised, open_blob(Location.parse(secure.url(NAME)), settings):
            pass
        expected = f"{secure.url(NAME)} redirects from https to http, which is not allowed"
        assert expected == str(raised.value)
        assert [] == server.requests_matching()
