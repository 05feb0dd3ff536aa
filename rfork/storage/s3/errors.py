"""Translates errors of S3 services to rfork errors with one-line messages and without secrets."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Final

from rfork.errors import (
    StorageAccessDenied,
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


def clean_message(message: str) -> str:
    """Return a service's message as one line of limited length."""
    return " ".join(message.split())[:200].rstrip(".")
