"""The certificate that the webhook shows: from a folder that others renew, or its own, in a Secret.

Its own is shared by all replicas. Whoever first sees that two thirds of its life are over makes a new one,
with an authority of its own. On each replica the order is: the new one lies in the Secret; the API server's
caBundle trusts both authorities; some seconds later, when every API server has heard of that, it is shown.
The old authority stays trusted: a replica that was cut off may show its certificate until that ends.
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
"""How long API servers may take to hear of a new caBundle."""
ATTEMPTS: Final = 4
"""Looks in a row of which each met another replica's change."""
log = logger("planner.integrations.certificates")


class CertSource(Protocol):
    """Keeps a ReloadingContext's certificate up to date."""

    async def refresh(self) -> None:
        """Look once whether something changed, and do what is to be done. Raises nothing that it knows of."""


class FolderCertSource:
    """Shows tls.crt and tls.key of a folder; a pair that cannot be used leaves the one before it shown."""

    def __init__(self, folder: Path, monitor: CertificateMonitor) -> None:
        """Raises SettingsError where the folder has nothing that can be shown."""
        self._folder, self._monitor = folder, monitor
        try:
            self._load()
        except (InvalidCertificate, OSError) as error:
            raise SettingsError(
                f"the webhook's certificate cannot be used: {_error_text(error)}",
                hint=f"RFORK_K8S_CERTIFICATE_DIR is a folder with {CERTIFICATE} and {KEY}, both PEM",
            ) from None

    async def refresh(self) -> None:
        """As in Keeper."""
        try:
            self._load()
        except (InvalidCertificate, OSError) as error:
            self._monitor.report_problem(f"the certificate in {self._folder} cannot be used", reason=_error_text(error))
        self._monitor.check()

    def _load(self) -> None:
        # Read once: what is checked is what is shown, whatever happens to the files meanwhile.
        chain, key = ((self._folder / name).read_bytes() for name in (CERTIFICATE, KEY))
        pair = self._monitor.tls_context.current
        if pair is None or (chain, key) != (pair.chain, pair.key):
            self._monitor.set_certificate(certs.load_pair(chain, key))


class SecretCertSource:
    """Makes and renews a certificate of the webhook's own, with the other replicas."""

    def __init__(self, settings: KubernetesSettings, store: SecretStore, monitor: CertificateMonitor) -> None:
        """Raises SettingsError for hosts that no certificate can be for."""
        self._settings, self._store, self._monitor = settings, store, monitor
        self._known_bundle: tuple[bytes, ...] = ()
        """Authorities of certificates that this replica has seen in the Secret, the latest first."""
        self._trusted: tuple[bytes, float] | None = None
        """The authority that was seen to be trusted last, and since when (monotonic)."""
        try:
            self._hosts = frozenset(map(certs.canonical, settings.webhook_hosts))
        except ValueError as error:
            raise SettingsError(f"RFORK_K8S_WEBHOOK_HOSTS: {error}") from None
        if not self._hosts:
            raise SettingsError("RFORK_K8S_WEBHOOK_HOSTS: an own certificate has to be for some host")

    async def refresh(self) -> None:
        """As in Keeper."""
        try:
            for _ in range(ATTEMPTS):
                try:
                    await self._refresh()
                    break
                except ResourceConflict:
                    continue  # another replica was quicker: what did it do?
        except ClusterUnavailable as error:
            self._monitor.report_problem("the webhook's certificate cannot be looked after", reason=str(error))
        except InvalidCertificate as error:
            self._monitor.report_problem("the webhook's certificate cannot be used", reason=str(error))
        self._monitor.check()

    async def _refresh(self) -> None:
        # The bundles first: they are only written if they are still as they were before the Secret was read,
        # so that a replica that saw an older Secret cannot take back what one that saw a newer one wrote.
        bundles = await self._bundles()
        own = await self._own(bundles)
        self._known_bundle = tuple(dict.fromkeys((own.ca, *self._known_bundle)))[: certs.MAX_PREVIOUS_CAS]
        if await self._is_trusted(own, bundles):
            self._monitor.set_certificate(own.pair)

    async def _bundles(self) -> CaBundles | None:
        """None: nobody keeps them here, or there is no such configuration (yet), so nobody calls."""
        if not self._settings.webhook_configuration:
            return None
        try:
            return await self._store.read_bundles(self._settings.webhook_configuration)
        except NotFound:
            return None

    async def _own(self, bundles: CaBundles | None) -> CertBundle:
        """What the Secret holds, if that will do; else a new one, which it then holds."""
        settings, now = self._settings, self._monitor.clock.unix()
        secret = await self._store.read_secret(settings.certificate_secret, settings.namespace)
        own: CertBundle | None = None
        reason, hosts = "there is none", self._hosts
        if any(secret.data.values()):  # a Helm chart makes it empty, so that it goes with the release
            try:
                own = certs.load_bundle(secret.data)
            except InvalidCertificate as error:
                reason = "the Secret was broken"
                log.warning("the certificate's Secret is broken: it is replaced", why=str(error))
        if own is not None:
            if missing := self._hosts - own.pair.hosts:
                # Replicas of an older release may still want the others: they must not renew in turns.
                reason, hosts = f"it is not for {', '.join(sorted(missing))}", hosts | own.pair.hosts
            elif now >= own.pair.renew_at:
                reason = "two thirds of its life are over"
            else:
                return own
        previous_cas = (
            *((own.ca, *own.previous_cas) if own else ()),
            *self._known_bundle,
            *(one for have in (bundles.bundles if bundles else {}).values() for one in certs.authorities(have)),
        )
        generated = certs.generate_bundle(hosts, settings.certificate_days, now, previous_cas)
        await self._store.write_secret(
            settings.certificate_secret, settings.namespace, generated.data(), secret.version
        )
        log.info("new certificate made", why=reason, secret=settings.certificate_secret)
        return generated

    async def _is_trusted(self, own: CertBundle, bundles: CaBundles | None) -> bool:
        """Whether every API server trusts its authority; sees to it that they will."""
        if bundles is None:
            return True
        now = self._monitor.clock.monotonic()
        if any(bundle != own.bundle for bundle in bundles.bundles.values()):
            name = self._settings.webhook_configuration
            try:
                await self._store.write_bundles(name, dict.fromkeys(bundles.bundles, own.bundle), bundles.version)
            except NotFound:
                return True
            log.info("caBundle set", configuration=name, webhooks=len(bundles.bundles))
        if self._trusted is None or self._trusted[0] != own.ca:
            self._trusted = (own.ca, now)
        return self._monitor.tls_context.current is None or now - self._trusted[1] >= PROPAGATION_S


async def refresh_forever(source: CertSource, pause_s: float) -> None:
    """Look for ever, whatever happens."""
    while True:
        try:
            await source.refresh()
        except Exception:  # the task's outermost edge: what serves goes on with the certificate it has
            log.exception("look at the certificate failed")
        await asyncio.sleep(pause_s)


def _error_text(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror or error}"
    return str(error)
