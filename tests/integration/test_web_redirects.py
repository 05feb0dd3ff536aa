"""Redirects of web storage, and who is shown the token."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from pydantic import SecretStr

from rfork.errors import StorageDenied, StorageError
from rfork.settings import StorageSettings
from rfork.storage.blob import part
from rfork.storage.location import Location
from rfork.storage.stores import opened
from tests.storage_faults import Status
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
def front() -> Iterator[StorageServer]:
    """What wants the token."""
    with StorageServer({NAME: DATA}, token=TOKEN) as made:
        yield made


def to(location: str, status: int = 302) -> Status:
    return Status(status, {"Location": location}, b"elsewhere")


def shown(server: StorageServer) -> set[str | None]:
    """What its requests had for Authorization."""
    return {seen.fields.get("authorization") for seen in server.seen()}


def test_the_token_is_shown(front: StorageServer) -> None:
    """A server that wants the token gets it with every request."""
    with opened(Location.parse(front.url(NAME)), SETTINGS) as blob:
        assert DATA == part(blob, 0, blob.size)
    assert {f"Bearer {TOKEN}"} == shown(front)


@pytest.mark.parametrize("settings", [StorageSettings(), StorageSettings(http_token=SecretStr("wrong"))])
def test_another_token_is_denied(front: StorageServer, settings: StorageSettings) -> None:
    """Without the right token there is one request, one clear line, and no word of the token."""
    with pytest.raises(StorageDenied) as raised, opened(Location.parse(front.url(NAME)), settings):
        pass
    assert (1, False) == (len(front.seen()), "wrong" in str(raised.value) + repr(raised.value))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_to_another_server_is_followed_without_the_token(
    front: StorageServer, server: StorageServer, status: int
) -> None:
    """The other server is asked for the same bytes and shown no token; later reads go there at once."""
    front.script.always(to(f"{server.url(NAME)}?signature=secret", status))
    with opened(Location.parse(front.url(NAME)), SETTINGS) as blob:
        assert (DATA, DATA[7:9]) == (part(blob, 0, blob.size), part(blob, 7, 2))
        assert front.url(NAME) == blob.uri
    assert (1, 3, {None}) == (len(front.seen()), len(server.seen()), shown(server))


def test_a_redirect_on_the_same_server_keeps_the_token(front: StorageServer) -> None:
    """A path may lead to another path, and the token goes along."""
    front.script.then(to(f"/{NAME}"))
    with opened(Location.parse(front.url("latest")), SETTINGS) as blob:
        assert DATA == part(blob, 0, blob.size)
    assert ({f"Bearer {TOKEN}"}, 1) == (shown(front), front.connections)


@pytest.mark.parametrize(("status", "text"), [(403, b"Request has expired"), (400, b"ExpiredToken")])
def test_a_redirect_that_has_expired_is_asked_for_again(
    front: StorageServer, server: StorageServer, status: int, text: bytes
) -> None:
    """Where the place that a redirect led to refuses, the first server is asked for the way once more."""
    front.script.always(to(f"{server.url(NAME)}?signature=secret"))
    with opened(Location.parse(front.url(NAME)), SETTINGS) as blob:
        server.script.then(Status(status, text=text))
        assert DATA == part(blob, 0, blob.size)
    assert (2, [206, status, 206]) == (len(front.seen()), [seen.status for seen in server.seen()])


def test_redirects_in_a_ring_end(front: StorageServer) -> None:
    """Five redirects are followed, and no more."""
    front.script.always(to(f"/{NAME}"))
    with (
        pytest.raises(StorageError, match=f"{NAME} redirects more than 5 times"),
        opened(Location.parse(front.url(NAME)), SETTINGS),
    ):
        pass
    assert 6 == len(front.seen())


def test_a_redirect_out_of_tls_is_not_followed(server: StorageServer, tmp_path: Path) -> None:
    """What was to come over https is not taken over http, and the server there is not even asked."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    settings = StorageSettings(ca=tmp_path / "ca.pem")
    with StorageServer({NAME: DATA}, tls=context) as secure:
        secure.script.always(to(f"{server.url(NAME)}?signature=secret"))
        with pytest.raises(StorageError) as raised, opened(Location.parse(secure.url(NAME)), settings):
            pass
        expected = f"{secure.url(NAME)} redirects from https to http, which is not followed"
        assert (expected, []) == (str(raised.value), server.seen())
