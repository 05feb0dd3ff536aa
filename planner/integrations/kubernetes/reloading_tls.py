"""What a server shows of itself in TLS, and what is said of that: logs, metrics, /readyz."""

from __future__ import annotations

import os
import ssl
from typing import Final

from prometheus_client import Counter, Gauge

from planner.integrations.health import IntegrationStatus
from planner.integrations.kubernetes.certs import CertPair, InvalidCertificate, date
from planner.leases import Clock
from rfork.logs import logger

LOG_INTERVAL_S: Final = 3600.0
log = logger("planner.integrations.certificates")


class ReloadingContext:
    """A server's side of TLS, whose certificate may change while it serves: new handshakes see the new."""

    def __init__(self) -> None:
        self.current: CertPair | None = None
        self._inner: ssl.SSLContext | None = None
        self.context = _context()
        # Not load_cert_chain on this one: OpenSSL would keep an RSA certificate beside an ECDSA one that
        # takes its place, and go on showing it to some.
        self.context.sni_callback = self._choose

    def set_certificate(self, certificate: CertPair) -> None:
        """Show this one from now on. Raises InvalidCertificate, and then goes on as before."""
        inner = _context()
        # A file that lies in memory: OpenSSL reads keys from files alone, and this key is on no disk.
        descriptor = os.memfd_create("certificate")
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(certificate.key + b"\n" + certificate.chain)
            inner.load_cert_chain(f"/proc/self/fd/{descriptor}")
        except (ssl.SSLError, OSError) as error:
            raise InvalidCertificate(f"OpenSSL does not take it: {error}") from None
        finally:
            os.close(descriptor)
        self._inner, self.current = inner, certificate

    def _choose(self, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> int | None:
        if self._inner is None:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self._inner
        return None


class CertificateMonitor:
    """Says what is wrong with a certificate: each thing when it begins, and once an hour while it lasts."""

    def __init__(self, tls_context: ReloadingContext, status: IntegrationStatus, clock: Clock) -> None:
        self.tls_context, self.clock = tls_context, clock
        self._status = status
        self._logged_at: dict[str, float] = {}
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
        self.change_count = Counter(
            "rfork_webhook_certificate_changes",
            "Certificates shown, one after the other",
            registry=status.registry,
        )
        self.problem_count = Counter(
            "rfork_webhook_certificate_troubles",
            "Looks at the certificate that something was wrong with",
            registry=status.registry,
        )

    def report_problem(self, problem: str, reason: str) -> None:
        """Something is wrong: counted, and told now or when an hour is over."""
        self.problem_count.inc()
        self.log_problem(problem, why=reason)
        if self.tls_context.current is None:
            self._status.not_ready(f"no certificate yet: {problem}: {reason}")

    def log_problem(self, event: str, **fields: str) -> None:
        """An error in the log, the same one no more than once an hour."""
        key, now = " ".join((event, *fields.values())), self.clock.monotonic()
        self._logged_at = {
            logged_event: at for logged_event, at in self._logged_at.items() if now - at < LOG_INTERVAL_S
        }
        if key not in self._logged_at:
            self._logged_at[key] = now
            log.error(event, **fields)

    def set_certificate(self, certificate: CertPair) -> bool:
        """Show it, unless it is not valid and the present one is. Raises InvalidCertificate."""
        now, current = self.clock.unix(), self.tls_context.current
        if certificate == current:
            return True
        if current is not None and current.valid(now) and not certificate.valid(now):
            self.report_problem("the new certificate is not valid", reason=_validity_text(certificate))
            return False
        self.tls_context.set_certificate(certificate)
        self.change_count.inc()
        log.info("certificate shown", hosts=",".join(sorted(certificate.hosts)), life=_validity_text(certificate))
        return True

    def check(self) -> None:
        """At the end of each look: what is shown, and whether clients take it."""
        certificate, now = self.tls_context.current, self.clock.unix()
        if certificate is None:
            return
        self._ends.set(certificate.not_after)
        self._valid.set(certificate.valid(now))
        # Even with one that ended: this machine's clock may be what is wrong.
        self._status.ready()
        if now >= certificate.not_after:
            self.log_problem(
                "THE WEBHOOK'S CERTIFICATE HAS EXPIRED: Pods start without rfork",
                life=_validity_text(certificate),
            )
        elif now < certificate.not_before:
            self.log_problem(
                "the webhook's certificate is not valid yet: is this machine's clock right?",
                life=_validity_text(certificate),
            )


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _validity_text(certificate: CertPair) -> str:
    return f"{date(certificate.not_before)} to {date(certificate.not_after)}"
