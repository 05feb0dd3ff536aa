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

from planner.hooks.kubernetes import authority
from planner.hooks.kubernetes.authority import CERTIFICATE, KEY, BadCertificate, Own
from planner.hooks.kubernetes.cluster import ClusterUnavailable, Conflict, Gone
from planner.hooks.kubernetes.secrets import BundlesSeen, SecretStore
from planner.hooks.kubernetes.showing import Watch
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.settings import HookSettings

SETTLE_S: Final = 5.0
"""How long API servers may take to hear of a new caBundle."""
ATTEMPTS: Final = 4
"""Looks in a row of which each met another replica's change."""
log = logger("planner.hooks.certificates")


class Keeper(Protocol):
    """Keeps a LiveContext's certificate up to date."""

    async def look(self) -> None:
        """Look once whether something changed, and do what is to be done. Raises nothing that it knows of."""


class FolderKeeper:
    """Shows tls.crt and tls.key of a folder; a pair that cannot be used leaves the one before it shown."""

    def __init__(self, folder: Path, watch: Watch) -> None:
        """Raises SettingsError where the folder has nothing that can be shown."""
        self._folder, self._watch = folder, watch
        try:
            self._take()
        except (BadCertificate, OSError) as error:
            raise SettingsError(
                f"the webhook's certificate cannot be used: {_told(error)}",
                hint=f"RFORK_HOOK_CERTIFICATES is a folder with {CERTIFICATE} and {KEY}, both PEM",
            ) from None

    async def look(self) -> None:
        """As in Keeper."""
        try:
            self._take()
        except (BadCertificate, OSError) as error:
            self._watch.trouble(f"the certificate in {self._folder} cannot be used", why=_told(error))
        self._watch.judge()

    def _take(self) -> None:
        # Read once: what is checked is what is shown, whatever happens to the files meanwhile.
        chain, key = ((self._folder / name).read_bytes() for name in (CERTIFICATE, KEY))
        shown = self._watch.live.shown
        if shown is None or (chain, key) != (shown.chain, shown.key):
            self._watch.show(authority.read_shown(chain, key))


class SecretKeeper:
    """Makes and renews a certificate of the webhook's own, with the other replicas."""

    def __init__(self, settings: HookSettings, store: SecretStore, watch: Watch) -> None:
        """Raises SettingsError for hosts that no certificate can be for."""
        self._settings, self._store, self._watch = settings, store, watch
        self._known: tuple[bytes, ...] = ()
        """Authorities of certificates that this replica has seen in the Secret, the latest first."""
        self._trusted: tuple[bytes, float] | None = None
        """The authority that was seen to be trusted last, and since when (monotonic)."""
        try:
            self._hosts = frozenset(map(authority.canonical, settings.webhook_hosts))
        except ValueError as error:
            raise SettingsError(f"RFORK_HOOK_WEBHOOK_HOSTS: {error}") from None
        if not self._hosts:
            raise SettingsError("RFORK_HOOK_WEBHOOK_HOSTS: an own certificate has to be for some host")

    async def look(self) -> None:
        """As in Keeper."""
        try:
            for _ in range(ATTEMPTS):
                try:
                    await self._look()
                    break
                except Conflict:
                    continue  # another replica was quicker: what did it do?
        except ClusterUnavailable as error:
            self._watch.trouble("the webhook's certificate cannot be looked after", why=str(error))
        except BadCertificate as error:
            self._watch.trouble("the webhook's certificate cannot be used", why=str(error))
        self._watch.judge()

    async def _look(self) -> None:
        # The bundles first: they are only written if they are still as they were before the Secret was read,
        # so that a replica that saw an older Secret cannot take back what one that saw a newer one wrote.
        bundles = await self._bundles()
        own = await self._own(bundles)
        self._known = tuple(dict.fromkeys((own.authority, *self._known)))[: authority.MOST_EARLIER]
        if await self._is_trusted(own, bundles):
            self._watch.show(own.shown)

    async def _bundles(self) -> BundlesSeen | None:
        """None: nobody keeps them here, or there is no such configuration (yet), so nobody calls."""
        if not self._settings.webhook_configuration:
            return None
        try:
            return await self._store.read_bundles(self._settings.webhook_configuration)
        except Gone:
            return None

    async def _own(self, bundles: BundlesSeen | None) -> Own:
        """What the Secret holds, if that will do; else a new one, which it then holds."""
        settings, now = self._settings, self._watch.clock.unix()
        seen = await self._store.read_secret(settings.certificate_secret, settings.namespace)
        own: Own | None = None
        why, hosts = "there is none", self._hosts
        if any(seen.data.values()):  # a Helm chart makes it empty, so that it goes with the release
            try:
                own = authority.read_own(seen.data)
            except BadCertificate as error:
                why = "the Secret was broken"
                log.warning("the certificate's Secret is broken: it is replaced", why=str(error))
        if own is not None:
            if missing := self._hosts - own.shown.hosts:
                # Replicas of an older release may still want the others: they must not renew in turns.
                why, hosts = f"it is not for {', '.join(sorted(missing))}", hosts | own.shown.hosts
            elif now >= own.shown.renew_at:
                why = "two thirds of its life are over"
            else:
                return own
        earlier = (
            *((own.authority, *own.earlier) if own else ()),
            *self._known,
            *(
                one
                for have in (bundles.bundles if bundles else {}).values()
                for one in authority.authorities(have)
            ),
        )
        made = authority.make_own(hosts, settings.certificate_days, now, earlier)
        await self._store.write_secret(
            settings.certificate_secret, settings.namespace, made.data(), seen.version
        )
        log.info("new certificate made", why=why, secret=settings.certificate_secret)
        return made

    async def _is_trusted(self, own: Own, bundles: BundlesSeen | None) -> bool:
        """Whether every API server trusts its authority; sees to it that they will."""
        if bundles is None:
            return True
        now = self._watch.clock.monotonic()
        if any(bundle != own.bundle for bundle in bundles.bundles.values()):
            name = self._settings.webhook_configuration
            try:
                await self._store.write_bundles(
                    name, dict.fromkeys(bundles.bundles, own.bundle), bundles.version
                )
            except Gone:
                return True
            log.info("caBundle set", configuration=name, webhooks=len(bundles.bundles))
        if self._trusted is None or self._trusted[0] != own.authority:
            self._trusted = (own.authority, now)
        return self._watch.live.shown is None or now - self._trusted[1] >= SETTLE_S


async def keep(keeper: Keeper, pause_s: float) -> None:
    """Look for ever, whatever happens."""
    while True:
        try:
            await keeper.look()
        except Exception:  # the task's outermost edge: what serves goes on with the certificate it has
            log.exception("look at the certificate failed")
        await asyncio.sleep(pause_s)


def _told(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror or error}"
    return str(error)
