"""Certificate of the webhook: files of a directory renewed from outside, or a self-made one in a Secret.

cert-manager, or whatever else renews the directory (`RFORK_K8S_CERTIFICATE_DIR`, a mounted Secret), also sets
the caBundle. Changed files are used for the next handshake.

A self-made certificate has its own CA, whose key is discarded after signing, so nothing else can ever be
signed by a CA that the API server trusts. It is shared by all replicas. The first replica that finds it past
two thirds of its lifetime creates a new one, with a new CA; the Secret's version decides between replicas.
Each replica then follows this order: the new certificate is in the Secret; the API server's caBundle trusts
both CAs; some seconds later, when every API server has received the caBundle, the replica uses the new
certificate. The old CA stays trusted, because a replica that was cut off may use its certificate until that
expires. This needs the permissions to create, get and update one Secret, and to get and patch one
MutatingWebhookConfiguration.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import datetime
import ipaddress
import os
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from prometheus_client import Counter, Gauge

from planner.clock import Clock
from planner.integrations.health import IntegrationStatus
from planner.integrations.kubernetes.api_server import (
    STRATEGIC,
    ApiServer,
    ClusterUnavailable,
    Document,
    NotFound,
    ResourceConflict,
)
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.settings import KubernetesSettings

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
CA: Final = "ca.crt"
PREVIOUS_CA_KEY: Final = "ca-earlier.crt"
"""Keys of the Secret: those of `kubernetes.io/tls`, and the previous CAs."""
CA_NAME: Final = "rfork webhook CA"
CERTIFICATE_DAYS: Final = 90.0
"""Lifetime of a self-made certificate; it is renewed after two thirds of it."""
RENEW_AFTER: Final = 2 / 3
BACKDATE_S: Final = 3600.0
"""Maximum time by which a certificate is backdated, because clocks in a cluster differ."""
MAX_PREVIOUS_CAS: Final = 2
"""Number of previous CAs that stay trusted. Limited by number, not by age: a replica whose clock is ahead
must not revoke the trust in certificates that others use correctly. Expired ones do no harm, because no one
has their keys.
"""
PROPAGATION_S: Final = 5.0
"""Time that API servers may need to receive a new caBundle."""
ATTEMPTS: Final = 4
"""Maximum consecutive attempts when another replica changes the objects at the same time."""
LOG_INTERVAL_S: Final = 3600.0
FIELD_MANAGER: Final = {"fieldManager": "rfork-webhook"}
"""Field manager of the fields written here."""
HOST_PATTERN: Final = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
log = logger("planner.integrations.certificates")


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
    def validity_text(self) -> str:
        """Begin and end, for logs."""
        return f"{_time(self.not_before):%Y-%m-%dT%H:%M:%SZ} to {_time(self.not_after):%Y-%m-%dT%H:%M:%SZ}"

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
    not_before, not_after = leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()
    return CertPair(chain, key, not_before, not_after, _hosts(leaf))


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
    lifetime_s = days * 86_400
    validity = _time(now - min(BACKDATE_S, lifetime_s / 10)), _time(now + lifetime_s)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = f"{CA_NAME} {x509.random_serial_number():x}"[:64]
    ca_key_id = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = _sign(ca_name, ca_name, ca_key.public_key(), ca_key, validity, ca_key_id)
    leaf = _sign(
        "rfork webhook",
        ca_name,
        key.public_key(),
        ca_key,
        validity,
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName([_general_name(host) for host in sorted(set(hosts))]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
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


def canonical_host(host: str) -> str:
    """Return a DNS name, or an address in canonical form. Raises ValueError for anything else."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        if not HOST_PATTERN.fullmatch(host):
            raise ValueError(f"{host!r} is neither a DNS name nor an IP address") from None
        return host


