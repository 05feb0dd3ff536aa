"""URLs signed without botocore: equal to botocore's, and only where nothing else configures S3."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("botocore", reason="NO boto3: S3 IS NOT TESTED")

from rfork.settings import StorageSettings, aws_variables
from rfork.storage.s3.bucket import S3Bucket
from rfork.storage.s3.url_signer import UrlSigner
from tests.seaweed import UseIdentity, use_identity

__all__ = ["use_identity"]

KEY = "a b/ü~x+&=#?.safetensors"


@pytest.fixture
def keys(use_identity: UseIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set credentials in the environment, and nothing else of AWS."""
    use_identity(None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA/ENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


def _settings(changes: dict[str, str | bool]) -> StorageSettings:
    return StorageSettings.model_validate(changes)


def _signer(changes: dict[str, str | bool], bucket: str = "models") -> UrlSigner | None:
    return UrlSigner.from_variables(bucket, _settings(changes), aws_variables())


@pytest.mark.parametrize("token", ["", "a/token+="])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"s3_region": "eu-central-1"},
        {"s3_region": "eu-central-1", "s3_addressing": "virtual"},
        {"s3_endpoint": "http://minio:9000"},
        {"s3_endpoint": "http://127.0.0.1:9000", "s3_addressing": "path"},
        {"s3_endpoint": "http://127.0.0.1:9000", "s3_addressing": "virtual"},
        {"s3_endpoint": "https://minio.example.com/", "s3_addressing": "virtual"},
        {"s3_endpoint": "https://[::1]:9000", "s3_region": "my-region"},
        {"s3_anonymous": True},
    ],
)
def test_urls_equal_those_of_botocore(
    keys: None, changes: dict[str, str | bool], token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """URL, signed fields and signature are those of botocore, for every form of address."""
    if token:
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    expected = S3Bucket("models", _settings(changes)).url(KEY)
    signer = _signer(changes)
    assert signer is not None
    stamp = parse_qs(urlsplit(expected).query).get("X-Amz-Date", ["20300101T000000Z"])[0]
    now = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
    signed = signer.url(KEY, now)
    assert urlsplit(expected)._replace(query="") == urlsplit(signed)._replace(query="")
    assert parse_qs(urlsplit(expected).query) == parse_qs(urlsplit(signed).query)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_PROFILE", "lab"),
        ("AWS_USE_FIPS_ENDPOINT", "true"),
        ("AWS_ROLE_ARN", "arn:aws:iam::1:role/x"),
        ("AWS_SECRET_ACCESS_KEY", ""),
    ],
)
def test_other_configuration_is_left_to_botocore(
    keys: None, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable with another meaning, or an incomplete key, is left to botocore."""
    monkeypatch.setenv(name, value)
    assert _signer({}) is None


@pytest.mark.parametrize("variable", ["AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"])
def test_configuration_files_are_left_to_botocore(
    keys: None, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one of AWS's files exists, it may configure anything."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(variable, str(tmp_path / "file"))
    assert _signer({}) is None


@pytest.mark.parametrize(
    ("bucket", "changes"),
    [
        ("my.models", {}),
        ("models--use1-az4--x-s3", {}),
        ("models", {"s3_region": "cn-north-1"}),
        ("models", {"s3_addressing": "path"}),
        ("models", {"s3_endpoint": "https://s3.dualstack.eu-west-1.amazonaws.com"}),
        ("models", {"s3_endpoint": "http://minio:9000/prefix"}),
    ],
)
def test_unusual_addresses_are_left_to_botocore(keys: None, bucket: str, changes: dict[str, str | bool]) -> None:
    """Buckets and endpoints whose URLs have another form are left to botocore."""
    assert _signer(changes, bucket) is None


def test_the_ca_bundle_of_aws_has_precedence(keys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS_CA_BUNDLE has precedence over SSL_CERT_FILE."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "all.pem"))
    signer = _signer({})
    assert signer is not None
    assert tmp_path / "all.pem" == signer.ca_file
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "s3.pem"))
    signer = _signer({})
    assert signer is not None
    assert tmp_path / "s3.pem" == signer.ca_file


def test_secrets_are_not_shown(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The representation contains neither the secret key nor the token."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "hidden")
    shown = repr(_signer({}))
    assert "secret'" not in shown
    assert "hidden" not in shown
