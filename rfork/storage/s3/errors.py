"""What an S3 service's refusals, and botocore's own, mean: in rfork's errors, one line each, no secrets."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

import botocore.exceptions as aws
from botocore.exceptions import BotoCoreError, ClientError

from rfork.errors import (
    RforkError,
    SettingsError,
    StorageCorrupt,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageMissing,
)

MISSING: Final = frozenset({"NoSuchBucket", "NoSuchKey", "NoSuchVersion", "404", "NotFound"})
DENIED: Final = frozenset(
    {
        "403",
        "AccessDenied",
        "AccessDeniedException",
        "AccountProblem",
        "AllAccessDisabled",
        "ExpiredToken",
        "ExpiredTokenException",
        "Forbidden",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidIdentityToken",
        "InvalidObjectState",
        "InvalidSecurity",
        "InvalidToken",
        "NotSignedUp",
        "RequestExpired",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "UnauthorizedAccess",
    }
)
FULL: Final = frozenset(
    {
        "507",
        "InsufficientCapacity",
        "InsufficientStorage",
        "NoSpaceLeft",
        "QuotaExceeded",
        "StorageFull",
        "XMinioAdminBucketQuotaExceeded",
        "XMinioStorageFull",
    }
)
ELSEWHERE: Final = frozenset(
    {
        "301",
        "AuthorizationHeaderMalformed",
        "AuthorizationQueryParametersError",
        "IllegalLocationConstraintException",
        "PermanentRedirect",
    }
)
"""What AWS answers in a region that the bucket does not lie in, the first two where a signature says so."""
HINTS: Final = {
    "AuthorizationHeaderMalformed": "RFORK_STORAGE_S3_REGION names the region that the bucket is in",
    "AuthorizationQueryParametersError": "RFORK_STORAGE_S3_REGION names the region that the bucket is in",
    "ExpiredToken": "get new credentials",
    "InvalidObjectState": "the object is in an archive: restore it first",
    "PermanentRedirect": "RFORK_STORAGE_S3_REGION names the region that the bucket is in",
    "RequestTimeTooSkewed": "set this machine's clock",
}

CREDENTIALS_HINT: Final = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or RFORK_STORAGE_S3_PROFILE; "
    "RFORK_STORAGE_S3_ANONYMOUS=1 for public buckets"
)

_NO_ROOM = re.compile(
    r"no space left|not enough space|disk full|quota|no (?:free|writable) volumes", re.IGNORECASE
)
_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9.]{1,80})\s*</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]{1,1000})</Message>")


class Told(StorageError):
    """A refusal that storage itself acts upon; to all others it is a StorageError."""

    @property
    def kind(self) -> str:
        """See `RforkError`."""
        return StorageError.__name__


class Elsewhere(Told):
    """The bucket is in another region than the one asked."""


class ConditionFailed(Told):
    """An object is there that was not to be replaced."""


class Conflict(Told):
    """Another writer is just about to make or remove the object."""


class Unsupported(Told):
    """The service does not know what was asked of it."""


ACTED_UPON: Final[Mapping[str, type[Told]]] = {
    "412": ConditionFailed,
    "PreconditionFailed": ConditionFailed,
    "409": Conflict,
    "ConditionalRequestConflict": Conflict,
    "OperationAborted": Conflict,
    "501": Unsupported,
    "NotImplemented": Unsupported,
    "UnsupportedOperation": Unsupported,
}


def explain(uri: str, status: int, text: bytes) -> StorageError | None:
    """What an XML document that came with a status means; None where it is none of S3's."""
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if code is None:
        return None
    said = html.unescape(message.group(1).decode(errors="replace")) if message else ""
    return refusal(uri, code.group(1).decode(), said, status)


