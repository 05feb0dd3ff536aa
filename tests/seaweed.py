"""Fixtures of a real S3 server, which all tests of a run share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import seaweed
from benchmarks.seaweed import Identity, SeaweedServer

BUCKETS = ("models", "private", "spare")

UseIdentity = Callable[[Identity | None], None]


@pytest.fixture(scope="session")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """SeaweedFS with `BUCKETS`, for the whole run: tests keep to keys of their own."""
    if why := seaweed.unavailable_reason():
        pytest.skip(f"NO SeaweedFS: S3 IS NOT TESTED: {why}")
    with SeaweedServer(tmp_path_factory.mktemp("seaweed"), buckets=BUCKETS) as server:
        yield server


@pytest.fixture
def use_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> UseIdentity:
    """Has this process's S3 clients show these credentials, and none where None is given.

    Nothing of the developer's own AWS configuration is seen, and no instance metadata is asked for.
    """

    def use(identity: Identity | None) -> None:
        for name in (
            "AWS_PROFILE",
            "AWS_SESSION_TOKEN",
            "AWS_ENDPOINT_URL",
            "AWS_ENDPOINT_URL_S3",
            "AWS_REGION",
        ):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name, raising=False)
        if identity is not None:
            for name, value in identity.environment.items():
                monkeypatch.setenv(name, value)

    return use


@pytest.fixture
def s3(seaweed_server: SeaweedServer, use_identity: UseIdentity) -> SeaweedServer:
    """The server, with the writer's credentials in the environment."""
    use_identity(seaweed.WRITER)
    return seaweed_server
