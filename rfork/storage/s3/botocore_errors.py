"""Translates errors of botocore to rfork errors with one-line messages and without secrets."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

import botocore.exceptions as aws
from botocore.exceptions import BotoCoreError, ClientError

from rfork.errors import RforkError, SettingsError, StorageAccessDenied, StorageCorrupt, StorageError
from rfork.storage.s3.errors import clean_message, error_of_code

CREDENTIALS_HINT: Final = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_SKIP_SIGNATURE=true for public buckets"
)


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


def _service(error: BotoCoreError) -> str:
    # Only this part of botocore's URL: the rest may contain a secret.
    parts = urlsplit(str(error.kwargs.get("endpoint_url", "")))
    return f"the service at {parts.scheme}://{parts.netloc}" if parts.netloc else "the service"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