def refusal(uri: str, code: str, message: str, status: int) -> StorageError:
    """The error that a code of S3's means."""
    # Of a service's own words only these: a signature may stand in others.
    said = _said(message)
    words = f"{said} ({code})" if said and said != code else code
    hint = HINTS.get(code, "")
    if code in MISSING:
        what = "there is no such bucket" if code == "NoSuchBucket" else "there is no such object"
        return StorageMissing(f"{uri}: {what}")
    if code in ELSEWHERE or status == 301:
        return Elsewhere(f"{uri}: the bucket is in another region: {words}", hint=hint)
    if code in ACTED_UPON:
        return ACTED_UPON[code](f"{uri}: the service refuses: {words}")
    if code in FULL or status == 507 or (status >= 500 and _NO_ROOM.search(said)):
        return StorageFull(f"{uri}: no room is left: {words}")
    if code in DENIED or status in (401, 403):
        return StorageDenied(f"{uri}: access denied: {words}", hint=hint)
    return StorageError(f"{uri}: the service refuses: {words}", hint=hint)


def code_of(error: ClientError) -> str:
    """The code a service gave, or the status where there was no text (as of HEAD)."""
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: ClientError) -> int:
    """The HTTP status of a refusal; 0 where there is none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def failure(uri: str, error: ClientError | BotoCoreError | ValueError) -> RforkError:
    """The error that one of botocore's means, for what was asked of `uri`."""
    match error:
        case ClientError():
            message = str(error.response.get("Error", {}).get("Message", ""))
            meant = refusal(uri, code_of(error), message, status_of(error))
            if error.operation_name.startswith("AssumeRole"):
                return StorageDenied(f"{uri}: AWS gives no credentials: {_said(message)} ({code_of(error)})")
            return meant
        case aws.NoCredentialsError() | aws.NoAuthTokenError():
            return StorageDenied(f"{uri}: no credentials were found", hint=CREDENTIALS_HINT)
        case (
            aws.PartialCredentialsError()
            | aws.CredentialRetrievalError()
            | aws.TokenRetrievalError()
            | aws.SSOError()
            | aws.RefreshWithMFAUnsupportedError()
            | aws.UnauthorizedSSOTokenError()
        ):
            return StorageDenied(f"{uri}: {_line(error)}", hint=CREDENTIALS_HINT)
        case aws.SSLError():
            return StorageError(
                f"{uri}: the service's certificate is not trusted, or TLS failed",
                hint="RFORK_STORAGE_CA names the authorities that storage is checked by",
            )
        case aws.ReadTimeoutError() | aws.ConnectTimeoutError():
            return StorageError(f"{uri}: {_service(error)} did not answer in time")
        case aws.UnseekableStreamError():
            return StorageError(f"{uri}: the upload was given up")
        case aws.ConnectionError() | aws.HTTPClientError():
            return StorageError(f"{uri}: {_service(error)} cannot be reached")
        case aws.MetadataRetrievalError():
            return StorageDenied(f"{uri}: no credentials were given: {_line(error)}", hint=CREDENTIALS_HINT)
        case aws.FlexibleChecksumError() | aws.ChecksumError():
            return StorageCorrupt(f"{uri}: what the service sent does not match its checksum")
        case aws.PaginationError():
            return StorageError(f"{uri}: the service's list makes no sense: {_line(error)}")
        case aws.ProfileNotFound():
            return SettingsError(_line(error), hint="RFORK_STORAGE_S3_PROFILE or AWS_PROFILE names it")
        case aws.ParamValidationError():
            return SettingsError(f"{uri} cannot be asked for: {_line(error)}")
        case _:
            hint = "e.g. RFORK_STORAGE_S3_ENDPOINT=https://s3.example.com" if "endpoint" in str(error) else ""
            return SettingsError(f"S3 cannot be used for {uri}: {_line(error)}", hint=hint)


def _service(error: BotoCoreError) -> str:
    # Of the URL that botocore names no more than this: the rest may hold a secret.
    parts = urlsplit(str(error.kwargs.get("endpoint_url", "")))
    return f"the service at {parts.scheme}://{parts.netloc}" if parts.netloc else "the service"


def _said(message: str) -> str:
    return " ".join(message.split())[:200].rstrip(".")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
