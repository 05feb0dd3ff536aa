"""Fixtures of a real S3 server, shared by all tests of a run."""

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
    """Run SeaweedFS with `BUCKETS` for all tests; each test uses its own keys."""
    if why := seaweed.unavailable_reason():
        pytest.skip(f"NO SeaweedFS: S3 IS NOT TESTED: {why}")
    with SeaweedServer(tmp_path_factory.mktemp("seaweed"), buckets=BUCKETS) as server:
        yield server


@pytest.fixture
def use_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> UseIdentity:
    """Set the credentials of this process's S3 clients, or none.

    The developer's AWS configuration and instance metadata are not used.
    """

    def use(identity: Identity | None) -> None:
        for name in (
            "AWS_PROFILE",
            "AWS_SESSION_TOKEN",
            "AWS_ENDPOINT_URL",
            "AWS_ENDPOINT_URL_S3",
            "AWS_REGION",
            "AWS_CA_BUNDLE",
            "AWS_SKIP_SIGNATURE",
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
    """Return the server, with the writer's credentials in the environment."""
    use_identity(seaweed.WRITER)
    return seaweed_server
