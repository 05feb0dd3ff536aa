"""Certificates of the webhook: created, parsed and validated. Pure except for random numbers.

Each certificate has its own CA, whose key is discarded after signing, so nothing else can ever be signed by a
CA that the API server trusts.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
CA: Final = "ca.crt"
PREVIOUS_CA_KEY: Final = "ca-earlier.crt"
"""Keys of the Secret: those of `kubernetes.io/tls`, and the previous CAs."""
CA_NAME: Final = "rfork webhook CA"
DAY_S: Final = 86_400.0
BACKDATE_S: Final = 3600.0
"""Maximum time by which a certificate is backdated, because clocks in a cluster differ."""
RENEW_AFTER: Final = 2 / 3
MAX_PREVIOUS_CAS: Final = 2
"""Number of previous CAs that stay trusted. Limited by number, not by age: a replica whose clock is ahead
must not revoke the trust in certificates that others use correctly. Expired ones do no harm, because no one
has their keys.
"""
NAME: Final = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


class InvalidCertificate(Exception):
    """A certificate, its key or its CA is unusable. The text names it and the reason."""


@dataclass(frozen=True)
class CertPair:
    """A certificate and its key, as a server uses them."""

    chain: bytes
    """PEM; the server's own certificate first."""
    key: bytes
    """PEM."""
    not_before: float
    not_after: float
    """Seconds since the epoch."""
    hosts: frozenset[str]
    """Names and addresses that it is valid for."""

    def __repr__(self) -> str:  # otherwise a log could contain the key
        return f"CertPair(not_before={self.not_before}, not_after={self.not_after}, hosts={sorted(self.hosts)})"

    def valid(self, now: float) -> bool:
        """Return True if the certificate is valid at `now`."""
        return self.not_before <= now < self.not_after

    @property
    def renew_at(self) -> float:
        """Time at which two thirds of the lifetime have passed."""
        return self.not_before + (self.not_after - self.not_before) * RENEW_AFTER


@dataclass(frozen=True)
class CertBundle:
    """State shared by the webhook's replicas: a certificate, its CA, and previous CAs."""

    pair: CertPair
    ca: bytes
    """PEM."""
    previous_cas: tuple[bytes, ...] = ()
    """PEM, newest first. Other replicas may still use certificates of these."""

    @property
    def bundle(self) -> bytes:
        """CAs that the API server must trust, as PEM."""
        return b"".join((self.ca, *self.previous_cas))

    def data(self) -> dict[str, bytes]:
        """Return the data of a Secret."""
        return {
            CERTIFICATE: self.pair.chain,
            KEY: self.pair.key,
            CA: self.ca,
            PREVIOUS_CA_KEY: b"".join(self.previous_cas),
        }


def load_pair(chain: bytes, key: bytes) -> CertPair:
    """Parse a certificate chain and its key from PEM. Raises InvalidCertificate."""
    try:
        leaf = x509.load_pem_x509_certificates(chain)[0]
    except ValueError as error:
        raise InvalidCertificate(f"the certificate is not PEM: {error}") from None
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as error:
        raise InvalidCertificate(f"the key is not unencrypted PEM: {error}") from None
    if _public(private.public_key()) != _public(leaf.public_key()):
        raise InvalidCertificate("the key does not belong to the certificate")
    return CertPair(chain, key, *_validity(leaf), _hosts(leaf))


def load_bundle(data: Mapping[str, bytes]) -> CertBundle:
    """Parse the data of a Secret made by `generate_bundle`. Raises InvalidCertificate."""
    if missing := [name for name in (CERTIFICATE, KEY, CA) if not data.get(name)]:
        raise InvalidCertificate(f"the Secret lacks {', '.join(missing)}")
    pair = load_pair(data[CERTIFICATE], data[KEY])
    try:
        ca = x509.load_pem_x509_certificate(data[CA])
        x509.load_pem_x509_certificate(pair.chain).verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise InvalidCertificate(f"{CA} did not sign {CERTIFICATE}: {error or 'wrong signature'}") from None
    return CertBundle(pair, _pem(ca), authorities(data.get(PREVIOUS_CA_KEY, b"")))


def generate_bundle(hosts: Iterable[str], days: float, now: float, previous_cas: Iterable[bytes] = ()) -> CertBundle:
    """Create a certificate for `hosts`, valid for `days`, with a new CA.

    `previous_cas` are PEM CAs whose certificates may still be in use, newest first. Only the first ones are
    kept.
    """
    hosts = sorted(set(hosts))
    lifetime_s = days * DAY_S
    not_before, not_after = _time(now - min(BACKDATE_S, lifetime_s / 10)), _time(now + lifetime_s)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    serial = x509.random_serial_number()
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{CA_NAME} {serial:x}"[:64])])
    ca = (
        _builder(ca_name, ca_name, ca_key.public_key(), not_before, not_after)
        .serial_number(serial)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    leaf = (
        _builder(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rfork webhook")]),
            ca_name,
            key.public_key(),
            not_before,
            not_after,
        )
        .serial_number(x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    kept_cas = tuple(dict.fromkeys(previous_cas))[:MAX_PREVIOUS_CAS]
    return CertBundle(load_pair(_pem(leaf), private), _pem(ca), kept_cas)


def authorities(bundle: bytes) -> tuple[bytes, ...]:
    """Return the CAs in a PEM bundle that were created here, in order. Empty if it is not PEM."""
    try:
        certificates = x509.load_pem_x509_certificates(bundle)
    except ValueError:
        return ()
    return tuple(_pem(certificate) for certificate in certificates if CA_NAME in certificate.subject.rfc4514_string())


def canonical(host: str) -> str:
    """Return a DNS name, or an address in canonical form. Raises ValueError for anything else."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        if not NAME.fullmatch(host):
            raise ValueError(f"{host!r} is neither a DNS name nor an IP address") from None
        return host


def date(unix: float) -> str:
    """Format a time as ISO 8601, UTC."""
    return _time(unix).strftime("%Y-%m-%dT%H:%M:%SZ")


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    not_before: datetime.datetime,
    not_after: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .not_valid_before(not_before)
        .not_valid_after(not_after)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _hosts(certificate: x509.Certificate) -> frozenset[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return frozenset()
    return frozenset([*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))])


def _validity(certificate: x509.Certificate) -> tuple[float, float]:
    return certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()


def _time(unix: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(unix), datetime.UTC)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _public(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
