from __future__ import annotations

from pathlib import Path

import pytest

from rfork.errors import SettingsError
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
        ("https://host:8443/a%2Bb/c?X-Signature=1", Location("https", "host:8443", "a+b/c", "X-Signature=1")),
    ],
)
def test_what_users_write(text: str, expected: Location) -> None:
    """URIs and paths come apart into scheme, host, decoded path and query."""
    assert expected == Location.parse(text)


@pytest.mark.parametrize(
    "text",
    ["", "ftp://host/a", "file://elsewhere/a", "s3:///key", "https://user:secret@host/a", "http://[::1/a"],
)
def test_what_is_no_location(text: str) -> None:
    """What names nothing that can be reached, or carries a password, is refused."""
    with pytest.raises(SettingsError):
        Location.parse(text)


def test_a_refused_uri_keeps_its_password() -> None:
    """The password in a URI is not repeated in the error."""
    with pytest.raises(SettingsError) as raised:
        Location.parse("https://user:secret@host/a")
    assert "secret" not in str(raised.value)


def test_a_relative_path_is_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is made absolute."""
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
def test_the_ways_up_and_down(uri: str, parent: str, folder: str, name: str) -> None:
    """A file lies in its parent; a folder is its own."""
    location = Location.parse(uri)
    assert (uri, parent, folder, name) == (
        location.uri,
        location.parent.uri,
        location.folder.uri,
        location.name,
    )


def test_a_child_is_within_its_folder() -> None:
    """`child` gives a name in the folder, whether or not that was written with its slash."""
    expected = Location("s3", "bucket", "llama/model-rank-000.safetensors")
    assert [expected, expected] == [
        Location.parse(text).child("model-rank-000.safetensors")
        for text in ("s3://bucket/llama", "s3://bucket/llama/")
    ]


def test_a_query_shows_nowhere() -> None:
    """The query of a presigned URL is in no URI that is shown."""
    assert "https://host/a" == Location.parse("https://host/a?X-Amz-Signature=1").uri
