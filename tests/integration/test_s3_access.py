"""S3 access control, bucket addressing and credential lookup, on real servers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from benchmarks import seaweed
from benchmarks.seaweed import SeaweedServer
from rfork.errors import StorageAccessDenied
from rfork.settings import StorageSettings
from rfork.storage.location import Location
from rfork.storage.s3.store import S3Store
from tests.s3_stores import (
    SEVERAL_PARTS,
    OpenStore,
    StoreOperation,
    each_operation,
    get,
    open_named_blob,
    put,
    put_blob,
    remove_blob,
    storage_error_of,
    upload_blob,
)
from tests.seaweed import UseIdentity


@pytest.mark.slow  # logic: tests/unit/storage/s3/test_errors.py
def test_a_reader_cannot_write(s3: SeaweedServer, s3_store: OpenStore, use_identity: UseIdentity) -> None:
    """A reader's credentials open and list, but neither write nor remove."""
    put(s3_store(), "blob", b"abc")
    use_identity(seaweed.READER)
    store = s3_store()
    assert b"abc" == get(store, "blob")
    assert ["blob"] == [entry.name for entry in store.list()]
    for use in (put_blob, upload_blob, remove_blob):
        assert StorageAccessDenied is storage_error_of(lambda use=use: use(store))[0]  # type: ignore[misc]
    assert b"abc" == get(store, "blob")