def _sign(
    subject: str,
    issuer: str,
    public_key: ec.EllipticCurvePublicKey,
    signing_key: ec.EllipticCurvePrivateKey,
    validity: tuple[datetime.datetime, datetime.datetime],
    *extensions: x509.ExtensionType,
) -> x509.Certificate:
    is_ca = subject == issuer
    usage = x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(validity[0])
        .not_valid_after(validity[1])
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(usage, critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(signing_key, hashes.SHA256())


def _general_name(host: str) -> x509.GeneralName:
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


def _time(unix: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(unix), datetime.timezone.utc)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _public(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


class ServingCertificate:
    """TLS context of the server, whose certificate can change while it serves. New handshakes use the new one.

    Each problem is reported when it starts, and once an hour while it lasts.
    """

    def __init__(self, status: IntegrationStatus, clock: Clock) -> None:
        self.clock = clock
        self.current: CertPair | None = None
        self._status = status
        self._logged_at: dict[str, float] = {}
        self._inner: ssl.SSLContext | None = None
        self.context = _context()
        # Not load_cert_chain on this context: OpenSSL would keep an RSA certificate next to a new ECDSA one,
        # and keep using it for some clients.
        self.context.sni_callback = self._choose
        self._ends = Gauge(
            "rfork_webhook_certificate_not_after_seconds",
            "Expiry of the certificate in use, in seconds since the epoch; 0: no certificate",
            registry=status.registry,
        )
        self._valid = Gauge(
            "rfork_webhook_certificate_valid",
            "1 if the certificate in use is valid by this machine's clock",
            registry=status.registry,
        )
        self._changes = Counter(
            "rfork_webhook_certificate_changes", "Certificates that were put into use", registry=status.registry
        )
        self._errors = Counter(
            "rfork_webhook_certificate_errors",
            "Checks of the certificate that found a problem",
            registry=status.registry,
        )

    def set_certificate(self, certificate: CertPair) -> None:
        """Use this certificate from now on, unless it is invalid and the current one is valid.

        Raises InvalidCertificate and then keeps the previous one.
        """
        now, current = self.clock.unix(), self.current
        if certificate == current:
            return
        if current is not None and current.valid(now) and not certificate.valid(now):
            problem = "the new webhook certificate is not valid, keeping the current one"
            self.report_problem(problem, reason=certificate.validity_text)
            return
        self._inner, self.current = _load_context(certificate), certificate
        self._changes.inc()
        hosts = ",".join(sorted(certificate.hosts))
        log.info("webhook certificate in use", hosts=hosts, validity=certificate.validity_text)

    def report_problem(self, problem: str, reason: str) -> None:
        """Count a problem, and log it unless it was logged within the last hour."""
        self._errors.inc()
        self._log_problem(problem, reason=reason)
        if self.current is None:
            self._status.not_ready(f"no certificate yet: {problem}: {reason}")

    def check(self) -> None:
        """Update metrics and status from the certificate in use. Call after each refresh."""
        certificate, now = self.current, self.clock.unix()
        if certificate is None:
            return
        self._ends.set(certificate.not_after)
        self._valid.set(certificate.valid(now))
        # Ready even with an expired certificate: this machine's clock may be wrong.
        self._status.ready()
        validity = certificate.validity_text
        if now >= certificate.not_after:
            self._log_problem("webhook certificate expired: Pods start without rfork", validity=validity)
        elif now < certificate.not_before:
            self._log_problem("webhook certificate not valid yet: check this machine's clock", validity=validity)

    def _log_problem(self, event: str, **fields: str) -> None:
        """Log an error, at most once an hour for equal errors."""
        key, now = " ".join((event, *fields.values())), self.clock.monotonic()
        self._logged_at = {logged: at for logged, at in self._logged_at.items() if now - at < LOG_INTERVAL_S}
        if key not in self._logged_at:
            self._logged_at[key] = now
            log.error(event, **fields)

    def _choose(self, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> int | None:
        if self._inner is None:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self._inner
        return None


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _load_context(certificate: CertPair) -> ssl.SSLContext:
    """Return a context with this certificate. Raises InvalidCertificate."""
    context = _context()
    # An in-memory file: OpenSSL reads keys only from files, and this key must not be written to disk.
    descriptor = os.memfd_create("certificate")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(certificate.key + b"\n" + certificate.chain)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    except (ssl.SSLError, OSError) as error:
        raise InvalidCertificate(f"OpenSSL rejects it: {error}") from None
    finally:
        os.close(descriptor)
    return context


@dataclass(frozen=True)
class VersionedData:
    """Data of a Secret by key, or caBundles by the webhook's name; and the object's version.

    Empty version: the object does not exist.
    """

    data: Mapping[str, bytes]
    version: str

    def __repr__(self) -> str:  # otherwise a log could contain a key
        return f"VersionedData({sorted(self.data)}, version={self.version!r})"


class CertificateStore:
    """The Secret and the caBundles, shared by the webhook's replicas. Every call raises ClusterUnavailable."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server

    async def read_secret(self, name: str, namespace: str) -> VersionedData:
        """Return the Secret, or one without data and version if it does not exist."""
        try:
            secret = await self._server.call("GET", _secret_path(namespace, name))
        except NotFound:
            return VersionedData({}, "")
        data = {key: _decoded(value) for key, value in (secret.get("data") or {}).items()}
        return VersionedData(data, secret["metadata"]["resourceVersion"])

    async def write_secret(self, name: str, namespace: str, data: Mapping[str, bytes], version: str) -> None:
        """Replace the data of a Secret that still has `version`, or create it (empty version).

        Labels, annotations and the type of an existing Secret stay as they are. Raises ResourceConflict.
        """
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        if not version:
            secret: Document = {
                "apiVersion": "v1",
                "kind": "Secret",
                "type": "kubernetes.io/tls",
                "metadata": {"name": name, "namespace": namespace},
                "data": encoded,
            }
            await self._server.call("POST", _secret_path(namespace), body=secret, parameters=FIELD_MANAGER)
            return
        path = _secret_path(namespace, name)
        try:
            secret = await self._server.call("GET", path)
            if secret["metadata"]["resourceVersion"] != version:
                raise ResourceConflict(f"PUT {path}: it changed since it was read")
            await self._server.call("PUT", path, body={**secret, "data": encoded}, parameters=FIELD_MANAGER)
        except NotFound as error:  # deleted since it was read: same as a change
            raise ResourceConflict(str(error)) from error

    async def read_bundles(self, configuration: str) -> VersionedData:
        """Return the PEM caBundles of a configuration. Raises NotFound if it does not exist."""
        document = await self._server.call("GET", _configuration_path(configuration))
        webhooks = document.get("webhooks") or ()
        bundles = {webhook["name"]: _decoded(webhook["clientConfig"].get("caBundle")) for webhook in webhooks}
        return VersionedData(bundles, document["metadata"]["resourceVersion"])

    async def write_bundles(self, configuration: str, bundles: Mapping[str, bytes], version: str) -> None:
        """Set the caBundles of a configuration that still has `version`. Raises ResourceConflict, NotFound."""
        webhooks = [
            {"name": name, "clientConfig": {"caBundle": base64.b64encode(bundle).decode()}}
            for name, bundle in bundles.items()
        ]
        await self._server.call(
            "PATCH",
            _configuration_path(configuration),
            # Strategic merge: webhooks are merged by name, so their other fields stay as they are.
            body={"metadata": {"resourceVersion": version}, "webhooks": webhooks},
            content_type=STRATEGIC,
            parameters=FIELD_MANAGER,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._server.close()


def _secret_path(namespace: str, *name: str) -> str:
    return "/".join(("/api/v1/namespaces", quote(namespace), "secrets", *map(quote, name)))


def _configuration_path(configuration: str) -> str:
    return f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{quote(configuration)}"


def _decoded(value: str | None) -> bytes:
    try:
        return base64.b64decode(value or "", validate=True)
    except binascii.Error:
        return b""


class FolderCertSource:
    """Uses tls.crt and tls.key of a directory. While a pair is unusable, the previous one stays in use."""

    def __init__(self, folder: Path, serving: ServingCertificate) -> None:
        """Raises SettingsError if the directory has no usable certificate."""
        self._folder, self._serving = folder, serving
        try:
            self._load()
        except (InvalidCertificate, OSError) as error:
            raise SettingsError(
                f"unusable webhook certificate: {_error_text(error)}",
                hint=f"RFORK_K8S_CERTIFICATE_DIR must be a directory with {CERTIFICATE} and {KEY}, both PEM",
            ) from None

    async def refresh(self) -> None:
        """Check once for changes and apply them. Raises no expected error."""
        try:
            self._load()
        except (InvalidCertificate, OSError) as error:
            self._serving.report_problem(f"unusable webhook certificate in {self._folder}", reason=_error_text(error))
        self._serving.check()

    def _load(self) -> None:
        # Read once, so that the checked bytes are the used ones even if the files change meanwhile.
        chain, key = ((self._folder / name).read_bytes() for name in (CERTIFICATE, KEY))
        pair = self._serving.current
        if pair is None or (chain, key) != (pair.chain, pair.key):
            self._serving.set_certificate(load_pair(chain, key))


class SecretCertSource:
    """Creates and renews the webhook's own certificate, together with the other replicas."""

    def __init__(self, settings: KubernetesSettings, store: CertificateStore, serving: ServingCertificate) -> None:
        """Raises SettingsError for hosts that a certificate cannot contain."""
        self._settings, self._store, self._serving = settings, store, serving
        self._seen_cas: tuple[bytes, ...] = ()
        """CAs of certificates that this replica has seen in the Secret, newest first."""
        self._trusted: tuple[bytes, float] | None = None
        """The CA that was last found trusted, and since when (monotonic)."""
        try:
            self._hosts = frozenset(map(canonical_host, settings.webhook_hosts))
        except ValueError as error:
            raise SettingsError(f"RFORK_K8S_WEBHOOK_HOSTS: {error}") from None
        if not self._hosts:
            raise SettingsError(
                "RFORK_K8S_WEBHOOK_HOSTS is empty, but the webhook's own certificate needs at least one host",
                hint="set it to the name of the webhook's Service, SERVICE.NAMESPACE.svc",
            )

    async def refresh(self) -> None:
        """Check once for changes and apply them. Raises no expected error."""
        try:
            for _ in range(ATTEMPTS):
                try:
                    await self._refresh()
                    break
                except ResourceConflict:
                    continue  # another replica was faster: read its change
        except ClusterUnavailable as error:
            self._serving.report_problem("cannot renew the webhook's certificate", reason=str(error))
        except InvalidCertificate as error:
            self._serving.report_problem("unusable webhook certificate", reason=str(error))
        self._serving.check()

    async def _refresh(self) -> None:
        # Read the caBundles first. They are written only if unchanged since then, so a replica that read an
        # older Secret cannot undo what a replica with a newer Secret wrote.
        bundles = await self._read_ca_bundles()
        own = await self._current_bundle(bundles)
        self._seen_cas = tuple(dict.fromkeys((own.ca, *self._seen_cas)))[:MAX_PREVIOUS_CAS]
        if await self._is_trusted(own, bundles):
            self._serving.set_certificate(own.pair)

    async def _read_ca_bundles(self) -> VersionedData | None:
        """Return the caBundles. None if this process does not maintain them, or without a configuration."""
        if not self._settings.webhook_configuration:
            return None
        try:
            return await self._store.read_bundles(self._settings.webhook_configuration)
        except NotFound:
            return None

    async def _current_bundle(self, bundles: VersionedData | None) -> CertBundle:
        """Return the Secret's certificate if it is usable; otherwise create one and store it in the Secret."""
        settings, now = self._settings, self._serving.clock.unix()
        secret = await self._store.read_secret(settings.certificate_secret, settings.namespace)
        own: CertBundle | None = None
        reason, hosts = "missing", self._hosts
        if any(secret.data.values()):  # a Helm chart creates it empty, so that it is deleted with the release
            try:
                own = load_bundle(secret.data)
            except InvalidCertificate as error:
                reason = "unusable Secret"
                log.warning("replacing an unusable certificate Secret", reason=str(error))
        if own is not None:
            if missing := self._hosts - own.pair.hosts:
                # Keep the hosts that replicas of an older release need, so that releases do not replace each
                # other's certificate.
                reason, hosts = f"not valid for {', '.join(sorted(missing))}", hosts | own.pair.hosts
            elif now >= own.pair.renew_at:
                reason = "two thirds of the lifetime have passed"
            else:
                return own
        previous_cas = (
            *((own.ca, *own.previous_cas) if own else ()),
            *self._seen_cas,
            *(one for have in (bundles.data if bundles else {}).values() for one in authorities(have)),
        )
        generated = generate_bundle(hosts, CERTIFICATE_DAYS, now, previous_cas)
        await self._store.write_secret(
            settings.certificate_secret, settings.namespace, generated.data(), secret.version
        )
        log.info("certificate created", reason=reason, secret=settings.certificate_secret)
        return generated

    async def _is_trusted(self, own: CertBundle, bundles: VersionedData | None) -> bool:
        """Return True if every API server trusts the certificate's CA. Updates the caBundle if needed."""
        if bundles is None:
            return True
        now = self._serving.clock.monotonic()
        if any(bundle != own.bundle for bundle in bundles.data.values()):
            name = self._settings.webhook_configuration
            try:
                await self._store.write_bundles(name, dict.fromkeys(bundles.data, own.bundle), bundles.version)
            except NotFound:
                return True
            log.info("caBundle updated", configuration=name, webhooks=len(bundles.data))
        if self._trusted is None or self._trusted[0] != own.ca:
            self._trusted = (own.ca, now)
        return self._serving.current is None or now - self._trusted[1] >= PROPAGATION_S


CertSource = FolderCertSource | SecretCertSource


async def refresh_forever(source: CertSource, pause_s: float) -> None:
    """Refresh forever. Errors are logged."""
    while True:
        try:
            await source.refresh()
        except Exception:  # outermost handler of the task: the server keeps its current certificate
            log.exception("certificate refresh failed")
        await asyncio.sleep(pause_s)


def _error_text(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror or error}"
    return str(error)
