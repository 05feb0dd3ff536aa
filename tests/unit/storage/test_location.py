"""Locations of storage: parsing, quoting, and URIs without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from rfork.errors import SettingsError
from rfork.net.request import redacted_url
from rfork.storage.location import Location


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file:///models/a%20b.safetensors", Location("file", "", "/models/a b.safetensors")),
        ("file://localhost/models/", Location("file", "", "/models/")),
        ("/models/llama", Location("file", "", "/models/llama")),
        ("/models/llama/", Location("file", "", "/models/llama/")),
        ("s3://bucket/llama/model.safetensors", Location("s3", "bucket", "llama/model.safetensors")),
        ("s3://bucket/what?is#this", Location("s3", "bucket", "what?is#this")),
        ("s3://bucket", Location("s3", "bucket", "")),
        ("gs://bucket/a", Location("gs", "bucket", "a")),
        (
            "https://host:8443/a%2Bb/c?X-Signature=1",
            Location("https", "host:8443", "a%2Bb/c", "X-Signature=1"),
        ),
        ("https://host/a%2Fb%3Fc:,=@", Location("https", "host", "a%2Fb%3Fc:,=@")),
        ("https://host//a b/100%/é", Location("https", "host", "/a%20b/100%25/%C3%A9")),
    ],
)
def test_uris_and_paths_are_parsed(text: str, expected: Location) -> None:
    """They have scheme, host, path and query; the path of a web server stays quoted."""
    assert expected == Location.parse(text)


@pytest.mark.parametrize(
    "text",
    ["", "ftp://host/a", "file://elsewhere/a", "s3:///key", "https://user:secret@host/a", "http://[::1/a"],
)
def test_an_invalid_location_is_refused(text: str) -> None:
    """A location that cannot be reached or contains a password is refused."""
    with pytest.raises(SettingsError):
        Location.parse(text)


def test_a_refused_uri_hides_its_password() -> None:
    """The error does not repeat the password."""
    with pytest.raises(SettingsError) as raised:
        Location.parse("https://user:secret@host/a")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "htps://h/x?X-Amz-Signature=SECRET",
        "https:///x?X-Amz-Signature=SECRET",
        "http://[::1/x?sig=SECRET",
        "https://host:80x/a?sig=SECRET",
        "https://u:SEC/RET@host/a",
        "https://u:SEC?RET@host/a",
        "ftp://u:SECRET@host/a",
        "file://u:SECRET@host/a",
        "http://u:SECRET@h℀/a",
    ],
)
def test_no_error_shows_a_secret(text: str) -> None:
    """Neither a query nor a password is in the error, whatever is wrong with the URI."""
    with pytest.raises(SettingsError) as raised:
        Location.parse(text)
    assert "SEC" not in str(raised.value)
    assert "RET" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://host/a?sig=secret#part", "https://host/a"),
        ("htps://user:secret@host/a?x", "htps://…"),
        ("nothing?of=secret", "nothing"),
        ("nothing?of=secret://a@b", "nothing://…"),
    ],
)
def test_uris_in_errors_have_no_query(text: str, expected: str) -> None:
    """The query is omitted, and everything but the scheme if there may be a password."""
    assert expected == redacted_url(text)


@pytest.mark.parametrize(
    "uri",
    [
        "https://host/a%2Fb%3Fc/d.safetensors",
        "https://host/~a/b:c,d=e;f@g!$&'()*+.bin",
        "https://host//a//b/",
        "http://[::1]:9000/a%20b",
    ],
)
def test_a_web_uri_is_kept_unchanged(uri: str) -> None:
    """Quoted and unquoted characters stay as they are, because a signature covers exactly these."""
    location = Location.parse(uri)
    assert uri == location.uri
    assert uri == location.parent.child(location.name).uri


def test_the_name_of_a_child_is_quoted_for_web_servers() -> None:
    """A space or a reserved character is quoted for a web server only."""
    assert ["https://host/a/b%20c%23d%3Fe%2F100%25", "s3://host/a/b c#d?e%2F100%"] == [
        Location.parse(f"{scheme}://host/a").child("b c#d?e%2F100%").uri for scheme in ("https", "s3")
    ]


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is relative to the working folder."""
    monkeypatch.chdir(tmp_path)
    assert Location("file", "", str(tmp_path / "a.safetensors")) == Location.parse("a.safetensors")


@pytest.mark.parametrize(
    ("uri", "parent", "folder", "name"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/", "s3://bucket/a/b/", "b"),
        ("s3://bucket/a/", "s3://bucket/a/", "s3://bucket/a/", ""),
        ("s3://bucket/", "s3://bucket/", "s3://bucket/", ""),
        ("file:///a/b", "file:///a/", "file:///a/b/", "b"),
        ("file:///a%20b/", "file:///a%20b/", "file:///a%20b/", ""),
        ("https://host/a/b", "https://host/a/", "https://host/a/b/", "b"),
    ],
)
def test_a_file_is_in_its_parent_and_a_folder_is_its_own(uri: str, parent: str, folder: str, name: str) -> None:
    """A file is in its parent; a folder is its own."""
    location = Location.parse(uri)
    assert uri == location.uri
    assert parent == location.parent.uri
    assert folder == location.folder.uri
    assert name == location.name


def test_a_child_is_within_its_folder() -> None:
    """`child` returns a name in the folder, written with a slash at its end or not."""
    expected = Location("s3", "bucket", "llama/model-rank-000.safetensors")
    assert [expected, expected] == [
        Location.parse(text).child("model-rank-000.safetensors") for text in ("s3://bucket/llama", "s3://bucket/llama/")
    ]


def test_a_query_is_never_shown() -> None:
    """The query of a presigned URL is in no displayed URI and in no representation."""
    location = Location.parse("https://host/a?X-Amz-Signature=1")
    assert "https://host/a" == location.uri
    assert "Signature" not in repr(location)
