"""Presigned URLs for objects of a bucket that is configured by environment variables alone, without botocore.

botocore takes 0.15 s to import and 0.2 s to create a client (Intel Xeon): a load of 0.28 GB took twice as long as with
this module. It is used for everything else: profiles, roles and tokens, listings and writes. Signatures are AWS's
version 4 for query parameters; `tests/unit/storage/s3/test_url_signer.py` compares the URLs with botocore's.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

from typing_extensions import Self

from rfork.settings import StorageSettings

URL_TTL_S: Final = 900
"""Validity of a presigned URL in seconds; each is used for only a fraction of it."""
DEFAULT_REGION: Final = "us-east-1"
_CONFIG_FILES: Final = (
    ("AWS_CONFIG_FILE", "~/.aws/config"),
    ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
)
"""Variables of botocore's files, and the default paths. If one of these files exists, it may configure anything."""
_KNOWN_VARIABLES: Final = frozenset(
    {
        "AWS_ACCESS_KEY_ID",
        "AWS_CA_BUNDLE",
        "AWS_DEFAULT_REGION",
        "AWS_EC2_METADATA_DISABLED",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "AWS_REGION",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_SKIP_SIGNATURE",
        *(variable for variable, _ in _CONFIG_FILES),
    }
)
"""Variables whose meaning for a read is known here; with any other one, such as AWS_PROFILE, botocore is used."""
_REGION = re.compile(r"(af|ap|ca|eu|il|me|mx|sa|us)-[a-z]+-[0-9]")
"""Regions of the AWS partition whose hosts end in amazonaws.com."""
_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_SPECIAL_BUCKET = re.compile(r"xn--|sthree-|amzn-s3-demo-|.*(?:-s3alias|--ol-s3|--x-s3|--table-s3)$")
"""Names with a meaning, such as directory buckets: their requests differ."""


@dataclass(frozen=True, slots=True)
class UrlSigner:
    """Signs GET requests for objects below `base`, a URL that ends with a slash. Without an access key, URLs are
    unsigned.
    """

    base: str
    region: str
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    ca_file: Path | None = None

    @classmethod
    def from_variables(cls, bucket: str, settings: StorageSettings, variables: Mapping[str, str]) -> Self | None:
        """Return the signer for a bucket; None if more than these settings and AWS's `variables` may configure S3."""
        if not variables.keys() <= _KNOWN_VARIABLES or any(map(_exists, _config_paths(variables))):
            return None
        region = settings.s3_region or DEFAULT_REGION
        base = _base_url(bucket, settings, region)
        access_key, secret_key = variables.get("AWS_ACCESS_KEY_ID", ""), variables.get("AWS_SECRET_ACCESS_KEY", "")
        if base is None or not (settings.s3_anonymous or (access_key and secret_key)):
            return None
        ca = variables.get("AWS_CA_BUNDLE") or settings.ca
        ca_file = Path(ca) if ca else None
        if settings.s3_anonymous:
            return cls(base, region, ca_file=ca_file)
        return cls(base, region, access_key, secret_key, variables.get("AWS_SESSION_TOKEN", ""), ca_file)

    def url(self, key: str, now: datetime | None = None) -> str:
        """Return a URL that allows anyone to read an object for `URL_TTL_S` seconds: a secret."""
        url = self.base + quote(key, safe="/~")
        if not self.access_key:
            return url
        parts = urlsplit(url)
        stamp = (now or datetime.now(timezone.utc)).strftime("%Y%m%dT%H%M%SZ")
        scope = f"{stamp[:8]}/{self.region}/s3/aws4_request"
        fields = {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Credential": f"{self.access_key}/{scope}",
            "X-Amz-Date": stamp,
            "X-Amz-Expires": str(URL_TTL_S),
            "X-Amz-SignedHeaders": "host",
            **({"X-Amz-Security-Token": self.token} if self.token else {}),
        }
        query = "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in sorted(fields.items()))
        request = f"GET\n{parts.path}\n{query}\nhost:{parts.netloc}\n\nhost\nUNSIGNED-PAYLOAD"
        message = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        signing_key = f"AWS4{self.secret_key}".encode()
        for part in scope.split("/"):
            signing_key = hmac.digest(signing_key, part.encode(), "sha256")
        return f"{url}?{query}&X-Amz-Signature={hmac.digest(signing_key, message.encode(), 'sha256').hex()}"


def _config_paths(variables: Mapping[str, str]) -> list[str]:
    return [variables.get(name) or default for name, default in _CONFIG_FILES]


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))


def _base_url(bucket: str, settings: StorageSettings, region: str) -> str | None:
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
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or parts.path not in ("", "/") or parts.query or "@" in parts.netloc:
        return None
    # AWS's own hosts have more forms than one: FIPS, dual stack, acceleration.
    if not host or "amazonaws" in host:
        return None
    name = f"[{host}]" if ":" in host else host
    # The signature covers the Host field, in which clients omit the default port.
    netloc = name if port in (None, 443 if parts.scheme == "https" else 80) else f"{name}:{port}"
    if addressing == "virtual" and not _is_address(host):
        return f"{parts.scheme}://{bucket}.{netloc}/"
    return f"{parts.scheme}://{netloc}/{bucket}/"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
