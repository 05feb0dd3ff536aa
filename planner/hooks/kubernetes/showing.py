"""What a server shows of itself in TLS, and what is said of that: logs, metrics, /readyz."""

from __future__ import annotations

import os
import ssl
from typing import Final

from prometheus_client import Counter, Gauge

from planner.hooks.kubernetes.authority import BadCertificate, Shown, date
from planner.hooks.probes import Status
from planner.leases import Clock
from rfork.logs import logger

REMIND_S: Final = 3600.0
log = logger("planner.hooks.certificates")


class LiveContext:
    """A server's side of TLS, whose certificate may change while it serves: new handshakes see the new."""

    def __init__(self) -> None:
        self.shown: Shown | None = None
        self._inner: ssl.SSLContext | None = None
        self.context = _context()
        # Not load_cert_chain on this one: OpenSSL would keep an RSA certificate beside an ECDSA one that
        # takes its place, and go on showing it to some.
        self.context.sni_callback = self._choose

    def show(self, shown: Shown) -> None:
        """Show this one from now on. Raises BadCertificate, and then goes on as before."""
        inner = _context()
        # A file that lies in memory: OpenSSL reads keys from files alone, and this key is on no disk.
        descriptor = os.memfd_create("certificate")
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(shown.key + b"\n" + shown.chain)
            inner.load_cert_chain(f"/proc/self/fd/{descriptor}")
        except (ssl.SSLError, OSError) as error:
            raise BadCertificate(f"OpenSSL does not take it: {error}") from None
        finally:
            os.close(descriptor)
        self._inner, self.shown = inner, shown

    def _choose(self, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> int | None:
        if self._inner is None:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self._inner
        return None


class Watch:
    """Says what is wrong with a certificate: each thing when it begins, and once an hour while it lasts."""

    def __init__(self, live: LiveContext, status: Status, clock: Clock) -> None:
        self.live, self.clock = live, clock
        self._status = status
        self._said: dict[str, float] = {}
        self._ends = Gauge(
            "rfork_webhook_certificate_not_after_seconds",
            "When the certificate that is shown ends, in seconds since the epoch; 0: none is shown",
            registry=status.registry,
        )
        self._valid = Gauge(
            "rfork_webhook_certificate_valid",
            "Whether the certificate that is shown is valid by this machine's clock",
            registry=status.registry,
        )
        self.changes = Counter(
            "rfork_webhook_certificate_changes",
            "Certificates shown, one after the other",
            registry=status.registry,
        )
        self.troubles = Counter(
            "rfork_webhook_certificate_troubles",
            "Looks at the certificate that something was wrong with",
            registry=status.registry,
        )

    def trouble(self, what: str, why: str) -> None:
        """Something is wrong: counted, and told now or when an hour is over."""
        self.troubles.inc()
        self.remind(what, why=why)
        if self.live.shown is None:
            self._status.not_ready(f"no certificate yet: {what}: {why}")

    def remind(self, event: str, **fields: str) -> None:
        """An error in the log, the same one no more than once an hour."""
        key, now = " ".join((event, *fields.values())), self.clock.monotonic()
        self._said = {said: at for said, at in self._said.items() if now - at < REMIND_S}
        if key not in self._said:
            self._said[key] = now
            log.error(event, **fields)

    def show(self, shown: Shown) -> bool:
        """Show it, unless it is not valid and the present one is. Raises BadCertificate."""
        now, present = self.clock.unix(), self.live.shown
        if shown == present:
            return True
        if present is not None and present.valid(now) and not shown.valid(now):
            self.trouble("the new certificate is not valid", why=_life(shown))
            return False
        self.live.show(shown)
        self.changes.inc()
        log.info("certificate shown", hosts=",".join(sorted(shown.hosts)), life=_life(shown))
        return True

    def judge(self) -> None:
        """At the end of each look: what is shown, and whether clients take it."""
        shown, now = self.live.shown, self.clock.unix()
        if shown is None:
            return
        self._ends.set(shown.not_after)
        self._valid.set(shown.valid(now))
        # Even with one that ended: this machine's clock may be what is wrong.
        self._status.ready()
        if now >= shown.not_after:
            self.remind("THE WEBHOOK'S CERTIFICATE HAS EXPIRED: Pods start without rfork", life=_life(shown))
        elif now < shown.not_before:
            self.remind(
                "the webhook's certificate is not valid yet: is this machine's clock right?",
                life=_life(shown),
            )


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _life(shown: Shown) -> str:
    return f"{date(shown.not_before)} to {date(shown.not_after)}"
