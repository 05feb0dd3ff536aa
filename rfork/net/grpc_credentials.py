"""TLS credentials of gRPC servers from ``RFORK_TLS_*``; a renewed certificate is used for new connections."""

from __future__ import annotations

from typing import Final

import grpc

from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.net.tls import load_server_context
from rfork.settings import TlsSettings

Files = tuple[bytes, bytes, bytes | None]
"""Key, certificate chain and authorities."""
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
    except (SettingsError, OSError) as error:
        raise SettingsError(f"invalid TLS files: {error}", hint=PEM_HINT) from error
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
        except (SettingsError, OSError) as error:
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
    """Return the files' bytes. Raises SettingsError or OSError if gRPC could not use them."""
    before = _contents(tls)
    load_server_context(tls)
    # OpenSSL opened the files itself: the bytes are the checked ones only if the files did not change
    # meanwhile.
    if before != _contents(tls):
        raise SettingsError("the files are changing")
    return before


def _contents(tls: TlsSettings) -> Files:
    if tls.certificate is None or tls.key is None:
        raise SettingsError("RFORK_TLS_CERTIFICATE and RFORK_TLS_KEY go together: set both or neither")
    return tls.key.read_bytes(), tls.certificate.read_bytes(), tls.ca.read_bytes() if tls.ca is not None else None


def _configuration(files: Files) -> grpc.ServerCertificateConfiguration:
    key, certificate, authorities = files
    configuration: grpc.ServerCertificateConfiguration = grpc.ssl_server_certificate_configuration(
        [(key, certificate)], authorities
    )
    return configuration
