"""The http transport without sockets: responses to requests for an image, and URLs of sources."""

from __future__ import annotations

import ssl
from http import HTTPStatus

import pytest

from rfork.errors import SourceCorrupt
from rfork.transport.http.client import HttpReader
from rfork.transport.http.responses import ImageResource, respond
from tests.transport_contract import TOKEN, FakeGate, image_of


@pytest.mark.parametrize(
    "url", ["", "ftp://a/b", "http:///x", "http://a:b/", "http://a/b c", "http://a/\u00e9", "https://user:secret@a/b"]
)
def test_an_invalid_url_is_source_corrupt(url: str) -> None:
    """The source provided the URL, so an invalid one is its fault; the error shows no password."""
    with pytest.raises(SourceCorrupt) as raised:
        HttpReader(
            url,
            image_of((1,)),
            lambda: "",
            etag="",
            tls_context=ssl.create_default_context,
            idle_timeout_s=1.0,
        )
    assert "secret" not in str(raised.value)


HEADER = b"h" * 50
FULL = {"authorization": f"Bearer {TOKEN}"}


def image_file(gate: FakeGate) -> ImageResource:
    return ImageResource(image_of((60, 40), seed=1), lambda: HEADER, gate)


@pytest.mark.parametrize(
    ("method", "target", "fields", "status", "admitted"),
    [
        ("GET", "/v1/image", FULL, 200, [(0, 0), (0, 100)]),
        ("GET", "/v1/image", FULL | {"range": "bytes=60-69"}, 206, [(0, 0), (60, 70)]),
        ("GET", "/v1/image", FULL | {"range": "bytes=100-"}, 416, [(0, 0)]),
        ("GET", "/v1/image.safetensors", FULL, 200, [(0, 0), (0, 100)]),
        ("GET", "/v1/image.safetensors?x=1", FULL, 200, [(0, 0), (0, 100)]),
        ("HEAD", "/v1/image.safetensors", FULL, 200, [(0, 0)]),
        ("GET", "/v1/image.safetensors", FULL | {"range": "bytes=0-49"}, 206, [(0, 0), (0, 0)]),
        ("GET", "/v1/image.safetensors", FULL | {"range": "bytes=40-59"}, 206, [(0, 0), (0, 10)]),
        ("GET", "/v1/image.safetensors", FULL | {"range": "bytes=60-69"}, 206, [(0, 0), (10, 20)]),
        ("HEAD", "/v1/image.safetensors", FULL | {"range": "bytes=60-69"}, 200, [(0, 0)]),
        ("GET", "/v1/image.safetensors", FULL | {"range": "bytes=150-"}, 416, [(0, 0)]),
        ("GET", "/v1/image.safetensors", FULL | {"if-match": '"other"', "range": "bytes=0-1"}, 412, [(0, 0)]),
        ("GET", "/v1/image.safetensors", FULL | {"if-range": '"other"', "range": "bytes=0-1"}, 200, [(0, 0), (0, 100)]),
        ("POST", "/v1/image.safetensors", FULL, 405, []),
        ("GET", "/", FULL, 404, []),
        ("GET", "/v1/image.safetensors", {}, 401, []),
        ("GET", "/v1/image.safetensors", {"authorization": "Bearer forged"}, 403, []),
    ],
)
def test_each_request_gets_the_right_response(
    method: str, target: str, fields: dict[str, str], status: int, admitted: list[tuple[int, int]]
) -> None:
    """The status of each request, and the image bytes authorized by the gate."""
    gate = FakeGate()
    response = respond(method, target, fields, image_file(gate))
    assert status == response.status
    assert admitted == gate.admitted


@pytest.mark.parametrize(("verified", "changed", "status"), [(50, False, 409), (100, True, 410)])
def test_the_gate_determines_the_status(verified: int, changed: bool, status: int) -> None:
    """Unverified bytes are 409, and changed weights are 410."""
    response = respond("GET", "/v1/image", FULL, image_file(FakeGate(verified, changed)))
    assert status == response.status


def test_reading_the_image_makes_no_header() -> None:
    """The header of the safetensors file is made by its first request, and once."""
    made: list[bytes] = []

    def header() -> bytes:
        made.append(HEADER)
        return HEADER

    resource = ImageResource(image_of((60, 40), seed=1), header, FakeGate())
    respond("GET", "/v1/image", FULL, resource)
    assert [] == made
    for _ in range(2):
        respond("GET", "/v1/image.safetensors", FULL, resource)
    assert [HEADER] == made


def test_no_two_exports_share_an_etag() -> None:
    """A process that reuses a port cannot be mistaken for its predecessor."""
    assert image_file(FakeGate()).etag != image_file(FakeGate()).etag


def test_the_etag_changes_with_the_weights() -> None:
    """A new generation in the gate changes the entity tag."""
    gate = FakeGate()
    file = image_file(gate)
    before = file.etag
    gate.generation = 1
    assert before != file.etag


def test_an_error_response_is_one_line() -> None:
    """The reason is one line of plain text."""
    response = respond("GET", "/v1/image", {"authorization": "Bearer forged"}, image_file(FakeGate()))
    assert HTTPStatus.FORBIDDEN == response.status
    assert b"no such lease\n" == response.text
