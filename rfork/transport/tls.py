"""TLS contexts out of `TlsSettings`, for every server and client of this process that uses sockets."""

from __future__ import annotations

import ssl

from rfork.errors import SettingsError
from rfork.settings import TlsSettings


def server_context(tls: TlsSettings) -> ssl.SSLContext | None:
    """What a server of this process speaks TLS with; None: it speaks plain TCP.

    With `tls.ca`, clients must show a certificate of that authority (mTLS). Raises SettingsError
    when a file cannot be used.
    """
    if not tls.serves:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _show_certificate(context, tls)
    if tls.ca is not None:
        _trust(context, tls)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(tls: TlsSettings) -> ssl.SSLContext:
    """What a client of this process speaks TLS with; it always checks the server's certificate.

    Trusts `tls.ca` alone when set, else the system's authorities. Shows `tls.certificate` when set.
    Raises SettingsError when a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.ca is not None:
        _trust(context, tls)
    else:
        context.load_default_certs()
    if tls.certificate is not None:
        _show_certificate(context, tls)
    return context


def _show_certificate(context: ssl.SSLContext, tls: TlsSettings) -> None:
    if tls.certificate is None or tls.key is None:
        raise SettingsError("RFORK_TLS_CERTIFICATE and RFORK_TLS_KEY go together: set both or neither")
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except OSError as error:  # ssl.SSLError is one
        pair = f"{tls.certificate} with {tls.key}"
        raise SettingsError(f"RFORK_TLS_CERTIFICATE: cannot use {pair}: {error}") from error


def _trust(context: ssl.SSLContext, tls: TlsSettings) -> None:
    try:
        context.load_verify_locations(cafile=tls.ca)
    except OSError as error:
        raise SettingsError(f"RFORK_TLS_CA: cannot use {tls.ca}: {error}") from error
