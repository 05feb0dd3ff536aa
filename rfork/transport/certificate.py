"""How long a TLS certificate is still valid, found with the standard library alone."""

from __future__ import annotations

import ssl
from pathlib import Path


def expires_at(certificate: Path, key: Path) -> float:
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
    giving = server.wrap_bio(to_server, to_client, server_side=True)
    asking = client.wrap_bio(to_client, to_server)
    pending = [asking, giving]
    while pending:
        side = pending.pop(0)
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            pending.append(side)
    shown = asking.getpeercert()
    if not shown:
        raise ssl.SSLError("the certificate was not shown")
    return ssl.cert_time_to_seconds(str(shown["notAfter"]))


def authority_expires_at(authorities: Path) -> float:
    """When the first of the authorities in this PEM file ends, in seconds since the epoch.

    Raises ssl.SSLError when the file holds none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=authorities)
    ends = [ssl.cert_time_to_seconds(str(found["notAfter"])) for found in context.get_ca_certs()]
    if not ends:
        raise ssl.SSLError(f"{authorities} holds no certificate of an authority")
    return min(ends)
