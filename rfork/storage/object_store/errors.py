"""Translates obstore's errors to rfork errors with one-line messages and without possible secrets."""

from __future__ import annotations

import re
from typing import Final

from obstore import exceptions as cloud

from rfork.errors import (
    RforkError,
    SettingsError,
    StorageAccessDenied,
    StorageChanged,
    StorageError,
    StorageFull,
    StorageNotFound,
)

HINT: Final = (
    "set GOOGLE_SERVICE_ACCOUNT or application default credentials for gs://, "
    "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY for az://"
)
# A shared access signature is part of the URL.
_URL = re.compile(r"(https?://[^\s?\"')]*)[^\s\"')]*")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,80})</Code>")
_STATUS = re.compile(r"\b(?:status(?: code)?:?|error with status) ([1-5][0-9]{2})\b", re.IGNORECASE)
_NO_CREDENTIALS = re.compile(r"metadata\.google\.internal|169\.254\.169\.254|credential", re.IGNORECASE)


def is_retryable(error: Exception) -> bool:
    """Return True if a retry may succeed after this error."""
    if isinstance(error, FileNotFoundError):
        return False
    if isinstance(error, OSError):
        return True
    status = _status(str(error))
    return isinstance(error, cloud.GenericError) and (status is None or status in (408, 429) or status >= 500)


def to_storage_error(uri: str, error: BaseException) -> RforkError:
    """Return the rfork error for an error of obstore about `uri`."""
    text = str(error)
    description = _one_line(text)
    match error:
        case FileNotFoundError():
            code = _CODE.search(text)
            missing = "bucket" if code and code.group(1) in ("NoSuchBucket", "ContainerNotFound") else "object"
            return StorageNotFound(f"{uri}: no such {missing}")
        case cloud.PreconditionError():
            return StorageChanged(f"{uri} was replaced during the read")
        case cloud.PermissionDeniedError() | cloud.UnauthenticatedError():
            return StorageAccessDenied(f"{uri}: access denied: {description}", hint=HINT)
        case cloud.UnknownConfigurationKeyError() | cloud.InvalidPathError() | ValueError():
            return SettingsError(f"{uri} cannot be used: {description}")
    status = _status(text)
    if status == 404:
        return StorageNotFound(f"{uri}: no such bucket")
    if status in (401, 403):
        return StorageAccessDenied(f"{uri}: access denied: {description}", hint=HINT)
    if status == 507 or "QuotaExceeded" in text:
        return StorageFull(f"{uri}: no space left: {description}")
    if status is None and _NO_CREDENTIALS.search(text):
        return StorageAccessDenied(f"{uri}: no usable credentials found: {description}", hint=HINT)
    return StorageError(f"{uri}: {description}")


def _status(text: str) -> int | None:
    match = _STATUS.search(text)
    return int(match.group(1)) if match else None


def _one_line(text: str) -> str:
    # obstore appends debug output after an empty line.
    line = " ".join(text.partition("\n\nDebug source:")[0].split())
    return _URL.sub(r"\1", line)[:300]
