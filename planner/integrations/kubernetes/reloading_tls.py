"""TLS server context with a replaceable certificate, and the monitoring of that certificate."""

from __future__ import annotations

import os
import ssl
from typing import Final

from prometheus_client import Counter, Gauge

from planner.clock import Clock
from planner.integrations.health import IntegrationStatus
from planner.integrations.kubernetes.certs import CertPair, InvalidCertificate, date
from rfork.logs import logger

LOG_INTERVAL_S: Final = 3600.0
log = logger("planner.integrations.certificates")


class ReloadingContext:
    """Server-side TLS context whose certificate can change while it serves. New handshakes use the new one."""

    def __init__(self) -> None:
        self.current: CertPair | None = None
        self._inner: ssl.SSLContext | None = None
        self.context = _context()
        # Not load_cert_chain on this context: OpenSSL would keep an RSA certificate next to a new ECDSA one,
        # and keep using it for some clients.
        self.context.sni_callback = self._choose

    def set_certificate(self, certificate: CertPair) -> None:
        """Use this certificate from now on. Raises InvalidCertificate and then keeps the previous one."""
        inner = _context()
        # An in-memory file: OpenSSL reads keys only from files, and this key must not be written to disk.
        descriptor = os.memfd_create("certificate")
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(certificate.key + b"\n" + certificate.chain)
            inner.load_cert_chain(f"/proc/self/fd/{descriptor}")
        except (ssl.SSLError, OSError) as error:
            raise InvalidCertificate(f"OpenSSL rejects it: {error}") from None
        finally:
            os.close(descriptor)
        self._inner, self.current = inner, certificate

    def _choose(self, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> int | None:
        if self._inner is None:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self._inner
        return None


class CertificateMonitor:
    """Reports problems of a certificate: each when it starts, and once an hour while it lasts."""

    def __init__(self, tls_context: ReloadingContext, status: IntegrationStatus, clock: Clock) -> None:
        self.tls_context, self.clock = tls_context, clock
        self._status = status
        self._logged_at: dict[str, float] = {}
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
        self.change_count = Counter(
            "rfork_webhook_certificate_changes",
            "Certificates that were put into use",
            registry=status.registry,
        )
        self.problem_count = Counter(
            "rfork_webhook_certificate_errors",
            "Checks of the certificate that found a problem",
            registry=status.registry,
        )

    def report_problem(self, problem: str, reason: str) -> None:
        """Count a problem, and log it unless it was logged within the last hour."""
        self.problem_count.inc()
        self.log_problem(problem, reason=reason)
        if self.tls_context.current is None:
            self._status.not_ready(f"no certificate yet: {problem}: {reason}")

    def log_problem(self, event: str, **fields: str) -> None:
        """Log an error, at most once an hour for equal errors."""
        key, now = " ".join((event, *fields.values())), self.clock.monotonic()
        self._logged_at = {
            logged_event: at for logged_event, at in self._logged_at.items() if now - at < LOG_INTERVAL_S
        }
        if key not in self._logged_at:
            self._logged_at[key] = now
            log.error(event, **fields)

    def set_certificate(self, certificate: CertPair) -> bool:
        """Use this certificate, unless it is invalid and the current one is valid. Raises InvalidCertificate."""
        now, current = self.clock.unix(), self.tls_context.current
        if certificate == current:
            return True
        if current is not None and current.valid(now) and not certificate.valid(now):
            self.report_problem(
                "the new webhook certificate is not valid, keeping the current one", reason=_validity_text(certificate)
            )
            return False
        self.tls_context.set_certificate(certificate)
        self.change_count.inc()
        log.info(
            "webhook certificate in use",
            hosts=",".join(sorted(certificate.hosts)),
            validity=_validity_text(certificate),
        )
        return True

    def check(self) -> None:
        """Update metrics and status from the certificate in use. Call after each refresh."""
        certificate, now = self.tls_context.current, self.clock.unix()
        if certificate is None:
            return
        self._ends.set(certificate.not_after)
        self._valid.set(certificate.valid(now))
        # Ready even with an expired certificate: this machine's clock may be wrong.
        self._status.ready()
        if now >= certificate.not_after:
            self.log_problem(
                "webhook certificate expired: Pods start without rfork",
                validity=_validity_text(certificate),
            )
        elif now < certificate.not_before:
            self.log_problem(
                "webhook certificate not valid yet: check this machine's clock",
                validity=_validity_text(certificate),
            )


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _validity_text(certificate: CertPair) -> str:
    return f"{date(certificate.not_before)} to {date(certificate.not_after)}"
