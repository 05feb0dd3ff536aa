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
    StorageAccessDenied,
    StorageCorrupt,
    StorageError,
    StorageFull,
    StorageNotFound,
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

_STORAGE_FULL_PATTERN = re.compile(
    r"no space left|not enough space|disk full|quota|no (?:free|writable) volumes", re.IGNORECASE
)
_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9.]{1,80})\s*</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]{1,1000})</Message>")


class S3ServiceError(StorageError):
    """A refusal that storage itself acts upon; to all others it is a StorageError."""

    @property
    def kind(self) -> str:
        """See `RforkError`."""
        return StorageError.__name__


class WrongRegion(S3ServiceError):
    """The bucket is in another region than the one asked."""


class ConditionFailed(S3ServiceError):
    """An object is there that was not to be replaced."""


class ConcurrentWriteConflict(S3ServiceError):
    """Another writer is just about to make or remove the object."""


class Unsupported(S3ServiceError):
    """The service does not know what was asked of it."""


HANDLED_ERRORS: Final[Mapping[str, type[S3ServiceError]]] = {
    "412": ConditionFailed,
    "PreconditionFailed": ConditionFailed,
    "409": ConcurrentWriteConflict,
    "ConditionalRequestConflict": ConcurrentWriteConflict,
    "OperationAborted": ConcurrentWriteConflict,
    "501": Unsupported,
    "NotImplemented": Unsupported,
    "UnsupportedOperation": Unsupported,
}


def explain(uri: str, status: int, text: bytes) -> StorageError | None:
    """What an XML document that came with a status means; None where it is none of S3's."""
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if code is None:
        return None
    detail = html.unescape(message.group(1).decode(errors="replace")) if message else ""
    return refusal(uri, code.group(1).decode(), detail, status)


def refusal(uri: str, code: str, message: str, status: int) -> StorageError:
    """The error that a code of S3's means."""
    # Of a service's own words only these: a signature may stand in others.
    detail = _clean_message(message)
    words = f"{detail} ({code})" if detail and detail != code else code
    hint = HINTS.get(code, "")
    if code in MISSING:
        what = "there is no such bucket" if code == "NoSuchBucket" else "there is no such object"
        return StorageNotFound(f"{uri}: {what}")
    if code in ELSEWHERE or status == 301:
        return WrongRegion(f"{uri}: the bucket is in another region: {words}", hint=hint)
    if code in HANDLED_ERRORS:
        return HANDLED_ERRORS[code](f"{uri}: the service refuses: {words}")
    if code in FULL or status == 507 or (status >= 500 and _STORAGE_FULL_PATTERN.search(detail)):
        return StorageFull(f"{uri}: no room is left: {words}")
    if code in DENIED or status in (401, 403):
        return StorageAccessDenied(f"{uri}: access denied: {words}", hint=hint)
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
                return StorageAccessDenied(
                    f"{uri}: AWS gives no credentials: {_clean_message(message)} ({code_of(error)})"
                )
            return meant
        case aws.NoCredentialsError() | aws.NoAuthTokenError():
            return StorageAccessDenied(f"{uri}: no credentials were found", hint=CREDENTIALS_HINT)
        case (
            aws.PartialCredentialsError()
            | aws.CredentialRetrievalError()
            | aws.TokenRetrievalError()
            | aws.SSOError()
            | aws.RefreshWithMFAUnsupportedError()
            | aws.UnauthorizedSSOTokenError()
        ):
            return StorageAccessDenied(f"{uri}: {_line(error)}", hint=CREDENTIALS_HINT)
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
            return StorageAccessDenied(f"{uri}: no credentials were given: {_line(error)}", hint=CREDENTIALS_HINT)
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


def _clean_message(message: str) -> str:
    return " ".join(message.split())[:200].rstrip(".")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
