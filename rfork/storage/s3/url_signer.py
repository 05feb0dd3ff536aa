"""Presigned URLs for the objects of one bucket, from botocore's credentials and signatures, without its client.

Creating a client takes 0.1 to 0.2 s, because botocore parses its service models and endpoint rules: about as long as
reading 0.3 GB. A URL needs them only if the bucket's address has an unusual form.
`tests/unit/storage/s3/test_url_signer.py` compares the URLs with the client's.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import NoCredentialsError
from botocore.session import Session
from typing_extensions import Self

from rfork.settings import StorageSettings

URL_TTL_S: Final = 900
"""Validity of a presigned URL in seconds; each is used for only a fraction of it."""
DEFAULT_REGION: Final = "us-east-1"
_CLIENT_VARIABLES: Final = (
    "auth_scheme_preference",
    "data_path",
    "s3",
    "sigv4a_signing_region_set",
    "use_dualstack_endpoint",
    "use_fips_endpoint",
)
"""Variables of botocore that change a bucket's address or the signature's type."""
_REGION = re.compile(r"(af|ap|ca|eu|il|me|mx|sa|us)-[a-z]+-[0-9]")
"""Regions of the AWS partition whose hosts end in amazonaws.com."""
_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_SPECIAL_BUCKET = re.compile(r"xn--|sthree-|amzn-s3-demo-|.*(?:-s3alias|--ol-s3|--x-s3|--table-s3)$")
"""Names with a meaning, such as directory buckets: their requests differ."""


@dataclass(frozen=True, slots=True)
class UrlSigner:
    """Signs GET requests for objects below `base`, a URL that ends with a slash. Thread-safe."""

    base: str
    region: str
    credentials: Credentials | None
    """The credentials that botocore found; it refreshes temporary ones."""
    anonymous: bool

    @classmethod
    def for_bucket(cls, bucket: str, region: str, settings: StorageSettings, session: Session) -> Self | None:
        """Return the signer for a bucket; None if its address depends on more than the region and rfork's settings.

        Raises botocore's errors for unusable credentials or profiles.
        """
        base = _base_url(bucket, region, settings)
        if base is None or _needs_client(session, settings):
            return None
        credentials = None if settings.s3_anonymous else session.get_credentials()
        return cls(base, region, credentials, settings.s3_anonymous)

    def url(self, key: str) -> str:
        """Return a URL that allows anyone to read an object for `URL_TTL_S` seconds: a secret.

        Raises botocore's errors for missing credentials and failed refreshes.
        """
        url = self.base + quote(key, safe="/~")
        if self.anonymous:
            return url
        if self.credentials is None:
            raise NoCredentialsError
        request = AWSRequest("GET", url)
        credentials = self.credentials.get_frozen_credentials()
        S3SigV4QueryAuth(credentials, "s3", self.region, URL_TTL_S).add_auth(request)
        return str(request.url)


def _needs_client(session: Session, settings: StorageSettings) -> bool:
    """Return True if AWS's files or variables may configure another address or signature."""
    if any(session.get_config_variable(name) for name in _CLIENT_VARIABLES):
        return True
    if session.get_config_variable("defaults_mode") != "legacy":
        return True
    return settings.s3_endpoint is None and not {"endpoint_url", "services"}.isdisjoint(session.get_scoped_config())


def _base_url(bucket: str, region: str, settings: StorageSettings) -> str | None:
    """Return the URL of a bucket that is addressed in the usual form; None for any other."""
    addressing = settings.s3_addressing
    if not _BUCKET.fullmatch(bucket) or _SPECIAL_BUCKET.match(bucket):
        return None
    if settings.s3_endpoint is None:
        if addressing == "path" or not _REGION.fullmatch(region):
            return None
        host = "s3.amazonaws.com" if region == DEFAULT_REGION else f"s3.{region}.amazonaws.com"
        return f"https://{bucket}.{host}/"
    try:
        parts = urlsplit(settings.s3_endpoint)
        host, _ = parts.hostname or "", parts.port  # raises ValueError for an invalid port
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or parts.path not in ("", "/") or parts.query or "@" in parts.netloc:
        return None
    # AWS's own hosts have more forms than one: FIPS, dual stack, acceleration.
    if not host or "amazonaws" in host:
        return None
    if addressing == "virtual" and not _is_address(host):
        return f"{parts.scheme}://{bucket}.{parts.netloc}/"
    return f"{parts.scheme}://{parts.netloc}/{bucket}/"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
