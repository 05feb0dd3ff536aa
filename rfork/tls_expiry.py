"""Expiry of TLS certificates, determined with the standard library only."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

UTC_TIME: Final = 0x17
"""Tag of a time with a two-digit year, used before 2050."""


def certificate_expires_at(certificate: Path, key: Path) -> float:
    """Return when the certificate expires, in seconds since the epoch.

    Performs a TLS handshake with itself in memory, the only way to get a local certificate's data from the
    `ssl` module. Raises ssl.SSLError, for example if it has expired or `key` does not match.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(cafile=certificate)
    # The certificate itself is trusted, regardless of its issuer.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    client_side = client.wrap_bio(to_client, to_server)
    pending = [client_side, server_side]
    while pending:
        side = pending.pop(0)
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            pending.append(side)
    peer_certificate = client_side.getpeercert()
    if not peer_certificate:
        raise ssl.SSLError("the certificate was not presented")
    return ssl.cert_time_to_seconds(str(peer_certificate["notAfter"]))


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
    return datetime.strptime(timestamp, form).replace(tzinfo=UTC).timestamp()


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
