"""Mapping of refusals of S3 services and of botocore's errors to rfork's errors."""

from __future__ import annotations

import pytest

pytest.importorskip("botocore", reason="NO boto3: S3 IS NOT TESTED")

from botocore import exceptions as aws
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
from rfork.storage.s3.errors import (
    ConcurrentWriteConflict,
    ConditionFailed,
    Unsupported,
    WrongRegion,
    explain,
    to_storage_error,
)

URI = "s3://models/llama/a.bin"


def _document(code: str, message: str) -> bytes:
    """Return an error document as services write it, with elements that must not be shown."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message>"
        "<AWSAccessKeyId>AKIASECRET</AWSAccessKeyId><StringToSign>secret</StringToSign></Error>"
    ).encode()


@pytest.mark.parametrize(
    ("status", "code", "message", "error", "line"),
    [
        (404, "NoSuchKey", "The key does not exist.", StorageNotFound, "no such object"),
        (404, "NoSuchBucket", "No such bucket", StorageNotFound, "no such bucket"),
        (
            403,
            "AccessDenied",
            "Access Denied.",
            StorageAccessDenied,
            "access denied: Access Denied (AccessDenied)",
        ),
        (
            403,
            "SignatureDoesNotMatch",
            "It does not match",
            StorageAccessDenied,
            "access denied: It does not match (SignatureDoesNotMatch)",
        ),
        (403, "InvalidAccessKeyId", "", StorageAccessDenied, "access denied: InvalidAccessKeyId"),
        (400, "ExpiredToken", "Too old", StorageAccessDenied, "access denied: Too old (ExpiredToken)"),
        (
            403,
            "RequestTimeTooSkewed",
            "The difference is too large",
            StorageAccessDenied,
            "access denied: The difference is too large (RequestTimeTooSkewed)",
        ),
        (403, "UnknownCode", "No", StorageAccessDenied, "access denied: No (UnknownCode)"),
        (
            400,
            "AuthorizationQueryParametersError",
            "the region &#39;a&#39; is wrong; expecting &#39;b&#39;",
            WrongRegion,
            "the bucket is in another region: the region 'a' is wrong; expecting 'b' "
            "(AuthorizationQueryParametersError)",
        ),
        (507, "XMinioStorageFull", "Full", StorageFull, "no space left: Full (XMinioStorageFull)"),
        (403, "QuotaExceeded", "Quota", StorageFull, "no space left: Quota (QuotaExceeded)"),
        (
            500,
            "InternalError",
            "write: no space left on device",
            StorageFull,
            "no space left: write: no space left on device (InternalError)",
        ),
        (412, "PreconditionFailed", "", ConditionFailed, "the service refused the request: PreconditionFailed"),
        (
            409,
            "ConditionalRequestConflict",
            "",
            ConcurrentWriteConflict,
            "the service refused the request: ConditionalRequestConflict",
        ),
        (501, "NotImplemented", "", Unsupported, "the service refused the request: NotImplemented"),
        (
            400,
            "InvalidRange",
            "line\nbreak",
            StorageError,
            "the service refused the request: line break (InvalidRange)",
        ),
    ],
)
def test_s3_error_codes_are_mapped_to_rfork_errors(
    status: int, code: str, message: str, error: type[StorageError], line: str
) -> None:
    """Each S3 code is mapped to its error, in one line without the signature."""
    found = explain(URI, status, _document(code, message))
    assert error is type(found)
    assert f"{URI}: {line}" == str(found)


@pytest.mark.parametrize("text", [b"", b"<html>404</html>", b"<Code></Code>", b"\xff" * 100])
def test_other_texts_are_ignored(text: bytes) -> None:
    """If a text is no S3 error document, the status decides."""
    assert explain(URI, 404, text) is None


def test_retryable_errors_are_plain_storage_errors_in_reports() -> None:
    """Reports and metrics show them as general storage errors."""
    assert ["StorageError"] * 2 == [error("x").kind for error in (WrongRegion, ConcurrentWriteConflict)]


SECRET_URL = "https://s3.example.com/models/a?X-Amz-Signature=secret"


def _refused(
    code: str, status: int, operation: str = "HeadObject", message: str = "message of the service"
) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}},
        operation,
    )


@pytest.mark.parametrize(
    ("raised", "error", "line"),
    [
        (_refused("404", 404), StorageNotFound, f"{URI}: no such object"),
        (_refused("403", 403), StorageAccessDenied, f"{URI}: access denied: message of the service (403)"),
        (_refused("507", 507), StorageFull, f"{URI}: no space left: message of the service (507)"),
        (
            _refused("SlowDown", 503),
            StorageError,
            f"{URI}: the service refused the request: message of the service (SlowDown)",
        ),
        (
            _refused("InvalidIdentityToken", 400, "AssumeRoleWithWebIdentity"),
            StorageAccessDenied,
            f"{URI}: AWS issues no credentials: message of the service (InvalidIdentityToken)",
        ),
        (
            _refused("AccessDenied", 403, "AssumeRole", "message\n  of the service."),
            StorageAccessDenied,
            f"{URI}: AWS issues no credentials: message of the service (AccessDenied)",
        ),
        (aws.NoCredentialsError(), StorageAccessDenied, f"{URI}: no credentials found"),
        (
            aws.PartialCredentialsError(provider="env", cred_var="AWS_SECRET_ACCESS_KEY"),
            StorageAccessDenied,
            f"{URI}: Partial credentials found in env, missing: AWS_SECRET_ACCESS_KEY",
        ),
        (
            aws.EndpointConnectionError(endpoint_url=SECRET_URL, error="refused"),
            StorageError,
            f"{URI}: the service at https://s3.example.com cannot be reached",
        ),
        (
            aws.ConnectionClosedError(endpoint_url=SECRET_URL),
            StorageError,
            f"{URI}: the service at https://s3.example.com cannot be reached",
        ),
        (
            aws.ReadTimeoutError(endpoint_url=SECRET_URL),
            StorageError,
            f"{URI}: the service at https://s3.example.com did not respond in time",
        ),
        (aws.HTTPClientError(error=SECRET_URL), StorageError, f"{URI}: the service cannot be reached"),
        (
            aws.SSLError(endpoint_url=SECRET_URL, error="self-signed"),
            StorageError,
            f"{URI}: the service's certificate is not trusted, or TLS failed",
        ),
        (
            aws.ProfileNotFound(profile="mine"),
            SettingsError,
            "The config profile (mine) could not be found",
        ),
        (
            aws.ParamValidationError(report='Invalid bucket name "M_"'),
            SettingsError,
            f'{URI} cannot be requested: Parameter validation failed: Invalid bucket name "M_"',
        ),
        (
            aws.MetadataRetrievalError(error_msg="timed out"),
            StorageAccessDenied,
            f"{URI}: no credentials received: Error retrieving metadata: timed out",
        ),
        (
            aws.FlexibleChecksumError(error_msg="Expected checksum a did not match b"),
            StorageCorrupt,
            f"{URI}: the received data does not match its checksum",
        ),
        (
            aws.PaginationError(message="The same next token was received twice"),
            StorageError,
            f"{URI}: the service returned an invalid listing: "
            "Error during pagination: The same next token was received twice",
        ),
        (
            ValueError("Invalid endpoint: localhost"),
            SettingsError,
            f"cannot use S3 for {URI}: Invalid endpoint: localhost",
        ),
    ],
)
def test_errors_of_botocore_are_mapped_to_rfork_errors(
    raised: ClientError | BotoCoreError | ValueError, error: type[RforkError], line: str
) -> None:
    """Each is mapped to its rfork error, in one line without queries of URLs."""
    found = to_storage_error(URI, raised)
    assert error is type(found)
    assert line == str(found)


def test_missing_credentials_have_a_hint() -> None:
    """The hint names each way to configure credentials, and anonymous access."""
    assert (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_SKIP_SIGNATURE=true for public buckets"
    ) == to_storage_error(URI, aws.NoCredentialsError()).hint