@pytest.fixture
def names_below_localhost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve every name below localhost to this machine, as RFC 6761 requires; not every resolver does."""
    resolve = socket.getaddrinfo

    def resolved(host: str, *rest: int, **more: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        found = resolve("127.0.0.1" if host.endswith(".localhost") else host, *rest, **more)
        return found  # type: ignore[return-value]  # addresses of IPv4 alone

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


def test_virtual_addressing(s3: SeaweedServer, s3_store: OpenStore, names_below_localhost: None) -> None:
    """Requests are sent to BUCKET.HOST."""
    put(s3_store("s3://models/virtual/"), "blob", b"abc")
    endpoint = f"http://{seaweed.DOMAIN}:{s3.port}"
    store = s3_store("s3://models/virtual/", s3_endpoint=endpoint, s3_addressing="virtual")
    put(store, "other", bytes(SEVERAL_PARTS))
    assert b"abc" == get(store, "blob")
    assert ["blob", "other"] == [entry.name for entry in store.list()]


def test_credentials_of_a_profile_are_used(
    s3: SeaweedServer,
    s3_store: OpenStore,
    use_identity: UseIdentity,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A profile of AWS's credentials file grants its access."""
    use_identity(None)
    identity = seaweed.WRITER
    (tmp_path / "credentials").write_text(
        f"[lab]\naws_access_key_id = {identity.access_key}\naws_secret_access_key = {identity.secret_key}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    put(s3_store(), "blob", b"abc")
    assert b"abc" == get(s3_store(), "blob")
    monkeypatch.delenv("AWS_PROFILE")
    assert (StorageAccessDenied, "no credentials found") == storage_error_of(lambda: open_named_blob(s3_store()))


@each_operation
def test_a_wrong_secret_is_one_line(s3_store: OpenStore, monkeypatch: pytest.MonkeyPatch, use: StoreOperation) -> None:
    """Every operation fails with one line about the wrong signature, without the secret."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    error, line = storage_error_of(lambda: use(s3_store()))
    assert StorageAccessDenied == error
    assert "SignatureDoesNotMatch" in line
    assert "\n" not in line
    assert "wrong" not in line


@each_operation
def test_a_private_bucket_rejects_anonymous_access(s3_store: OpenStore, use: StoreOperation) -> None:
    """Without credentials a private bucket rejects reads, writes and listings."""
    error, line = storage_error_of(lambda: use(s3_store(s3_anonymous=True)))
    assert StorageAccessDenied == error
    assert "access denied: Access Denied (AccessDenied)" == line


class _Service(ThreadingHTTPServer):
    """A server with one S3 object in eu-central-1, and AWS's STS; `requests` records each request's purpose."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _ServiceHandler)
        self.requests: list[str] = []
        self.refuses_tokens = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _ServiceHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Service

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        access_key, _, region, *_ = query["X-Amz-Credential"][0].split("/")
        token = query.get("X-Amz-Security-Token", ["none"])[0]
        self.server.requests.append(f"GET {region} {access_key} {token}")
        if region != "eu-central-1":
            self._respond(
                400,
                "<Error><Code>AuthorizationQueryParametersError</Code><Message>the region is wrong; "
                "expecting eu-central-1</Message><Region>eu-central-1</Region></Error>",
            )
        else:
            self._respond(206, "abc"[:1], {"Content-Range": "bytes 0-0/3", "ETag": '"1"'})

    def do_HEAD(self) -> None:
        region = self.headers["Authorization"].split("/")[2]
        self.server.requests.append(f"HEAD {region}")
        self._respond(200 if region == "eu-central-1" else 400, "", {"x-amz-bucket-region": "eu-central-1"})

    def do_POST(self) -> None:
        parameters = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.server.requests.append(
            f"{parameters['Action'][0]} {parameters['RoleArn'][0]} {parameters['WebIdentityToken'][0]}"
        )
        if self.server.refuses_tokens:
            self._respond(
                400,
                "<ErrorResponse><Error><Type>Sender</Type><Code>InvalidIdentityToken</Code>"
                "<Message>No such provider</Message></Error></ErrorResponse>",
            )
            return
        self._respond(
            200,
            "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
            "<AccessKeyId>ASIAROLE</AccessKeyId><SecretAccessKey>s</SecretAccessKey>"
            "<SessionToken>session</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration>"
            "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>",
        )

    def _respond(self, status: int, text: str, fields: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(fields or {}), "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: str) -> None:
        """Log nothing: tests check `requests`."""


@pytest.fixture
def service() -> Iterator[_Service]:
    """A server of AWS responses that records its requests."""
    with _Service() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_bucket_in_another_region_is_found(
    service: _Service, use_identity: UseIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket's region is found and remembered."""
    use_identity(seaweed.WRITER)
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    settings = StorageSettings(s3_endpoint=service.url, max_attempts=1)
    with closing(S3Store(Location.parse("s3://models/"), settings)) as store:
        for _ in range(2):
            with closing(store.open("blob")) as blob:
                assert 3 == blob.size
                assert '"1"' == blob.version
    key = seaweed.WRITER.access_key
    home = f"GET eu-central-1 {key} none"
    assert [
        f"GET us-east-1 {key} none",
        "HEAD us-east-1",
        "HEAD eu-central-1",
        home,
        home,
    ] == service.requests


@pytest.fixture
def web_identity(
    service: _Service, use_identity: UseIdentity, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> S3Store:
    """A store in a process whose Pod has an IAM role (IRSA) and no other credentials."""
    use_identity(None)
    (tmp_path / "token").write_text("token-of-the-pod")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/models")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", service.url)
    settings = StorageSettings(s3_endpoint=service.url, s3_region="eu-central-1", max_attempts=1)
    return S3Store(Location.parse("s3://models/"), settings)


def test_credentials_of_a_web_identity_are_used(service: _Service, web_identity: S3Store) -> None:
    """A Pod's token is exchanged for its role's credentials, which read objects."""
    with closing(web_identity), closing(web_identity.open("blob")) as blob:
        assert 3 == blob.size
    role = "arn:aws:iam::123456789012:role/models"
    assert [
        f"AssumeRoleWithWebIdentity {role} token-of-the-pod",
        "GET eu-central-1 ASIAROLE session",
    ] == service.requests


def test_a_refused_web_identity_is_one_line(service: _Service, web_identity: S3Store) -> None:
    """If the role is not granted, one line reports it, without the token."""
    service.refuses_tokens = True
    with closing(web_identity):
        assert (
            StorageAccessDenied,
            "AWS issues no credentials: No such provider (InvalidIdentityToken)",
        ) == storage_error_of(lambda: open_named_blob(web_identity))
