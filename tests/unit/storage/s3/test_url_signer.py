"""URLs signed without botocore's client: equal to the client's, and only where its endpoint rules are not needed."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("botocore", reason="NO boto3: S3 IS NOT TESTED")

from botocore import auth
from botocore.session import Session

from rfork.errors import StorageAccessDenied
from rfork.settings import StorageSettings
from rfork.storage.s3.bucket import S3Bucket
from rfork.storage.s3.url_signer import DEFAULT_REGION, URL_TTL_S, UrlSigner
from tests.seaweed import UseIdentity, use_identity

__all__ = ["use_identity"]

KEY = "a b/ü~x+&=#?.safetensors"


@pytest.fixture
def keys(use_identity: UseIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set credentials in the environment, and nothing else of AWS."""
    use_identity(None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA/ENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.fixture
def aws_config(use_identity: UseIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """AWS's configuration file; nothing else configures AWS."""
    use_identity(None)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return tmp_path / "config"


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sign every URL with the same time."""
    now = auth.get_current_datetime()
    monkeypatch.setattr(auth, "get_current_datetime", lambda *_: now)


def _bucket(changes: dict[str, str | bool] | None = None, name: str = "models") -> S3Bucket:
    return S3Bucket(name, StorageSettings.model_validate(changes or {}))


def _client_url(bucket: S3Bucket, key: str) -> str:
    """Return the URL that botocore's client creates for a bucket."""
    parameters = {"Bucket": bucket.name, "Key": key}
    return bucket._client.generate_presigned_url("get_object", Params=parameters, ExpiresIn=URL_TTL_S)


def _access_key(url: str) -> str:
    return parse_qs(urlsplit(url).query)["X-Amz-Credential"][0].partition("/")[0]


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The services for which a client has been created."""
    made: list[str] = []
    create_client = Session.create_client

    def counted(session: Session, service: str, **options: object) -> object:
        made.append(service)
        return create_client(session, service, **options)

    monkeypatch.setattr(Session, "create_client", counted)
    return made


@pytest.mark.parametrize("token", ["", "a/token+="])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"s3_region": "eu-central-1"},
        {"s3_region": "eu-central-1", "s3_addressing": "virtual"},
        {"s3_endpoint": "http://minio:9000"},
        {"s3_endpoint": "http://minio:80"},
        {"s3_endpoint": "http://127.0.0.1:9000", "s3_addressing": "path"},
        {"s3_endpoint": "http://127.0.0.1:9000", "s3_addressing": "virtual"},
        {"s3_endpoint": "https://minio.example.com/", "s3_addressing": "virtual"},
        {"s3_endpoint": "https://[::1]:9000", "s3_region": "my-region"},
        {"s3_anonymous": True},
    ],
)
def test_urls_equal_those_of_the_client(
    keys: None,
    stopped_clock: None,
    clients: list[str],
    changes: dict[str, str | bool],
    token: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """URL, signed fields and signature are those of botocore's client, for every form of address."""
    if token:
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    bucket = _bucket(changes)
    url = bucket.url(KEY)
    assert [] == clients
    expected = _client_url(bucket, KEY)
    assert urlsplit(expected)._replace(query="") == urlsplit(url)._replace(query="")
    assert parse_qs(urlsplit(expected).query) == parse_qs(urlsplit(url).query)


def test_a_profile_needs_no_client(
    aws_config: Path, stopped_clock: None, clients: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials and region of a profile sign the same URL as the client."""
    aws_config.write_text(
        "[profile lab]\naws_access_key_id = AKIALAB\naws_secret_access_key = x\nregion = ap-south-1\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "lab")
    bucket = _bucket()
    url = bucket.url(KEY)
    assert "AKIALAB" == _access_key(url)
    assert "models.s3.ap-south-1.amazonaws.com" == urlsplit(url).netloc
    assert [] == clients
    assert parse_qs(urlsplit(_client_url(bucket, KEY)).query) == parse_qs(urlsplit(url).query)


def test_credentials_are_refreshed(aws_config: Path, clients: list[str], tmp_path: Path) -> None:
    """Credentials that expire are replaced by new ones for the next signature."""
    program = tmp_path / "credentials.py"
    program.write_text(
        f"""
import datetime, json, pathlib
count = pathlib.Path({str(tmp_path / "count")!r})
number = len(count.read_text()) if count.exists() else 0
count.write_text("x" * (number + 1))
expiration = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=1 if number == 0 else 60)
print(json.dumps(dict(Version=1, AccessKeyId=f"ASIA{{number}}", SecretAccessKey="s", SessionToken="t",
    Expiration=expiration.isoformat())))
"""
    )
    aws_config.write_text(f"[default]\ncredential_process = {sys.executable} {program}\n")
    bucket = _bucket()
    assert ["ASIA1"] * 2 == [_access_key(bucket.url("a")) for _ in range(2)]
    assert [] == clients


def test_partial_credentials_are_one_line(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the missing variable."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    with pytest.raises(StorageAccessDenied) as caught:
        _bucket().url("a")
    line = "s3://models/a: Partial credentials found in env, missing: AWS_SECRET_ACCESS_KEY"
    assert line == str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_USE_FIPS_ENDPOINT", "true"),
        ("AWS_USE_DUALSTACK_ENDPOINT", "true"),
        ("AWS_S3_US_EAST_1_REGIONAL_ENDPOINT", "regional"),
        ("AWS_DEFAULTS_MODE", "standard"),
    ],
)
def test_variables_of_endpoints_need_the_client(
    keys: None, clients: list[str], name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that changes the address of AWS's service is left to botocore's client."""
    monkeypatch.setenv(name, value)
    url = _bucket().url("a")
    assert "models.s3.amazonaws.com" != urlsplit(url).netloc
    assert {"s3"} == set(clients)


@pytest.mark.parametrize(
    ("config", "host"),
    [
        ("endpoint_url = http://lab.example.com\n", "lab.example.com"),
        ("services = lab\n[services lab]\ns3 =\n  endpoint_url = http://lab.example.com\n", "lab.example.com"),
        ("s3 =\n  use_accelerate_endpoint = true\n", "models.s3-accelerate.amazonaws.com"),
        ("s3 =\n  addressing_style = path\n", "s3.amazonaws.com"),
        ("use_fips_endpoint = true\n", "models.s3-fips.us-east-1.amazonaws.com"),
    ],
)
def test_endpoints_of_a_profile_need_the_client(
    keys: None, aws_config: Path, clients: list[str], config: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile that changes the address of the service is left to botocore's client."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    aws_config.write_text(f"[default]\n{config}")
    assert host == urlsplit(_bucket().url("a")).netloc
    assert {"s3"} == set(clients)


@pytest.mark.parametrize(
    ("bucket", "changes"),
    [
        ("my.models", {}),
        ("models", {"s3_region": "cn-north-1"}),
        ("models", {"s3_addressing": "path"}),
        ("models", {"s3_endpoint": "https://s3.dualstack.eu-west-1.amazonaws.com"}),
        ("models", {"s3_endpoint": "http://minio:9000/prefix"}),
    ],
)
def test_unusual_addresses_need_the_client(
    keys: None, clients: list[str], bucket: str, changes: dict[str, str | bool]
) -> None:
    """Buckets and endpoints whose URLs have another form are left to botocore's client."""
    _bucket(changes, bucket).url("a")
    assert {"s3"} == set(clients)


@pytest.mark.parametrize("bucket", ["models--use1-az4--x-s3", "models-s3alias", "Models"])
def test_special_buckets_need_the_client(keys: None, bucket: str) -> None:
    """Names of directory buckets, of access points and with capitals have no signer."""
    assert UrlSigner.for_bucket(bucket, DEFAULT_REGION, StorageSettings(), Session()) is None
