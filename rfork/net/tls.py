"""TLS contexts from `TlsSettings`, for every server and client of this process that uses sockets.

The files may be replaced at run time, for example when certificates are renewed.
"""

from __future__ import annotations

import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from math import floor
from pathlib import Path
from typing import Final

from rfork.errors import SettingsError, reason_of
from rfork.logs import logger
from rfork.settings import TlsSettings

SOON_S: Final = 14 * 86400.0
"""A certificate that expires within this time causes a warning."""
REMIND_S: Final = 3600.0
UTC_TIME: Final = 0x17
"""Tag of a time with a two-digit year, used before 2050."""

Version = tuple[tuple[int, ...] | None, ...]


class CurrentContext:
    """Current TLS context of this process's files. Call it for each connection. Thread-safe.

    Invalid files (for example during a renewal) keep the previous context in use. The constructor raises what
    `make` raises.
    """

    def __init__(
        self,
        tls: TlsSettings,
        make: Callable[[TlsSettings], ssl.SSLContext],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tls = tls
        self._make = make
        self._clock = clock
        self._lock = threading.Lock()
        self._log = logger("rfork.tls")
        self._warned_at = 0.0
        self._version = files_version(tls)
        self._context = make(tls)
        self._warn_before_expiry()

    def __call__(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        with self._lock:
            version = files_version(self._tls)
            if version != self._version:
                self._version = version
                self._reload()
            self._warn_before_expiry()
            return self._context

    def _reload(self) -> None:
        try:
            self._context = self._make(self._tls)
        except (SettingsError, OSError) as error:
            self._log.warning("invalid TLS files, using the previous ones", reason=str(error))
            return
        self._warned_at = 0.0
        self._log.info("TLS files reloaded", certificate=str(self._tls.certificate))

    def _warn_before_expiry(self) -> None:
        now = self._clock()
        if self._tls.certificate is None or now - self._warned_at < REMIND_S:
            return
        self._warned_at = now
        try:
            left_s = not_after(self._tls.certificate) - now
        except (OSError, ValueError):
            return  # an incomplete renewal
        if left_s <= 0:
            self._log.error("certificate has expired", certificate=str(self._tls.certificate), hint="renew it now")
        elif left_s < SOON_S:
            self._log.warning(
                "certificate expires soon",
                certificate=str(self._tls.certificate),
                days=floor(left_s / 86400),
                hint="renew it; the file is reloaded automatically",
            )


def server_context(tls: TlsSettings) -> ssl.SSLContext | None:
    """Return the TLS context of a server of this process; None: plain TCP.

    With `tls.ca`, clients must present a certificate of that authority (mTLS). Raises SettingsError if a file
    cannot be used. Replaced files are used for new connections.
    """
    if not tls.serves:
        return None
    context, current = load_server_context(tls), CurrentContext(tls, load_server_context)

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> None:
        # At this point of the handshake neither certificate nor authorities have been used yet.
        connection.context = current()

    context.sni_callback = choose
    return context


def load_server_context(tls: TlsSettings) -> ssl.SSLContext:
    """Return the TLS context of a server with the files as they are now. Raises SettingsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _show_certificate(context, tls)
    if tls.ca is not None:
        _trust(context, tls.ca, "RFORK_TLS_CA")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(tls: TlsSettings) -> ssl.SSLContext:
    """Return the TLS context of a client of this process; it always verifies the server's certificate.

    Trusts only `tls.ca` if set, otherwise the system's authorities. Presents `tls.certificate` if set. Raises
    SettingsError if a file cannot be used.
    """
    context = verifying_context(tls.ca, "RFORK_TLS_CA")
    if tls.certificate is not None:
        _show_certificate(context, tls)
    return context


def verifying_context(ca: Path | None, variable: str) -> ssl.SSLContext:
    """Return the context of a client that trusts only the authorities in `ca`, or else the system's.

    Raises SettingsError, which names the environment variable, if the file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is None:
        context.load_default_certs()
    else:
        _trust(context, ca, variable)
    return context


def _show_certificate(context: ssl.SSLContext, tls: TlsSettings) -> None:
    if tls.certificate is None or tls.key is None:
        raise SettingsError("RFORK_TLS_CERTIFICATE and RFORK_TLS_KEY go together: set both or neither")
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except OSError as error:  # includes ssl.SSLError
        pair = f"{tls.certificate} with {tls.key}"
        raise SettingsError(f"RFORK_TLS_CERTIFICATE: cannot use {pair}: {reason_of(error)}") from error


def _trust(context: ssl.SSLContext, ca: Path, variable: str) -> None:
    try:
        context.load_verify_locations(cafile=ca)
    except OSError as error:  # includes ssl.SSLError
        raise SettingsError(f"{variable}: cannot use {ca}: {reason_of(error)}") from error


def files_version(tls: TlsSettings) -> Version:
    """Return a value that changes whenever one of the files does."""
    return tuple(file_version(path) for path in (tls.certificate, tls.key, tls.ca) if path is not None)


def file_version(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes whenever the file does; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def ca_expires_at(authorities: Path) -> float:
    """Return when the first of the authorities in this PEM file expires, in seconds since the epoch.

    Raises ssl.SSLError if the file contains none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=authorities)
    ends = [ssl.cert_time_to_seconds(str(found["notAfter"])) for found in context.get_ca_certs()]
    if not ends:
        raise ssl.SSLError(f"{authorities} contains no certificate of an authority")
    return min(ends)


def not_after(certificate: Path) -> float:
    """Return the expiry of the first certificate of a PEM file, even in the past, in seconds since the epoch.

    Raises OSError if the file cannot be read, and ValueError if it contains no certificate.
    """
    found = re.search(
        "-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", certificate.read_text("ascii"), re.DOTALL
    )
    if found is None:
        raise ValueError(f"{certificate} contains no certificate")
    try:
        return _not_after(memoryview(ssl.PEM_cert_to_DER_cert(found[0])))
    except IndexError as error:
        raise ValueError(f"{certificate}: the certificate is truncated") from error


def _not_after(der: memoryview) -> float:
    """Return `notAfter` of a certificate (RFC 5280, section 4.1)."""
    fields = list(_parts(next(_parts(next(_parts(der))[1]))[1]))
    if fields[0][0] == 0xA0:  # the version, which is optional
        del fields[0]
    _, validity = fields[3]
    tag, text = list(_parts(validity))[1]
    timestamp = bytes(text).decode("ascii").removesuffix("Z")
    form = "%y%m%d%H%M%S" if tag == UTC_TIME else "%Y%m%d%H%M%S"
    return datetime.strptime(timestamp, form).replace(tzinfo=timezone.utc).timestamp()


def _parts(der: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield tag and content of each value."""
    at = 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:
            count = size & 0x7F
            size, at = int.from_bytes(der[at : at + count], "big"), at + count
        yield tag, der[at : at + size]
        at += size
