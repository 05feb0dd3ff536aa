"""S3 stores configured by rfork's settings, AWS's files and the environment; no server is contacted."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("botocore", reason="NO boto3: S3 IS NOT TESTED")

from botocore.session import Session

from rfork.errors import MissingExtra, SettingsError, StorageAccessDenied
from rfork.settings import StorageSettings
from rfork.storage.location import Location
from rfork.storage.registry import open_store
from rfork.storage.s3 import store as module
from rfork.storage.s3.bucket import S3Bucket
from rfork.storage.s3.store import S3Store
from rfork.storage.s3.url_signer import URL_TTL_S
from tests.seaweed import UseIdentity, use_identity

__all__ = ["use_identity"]


@pytest.fixture
def keys(use_identity: UseIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set credentials in the environment, and nothing else of AWS."""
    use_identity(None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


def _settings(**changes: str | bool) -> StorageSettings:
    return StorageSettings.model_validate(changes)


@pytest.mark.parametrize(
    ("bucket", "changes", "host", "path"),
    [
        ("models", {}, "models.s3.amazonaws.com", "/a/b"),
        ("models", {"s3_region": "eu-central-1"}, "models.s3.eu-central-1.amazonaws.com", "/a/b"),
        ("models", {"s3_addressing": "path"}, "s3.amazonaws.com", "/models/a/b"),
        ("models", {"s3_endpoint": "http://minio:9000"}, "minio:9000", "/models/a/b"),
        (
            "models",
            {"s3_endpoint": "https://minio", "s3_addressing": "virtual"},
            "models.minio",
            "/a/b",
        ),
        # AWS certificates cover no bucket names with dots.
        ("my.models", {}, "s3.amazonaws.com", "/my.models/a/b"),
    ],
)
def test_the_bucket_is_part_of_the_host_or_of_the_path(
    keys: None, bucket: str, changes: dict[str, str], host: str, path: str
) -> None:
    """The bucket is part of the host or of the path, depending on settings, endpoint and bucket name."""
    url = urlsplit(S3Bucket(bucket, _settings(**changes)).url("a/b"))
    assert host == url.netloc
    assert path == url.path


def test_urls_have_a_version_4_signature(keys: None) -> None:
    """A URL is signed with version 4, for the region, by the environment's key, over the host only."""
    query = parse_qs(urlsplit(S3Bucket("models", _settings(s3_region="eu-west-1")).url("a")).query)
    access_key, _, region, service, _ = query["X-Amz-Credential"][0].split("/")
    assert "AKIAENVIRONMENT" == access_key
    assert "eu-west-1" == region
    assert "s3" == service
    assert ["host"] == query["X-Amz-SignedHeaders"]
    assert ["900"] == query["X-Amz-Expires"]


def test_anonymous_urls_have_no_signature(keys: None) -> None:
    """With `s3_anonymous` the environment's keys are not used."""
    assert "https://models.s3.amazonaws.com/a%20b/%C3%BC%3F%23%2B" == (
        S3Bucket("models", _settings(s3_anonymous=True)).url("a b/ü?#+")
    )


def test_a_profile_defines_credentials_region_and_endpoint(
    use_identity: UseIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials, region and endpoint of a profile come from AWS's files."""
    use_identity(None)
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = AKIALAB\naws_secret_access_key = x\n")
    (tmp_path / "config").write_text("[profile lab]\nregion = ap-south-1\nendpoint_url = http://lab.example.com\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    url = urlsplit(S3Bucket("models", _settings()).url("a"))
    signed = parse_qs(url.query)["X-Amz-Credential"][0].split("/")
    assert "lab.example.com" == url.netloc
    assert "/models/a" == url.path
    assert "AKIALAB" == signed[0]
    assert "ap-south-1" == signed[2]


def test_a_missing_profile_is_named(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is one line that names the profile, with the variable as a hint."""
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(SettingsError, match="profile \\(missing\\) could not be found") as caught:
        S3Store(Location.parse("s3://models/"), _settings()).open("a")
    assert "check AWS_PROFILE" == caught.value.hint


def test_missing_credentials_are_an_error(use_identity: UseIdentity) -> None:
    """No request is sent, and the error names the variables to set."""
    use_identity(None)
    with pytest.raises(StorageAccessDenied, match=r"s3://models/a: no credentials found") as caught:
        S3Store(Location.parse("s3://models/"), _settings()).open("a")
    assert "AWS_SKIP_SIGNATURE=true" in caught.value.hint


def test_an_invalid_bucket_name_is_an_error(keys: None) -> None:
    """A name that botocore refuses is an error of one line."""
    with pytest.raises(SettingsError, match="Invalid bucket name") as caught:
        S3Store(Location.parse("s3://Mod_els*/"), _settings()).remove("a")
    assert "\n" not in str(caught.value)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without botocore, opening a store fails with the extra to install."""
    for name in ("rfork.storage.s3.store", "rfork.storage.s3.bucket"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botocore", None)
    with pytest.raises(MissingExtra, match="boto3 \\(for s3://\\)") as caught:
        open_store(Location.parse("s3://models/"))
    assert "pip install 'rfork[s3]'" == caught.value.hint


def test_a_signature_is_reused(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is signed again once its signature is old, long before it expires; it is never shown."""
    now, signed = [1000.0], itertools.count(1)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    sign = module._RequestSigner(lambda key: f"https://s3/{key}?X-Amz-Signature={next(signed)}", "a")
    urls = []
    for seconds in (0, module.SIGNATURE_REUSE_S - 1, 1, 10):
        now[0] += seconds
        urls.append(sign().url)
    assert ["1", "1", "2", "2"] == [url[-1] for url in urls]
    assert "Request('https://s3/a')" == repr(sign())
    assert module.SIGNATURE_REUSE_S < URL_TTL_S / 2


def test_all_threads_share_one_client(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent threads wait for one client, which is created on first use."""
    made: list[str] = []
    start, create_client = threading.Barrier(4), Session.create_client

    def counted(session: Session, service: str, **options: object) -> object:
        made.append(service)
        return create_client(session, service, **options)

    monkeypatch.setattr(Session, "create_client", counted)
    bucket = S3Bucket("models", _settings(s3_addressing="path"))
    assert [] == made

    def sign() -> None:
        start.wait()
        bucket.url("a")

    threads = [threading.Thread(target=sign) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ["s3"] == made


def test_readers_use_the_ca_bundle_of_aws(keys: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AWS_CA_BUNDLE has precedence over SSL_CERT_FILE; reads use the same file."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "all.pem"))
    assert tmp_path / "all.pem" == S3Bucket("models", _settings()).ca_file
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "s3.pem"))
    assert tmp_path / "s3.pem" == S3Bucket("models", _settings()).ca_file
