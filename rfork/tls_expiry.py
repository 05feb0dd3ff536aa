"""How long a TLS certificate is still valid, found with the standard library alone."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

UTC_TIME: Final = 0x17
"""Tag of a time whose year has two digits, as those before 2050 have."""


def certificate_expires_at(certificate: Path, key: Path) -> float:
    """When the certificate ends, in seconds since the epoch.

    Speaks TLS with itself in memory, as that is the one way the `ssl` module tells about a
    certificate of its own. Raises ssl.SSLError, as when it has expired or `key` is another's.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(cafile=certificate)
    # The certificate itself is what is trusted, whoever signed it.
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
        raise ssl.SSLError("the certificate was not shown")
    return ssl.cert_time_to_seconds(str(peer_certificate["notAfter"]))


def ca_expires_at(authorities: Path) -> float:
    """When the first of the authorities in this PEM file ends, in seconds since the epoch.

    Raises ssl.SSLError when the file holds none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=authorities)
    ends = [ssl.cert_time_to_seconds(str(found["notAfter"])) for found in context.get_ca_certs()]
    if not ends:
        raise ssl.SSLError(f"{authorities} holds no certificate of an authority")
    return min(ends)


def not_after(certificate: Path) -> float:
    """Return the end of the first certificate of a PEM file, past or not, in seconds since the epoch.

    Raises OSError where the file cannot be read, and ValueError where it holds no certificate.
    """
    found = re.search(
        "-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", certificate.read_text("ascii"), re.DOTALL
    )
    if found is None:
        raise ValueError(f"{certificate} holds no certificate")
    try:
        return _not_after(memoryview(ssl.PEM_cert_to_DER_cert(found[0])))
    except IndexError as error:
        raise ValueError(f"{certificate}: the certificate is cut short") from error


def _not_after(der: memoryview) -> float:
    """Return `notAfter` of a certificate (RFC 5280, section 4.1)."""
    fields = list(_parts(next(_parts(next(_parts(der))[1]))[1]))
    if fields[0][0] == 0xA0:  # the version, which may be left out
        del fields[0]
    _, validity = fields[3]
    tag, text = list(_parts(validity))[1]
    timestamp = bytes(text).decode("ascii").removesuffix("Z")
    form = "%y%m%d%H%M%S" if tag == UTC_TIME else "%Y%m%d%H%M%S"
    return datetime.strptime(timestamp, form).replace(tzinfo=UTC).timestamp()


def _parts(der: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Tag and content of each value in turn."""
    at = 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:
            count = size & 0x7F
            size, at = int.from_bytes(der[at : at + count], "big"), at + count
        yield tag, der[at : at + size]
        at += size
