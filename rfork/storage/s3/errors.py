"""Translates errors of S3 services and of botocore to rfork errors with one-line messages and without secrets."""

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

MISSING_CODES: Final = frozenset({"NoSuchBucket", "NoSuchKey", "NoSuchVersion", "404", "NotFound"})
DENIED_CODES: Final = frozenset(
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
FULL_CODES: Final = frozenset(
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
WRONG_REGION_CODES: Final = frozenset(
    {
        "301",
        "AuthorizationHeaderMalformed",
        "AuthorizationQueryParametersError",
        "IllegalLocationConstraintException",
        "PermanentRedirect",
    }
)
"""Codes for a bucket in another region; the first of them also if the signature reveals it."""
HINTS: Final = {
    "AuthorizationHeaderMalformed": "set AWS_REGION to the bucket's region",
    "AuthorizationQueryParametersError": "set AWS_REGION to the bucket's region",
    "ExpiredToken": "renew the credentials",
    "InvalidObjectState": "the object is archived: restore it first",
    "PermanentRedirect": "set AWS_REGION to the bucket's region",
    "RequestTimeTooSkewed": "correct this machine's clock",
}
CREDENTIALS_HINT: Final = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_SKIP_SIGNATURE=true for public buckets"
)

_STORAGE_FULL_PATTERN = re.compile(
    r"no space left|not enough space|disk full|quota|no (?:free|writable) volumes", re.IGNORECASE
)
_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9.]{1,80})\s*</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]{1,1000})</Message>")


class S3ServiceError(StorageError):
    """A response that the storage code handles; for all other code it is a StorageError."""

    @property
    def kind(self) -> str:
        """See `RforkError`."""
        return StorageError.__name__


class WrongRegion(S3ServiceError):
    """The bucket is in another region."""


class ConditionFailed(S3ServiceError):
    """The object already exists and must not be replaced."""


class ConcurrentWriteConflict(S3ServiceError):
    """Another writer is creating or removing the object at the moment."""


class Unsupported(S3ServiceError):
    """The service does not support the request."""


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
    """Return the error for an XML error document; None if it is not one of S3's."""
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if code is None:
        return None
    detail = html.unescape(message.group(1).decode(errors="replace")) if message else ""
    return error_of_code(uri, code.group(1).decode(), detail, status)


def error_of_code(uri: str, code: str, message: str, status: int) -> StorageError:
    """Return the error for an S3 error code."""
    # Quote only this part of the response: others may contain a signature.
    detail = clean_message(message)
    description = f"{detail} ({code})" if detail and detail != code else code
    hint = HINTS.get(code, "")
    if code in MISSING_CODES:
        what = "no such bucket" if code == "NoSuchBucket" else "no such object"
        return StorageNotFound(f"{uri}: {what}")
    if code in WRONG_REGION_CODES or status == 301:
        return WrongRegion(f"{uri}: the bucket is in another region: {description}", hint=hint)
    if code in HANDLED_ERRORS:
        return HANDLED_ERRORS[code](f"{uri}: the service refused the request: {description}")
    if code in FULL_CODES or status == 507 or (status >= 500 and _STORAGE_FULL_PATTERN.search(detail)):
        return StorageFull(f"{uri}: no space left: {description}")
    if code in DENIED_CODES or status in (401, 403):
        return StorageAccessDenied(f"{uri}: access denied: {description}", hint=hint)
    return StorageError(f"{uri}: the service refused the request: {description}", hint=hint)


def error_code(error: ClientError) -> str:
    """Return the service's error code, or the status if there was no body (HEAD)."""
    return str(error.response.get("Error", {}).get("Code", ""))


def http_status(error: ClientError) -> int:
    """Return the HTTP status of an error; 0 if there is none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def to_storage_error(uri: str, error: ClientError | BotoCoreError | ValueError) -> RforkError:
    """Return the rfork error for an error of botocore about `uri`."""
    match error:
        case ClientError():
            message = str(error.response.get("Error", {}).get("Message", ""))
            error_for_code = error_of_code(uri, error_code(error), message, http_status(error))
            if error.operation_name.startswith("AssumeRole"):
                return StorageAccessDenied(
                    f"{uri}: AWS issues no credentials: {clean_message(message)} ({error_code(error)})"
                )
            return error_for_code
        case aws.NoCredentialsError() | aws.NoAuthTokenError():
            return StorageAccessDenied(f"{uri}: no credentials found", hint=CREDENTIALS_HINT)
        case (
            aws.PartialCredentialsError()
            | aws.CredentialRetrievalError()
            | aws.TokenRetrievalError()
            | aws.SSOError()
            | aws.RefreshWithMFAUnsupportedError()
            | aws.UnauthorizedSSOTokenError()
        ):
            return StorageAccessDenied(f"{uri}: {_one_line(error)}", hint=CREDENTIALS_HINT)
        case aws.SSLError():
            return StorageError(
                f"{uri}: the service's certificate is not trusted, or TLS failed",
                hint="set SSL_CERT_FILE to the certificate authorities of the storage server",
            )
        case aws.ReadTimeoutError() | aws.ConnectTimeoutError():
            return StorageError(f"{uri}: {_service(error)} did not respond in time")
        case aws.UnseekableStreamError():
            return StorageError(f"{uri}: the upload was cancelled")
        case aws.ConnectionError() | aws.HTTPClientError():
            return StorageError(f"{uri}: {_service(error)} cannot be reached")
        case aws.MetadataRetrievalError():
            return StorageAccessDenied(f"{uri}: no credentials received: {_one_line(error)}", hint=CREDENTIALS_HINT)
        case aws.FlexibleChecksumError() | aws.ChecksumError():
            return StorageCorrupt(f"{uri}: the received data does not match its checksum")
        case aws.PaginationError():
            return StorageError(f"{uri}: the service returned an invalid listing: {_one_line(error)}")
        case aws.ProfileNotFound():
            return SettingsError(_one_line(error), hint="check AWS_PROFILE")
        case aws.ParamValidationError():
            return SettingsError(f"{uri} cannot be requested: {_one_line(error)}")
        case _:
            hint = "e.g. AWS_ENDPOINT_URL=https://s3.example.com" if "endpoint" in str(error) else ""
            return SettingsError(f"cannot use S3 for {uri}: {_one_line(error)}", hint=hint)


def clean_message(message: str) -> str:
    """Return a service's message as one line of limited length."""
    return " ".join(message.split())[:200].rstrip(".")


def _service(error: BotoCoreError) -> str:
    # Only this part of botocore's URL: the rest may contain a secret.
    parts = urlsplit(str(error.kwargs.get("endpoint_url", "")))
    return f"the service at {parts.scheme}://{parts.netloc}" if parts.netloc else "the service"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
