"""Source of the webhook's certificate: a directory renewed from outside, or a self-made one in a Secret.

A self-made certificate is shared by all replicas. The first replica that finds it past two thirds of its
lifetime creates a new one, with a new CA. Each replica then follows this order: the new certificate is in the
Secret; the API server's caBundle trusts both CAs; some seconds later, when every API server has received the
caBundle, the replica uses the new certificate. The old CA stays trusted, because a replica that was cut off
may use its certificate until that expires.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, Protocol

from planner.integrations.kubernetes import certs
from planner.integrations.kubernetes.certs import CERTIFICATE, KEY, CertBundle, InvalidCertificate
from planner.integrations.kubernetes.cluster import ClusterUnavailable, NotFound, ResourceConflict
from planner.integrations.kubernetes.reloading_tls import CertificateMonitor
from planner.integrations.kubernetes.secrets import CaBundles, SecretStore
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.settings import KubernetesSettings

PROPAGATION_S: Final = 5.0
"""Time that API servers may need to receive a new caBundle."""
CERTIFICATE_DAYS: Final = 90.0
"""Lifetime of a certificate that the webhook creates; it is renewed after two thirds of it."""
ATTEMPTS: Final = 4
"""Maximum consecutive attempts when another replica changes the objects at the same time."""
log = logger("planner.integrations.certificates")


class CertSource(Protocol):
    """Keeps a ReloadingContext's certificate up to date."""

    async def refresh(self) -> None:
        """Check once for changes and apply them. Raises no expected error."""


class FolderCertSource:
    """Uses tls.crt and tls.key of a directory. While a pair is unusable, the previous one stays in use."""

    def __init__(self, folder: Path, monitor: CertificateMonitor) -> None:
        """Raises SettingsError if the directory has no usable certificate."""
        self._folder, self._monitor = folder, monitor
        try:
            self._load()
        except (InvalidCertificate, OSError) as error:
            raise SettingsError(
                f"unusable webhook certificate: {_error_text(error)}",
                hint=f"RFORK_K8S_CERTIFICATE_DIR must be a directory with {CERTIFICATE} and {KEY}, both PEM",
            ) from None

    async def refresh(self) -> None:
        """See CertSource."""
        try:
            self._load()
        except (InvalidCertificate, OSError) as error:
            self._monitor.report_problem(f"unusable certificate in {self._folder}", reason=_error_text(error))
        self._monitor.check()

    def _load(self) -> None:
        # Read once, so that the checked bytes are the used ones even if the files change meanwhile.
        chain, key = ((self._folder / name).read_bytes() for name in (CERTIFICATE, KEY))
        pair = self._monitor.tls_context.current
        if pair is None or (chain, key) != (pair.chain, pair.key):
            self._monitor.set_certificate(certs.load_pair(chain, key))


class SecretCertSource:
    """Creates and renews the webhook's own certificate, together with the other replicas."""

    def __init__(self, settings: KubernetesSettings, store: SecretStore, monitor: CertificateMonitor) -> None:
        """Raises SettingsError for hosts that a certificate cannot contain."""
        self._settings, self._store, self._monitor = settings, store, monitor
        self._seen_cas: tuple[bytes, ...] = ()
        """CAs of certificates that this replica has seen in the Secret, newest first."""
        self._trusted: tuple[bytes, float] | None = None
        """The CA that was last found trusted, and since when (monotonic)."""
        try:
            self._hosts = frozenset(map(certs.canonical, settings.webhook_hosts))
        except ValueError as error:
            raise SettingsError(f"RFORK_K8S_WEBHOOK_HOSTS: {error}") from None
        if not self._hosts:
            raise SettingsError(
                "RFORK_K8S_WEBHOOK_HOSTS is empty, but the webhook's own certificate needs at least one host",
                hint="set it to the name of the webhook's Service, SERVICE.NAMESPACE.svc",
            )

    async def refresh(self) -> None:
        """See CertSource."""
        try:
            for _ in range(ATTEMPTS):
                try:
                    await self._refresh()
                    break
                except ResourceConflict:
                    continue  # another replica was faster: read its change
        except ClusterUnavailable as error:
            self._monitor.report_problem("cannot renew the webhook's certificate", reason=str(error))
        except InvalidCertificate as error:
            self._monitor.report_problem("unusable webhook certificate", reason=str(error))
        self._monitor.check()

    async def _refresh(self) -> None:
        # Read the caBundles first. They are written only if unchanged since then, so a replica that read an
        # older Secret cannot undo what a replica with a newer Secret wrote.
        bundles = await self._read_ca_bundles()
        own = await self._current_bundle(bundles)
        self._seen_cas = tuple(dict.fromkeys((own.ca, *self._seen_cas)))[: certs.MAX_PREVIOUS_CAS]
        if await self._is_trusted(own, bundles):
            self._monitor.set_certificate(own.pair)

    async def _read_ca_bundles(self) -> CaBundles | None:
        """Return the caBundles. None if this process does not maintain them, or without a configuration."""
        if not self._settings.webhook_configuration:
            return None
        try:
            return await self._store.read_bundles(self._settings.webhook_configuration)
        except NotFound:
            return None

    async def _current_bundle(self, bundles: CaBundles | None) -> CertBundle:
        """Return the Secret's certificate if it is usable; otherwise create one and store it in the Secret."""
        settings, now = self._settings, self._monitor.clock.unix()
        secret = await self._store.read_secret(settings.certificate_secret, settings.namespace)
        own: CertBundle | None = None
        reason, hosts = "missing", self._hosts
        if any(secret.data.values()):  # a Helm chart creates it empty, so that it is deleted with the release
            try:
                own = certs.load_bundle(secret.data)
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
            *(one for have in (bundles.bundles if bundles else {}).values() for one in certs.authorities(have)),
        )
        generated = certs.generate_bundle(hosts, CERTIFICATE_DAYS, now, previous_cas)
        await self._store.write_secret(
            settings.certificate_secret, settings.namespace, generated.data(), secret.version
        )
        log.info("certificate created", reason=reason, secret=settings.certificate_secret)
        return generated

    async def _is_trusted(self, own: CertBundle, bundles: CaBundles | None) -> bool:
        """Return True if every API server trusts the certificate's CA. Updates the caBundle if needed."""
        if bundles is None:
            return True
        now = self._monitor.clock.monotonic()
        if any(bundle != own.bundle for bundle in bundles.bundles.values()):
            name = self._settings.webhook_configuration
            try:
                await self._store.write_bundles(name, dict.fromkeys(bundles.bundles, own.bundle), bundles.version)
            except NotFound:
                return True
            log.info("caBundle updated", configuration=name, webhooks=len(bundles.bundles))
        if self._trusted is None or self._trusted[0] != own.ca:
            self._trusted = (own.ca, now)
        return self._monitor.tls_context.current is None or now - self._trusted[1] >= PROPAGATION_S


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
