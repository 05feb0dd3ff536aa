"""TLS credentials of gRPC servers from ``RFORK_TLS_*``; a renewed certificate is used for new connections."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc

from rfork.errors import SettingsError, reason_of
from rfork.logs import logger
from rfork.settings import TlsSettings

Files = tuple[bytes, bytes, bytes | None]
"""Key, certificate chain and authorities."""
CREDENTIALS_ERROR: Final = "invalid TLS files"
PEM_HINT: Final = (
    "RFORK_TLS_CERTIFICATE and RFORK_TLS_KEY must be a matching pair of PEM files, and RFORK_TLS_CA a PEM file"
)


def server_credentials(tls: TlsSettings) -> grpc.ServerCredentials | None:
    """Return the credentials of the port; None if TLS is off. With `tls.ca`, clients must present a
    certificate (mTLS).

    Raises SettingsError for invalid files.
    """
    if not tls.serves:
        return None
    try:
        renewal = _Renewal(tls, _read(tls))
    except OSError as error:
        raise SettingsError(f"{CREDENTIALS_ERROR}: {error}", hint=PEM_HINT) from error
    credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
        _configuration(renewal.files),
        renewal,  # type: ignore[arg-type]  # None: nothing new
        tls.ca is not None,
    )
    return credentials


class _Renewal:
    """Called by gRPC at each handshake, on one of its threads: returns new credentials if the files have
    changed.
    """

    def __init__(self, tls: TlsSettings, files: Files) -> None:
        self.files = files
        self._tls = tls
        self._last_problem = ""

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            files = _read(self._tls)
        except OSError as error:
            # For example an incomplete renewal: a certificate that does not match the key yet.
            if str(error) != self._last_problem:  # once per problem, not at each handshake
                logger("rfork.tls").warning("invalid TLS files, using the previous ones", reason=str(error))
            self._last_problem = str(error)
            return None
        self._last_problem = ""
        if files == self.files:
            return None
        self.files = files
        return _configuration(files)


def _read(tls: TlsSettings) -> Files:
    """Return the files' bytes. Raises OSError if gRPC could not use them."""
    if tls.certificate is None or tls.key is None:
        raise SettingsError("RFORK_TLS_CERTIFICATE and RFORK_TLS_KEY go together: set both or neither")
    before = _contents(tls)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _naming("RFORK_TLS_CERTIFICATE", f"{tls.certificate} with {tls.key}"):
        context.load_cert_chain(tls.certificate, tls.key)
    if tls.ca is not None:
        with _naming("RFORK_TLS_CA", str(tls.ca)):
            context.load_verify_locations(cafile=tls.ca)
    # OpenSSL opened the files itself: the bytes are the checked ones only if the files did not change
    # meanwhile.
    if before != _contents(tls):
        raise OSError("the files are changing")
    key, certificate, authorities = before
    return key, certificate, authorities if tls.ca else None


def _contents(tls: TlsSettings) -> tuple[bytes, bytes, bytes]:
    return _content("KEY", tls.key), _content("CERTIFICATE", tls.certificate), _content("CA", tls.ca)


def _content(name: str, path: Path | None) -> bytes:
    if path is None:
        return b""
    with _naming(f"RFORK_TLS_{name}", str(path)):
        return path.read_bytes()


@contextmanager
def _naming(variable: str, files: str) -> Iterator[None]:
    """Add the variable and its files to an OSError raised in the block."""
    try:
        yield
    except OSError as error:  # includes ssl.SSLError
        raise OSError(f"{variable}: cannot use {files}: {reason_of(error)}") from error


def _configuration(files: Files) -> grpc.ServerCertificateConfiguration:
    key, certificate, authorities = files
    configuration: grpc.ServerCertificateConfiguration = grpc.ssl_server_certificate_configuration(
        [(key, certificate)], authorities
    )
    return configuration
