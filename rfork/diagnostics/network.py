"""Checks of ports, TLS and the planner."""

from __future__ import annotations

import math
import socket
import time
from email.utils import parsedate_to_datetime

import httpx

from rfork.addresses import LOOPBACK, redacted
from rfork.diagnostics.result import CheckResult
from rfork.errors import SettingsError, reason_of
from rfork.net.tls import ca_expires_at, client_context, not_after, server_context
from rfork.planner_client.rest import unreachable_error
from rfork.settings import InstanceSettings, TlsSettings

MAX_CLOCK_SKEW_S = 5.0
SOON_DAYS = 14


def check_port(name: str, bind: str, port: int) -> CheckResult:
    """Check that `bind:port` can be listened on. The socket is closed immediately."""
    setting = f"RFORK_{name.upper()}"
    try:
        family, _, _, _, address = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        detail = f"cannot listen on {bind}:{port}: {error.strerror or error}"
        return CheckResult(name, "fail", detail, f"correct {setting} (0 picks a free port) or RFORK_BIND")
    return CheckResult(name, "ok", f"{bind}:{port} is free" if port else f"any free port on {bind}")


def check_tls(settings: InstanceSettings) -> CheckResult:
    """Check that the TLS files are readable, belong together and do not expire soon."""
    try:
        tls = settings.tls
        if not tls.enabled:
            if settings.bind in LOOPBACK:
                return CheckResult("tls", "off", f"not required: RFORK_BIND is {settings.bind}, on this machine only")
            detail = f"off, but other hosts can connect (RFORK_BIND is {settings.bind}): weights travel unencrypted"
            return CheckResult("tls", "warn", detail, "set RFORK_TLS_CERTIFICATE and RFORK_TLS_KEY")
        server_context(tls)
        client_context(tls)
        days = math.floor((_earliest_expiry(tls) - time.time()) / 86400)
        if days < 0:
            raise SettingsError("the certificate or its authority has expired")
    except (SettingsError, ValueError, OSError) as error:
        detail = " ".join(str(error).split())
        return CheckResult("tls", "fail", detail, "correct or renew the files named by RFORK_TLS_*")
    if days < SOON_DAYS:
        detail = f"the certificate or its authority {_expiry_text(days)}"
        return CheckResult("tls", "warn", detail, "renew the files that RFORK_TLS_CERTIFICATE and RFORK_TLS_CA name")
    return CheckResult("tls", "ok", f"the first of its certificates {_expiry_text(days)}")


def _expiry_text(days: int) -> str:
    return f"expires in {days} {'day' if days == 1 else 'days'}"


def _earliest_expiry(tls: TlsSettings) -> float:
    ends = []
    if tls.certificate is not None:
        ends.append(not_after(tls.certificate))
    if tls.ca is not None:
        ends.append(ca_expires_at(tls.ca))
    return min(ends)


def check_planner(settings: InstanceSettings, transport: httpx.BaseTransport | None = None) -> list[CheckResult]:
    """Check that the planner responds, accepts the token and agrees on the time. `transport`: for tests."""
    if settings.planner is None:
        detail = "not set: every fork falls back immediately"
        return [CheckResult("planner", "warn", detail, "set RFORK_PLANNER to its URL")]
    url = redacted(settings.planner)
    try:
        token = settings.bearer
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        verify = client_context(settings.tls)
        with httpx.Client(
            base_url=settings.planner,
            timeout=settings.planner_timeout_s,
            verify=verify,
            transport=transport,
            headers=headers,
            trust_env=False,  # like the planner client: no proxies
        ) as client:
            sent_at = time.time()
            health = client.get("/healthz")
            received_at = time.time()
            listing = client.get("/v1/models")
    except httpx.RequestError as error:
        failure = unreachable_error(url, error, settings.planner_timeout_s)
        # The name of the check is the message's first word.
        return [CheckResult("planner", "fail", str(failure).removeprefix("planner "), failure.hint)]
    except SettingsError as error:
        return [CheckResult("planner", "fail", str(error), error.hint or "correct that setting")]
    except UnicodeEncodeError:
        detail = "not requested: the token contains characters that are not allowed in an HTTP header"
        return [CheckResult("planner", "fail", detail, "correct RFORK_TOKEN: visible ASCII characters only")]
    except (httpx.InvalidURL, ValueError) as error:
        reason = reason_of(error) if url == settings.planner else "malformed"  # it may contain part of the password
        return [CheckResult("planner", "fail", f"invalid URL {url}: {reason}", "correct RFORK_PLANNER")]
    if health.status_code != 200:
        detail = f"{url}/healthz returned status {health.status_code}, so it may not be a planner"
        return [CheckResult("planner", "fail", detail, "correct RFORK_PLANNER")]
    return [
        CheckResult("planner", "ok", f"{url} responded in {(received_at - sent_at) * 1000:.0f} ms"),
        check_token(listing.status_code, token_sent=token is not None),
        check_clock(health.headers.get("Date"), (sent_at + received_at) / 2),
    ]


def check_token(status: int, *, token_sent: bool) -> CheckResult:
    """Check the token. `status`: of the planner's response to a request that requires one."""
    if status in (401, 403):
        detail = "the planner rejects the token" if token_sent else "the planner requires a token"
        fix = "set RFORK_TOKEN, or the file RFORK_TOKEN_FILE, to one of the planner's tokens"
        return CheckResult("token", "fail", detail, fix)
    if status != 200:
        return CheckResult("token", "warn", f"GET /v1/models returned status {status}", "check the planner's log")
    return CheckResult("token", "ok", "accepted" if token_sent else "not required")


def check_clock(date: str | None, now: float) -> CheckResult:
    """Compare this clock (`now`, seconds since the epoch) with an HTTP Date header, which has a resolution of 1 s."""
    if date is None:
        return CheckResult("clock", "skip", "the planner sends no Date header")
    try:
        # The header truncates the fraction, which is half a second on average.
        skew = now - (parsedate_to_datetime(date).timestamp() + 0.5)
    except ValueError:
        return CheckResult("clock", "skip", f"the planner sends an invalid Date header ({date})")
    if abs(skew) > MAX_CLOCK_SKEW_S:
        side = "ahead of" if skew > 0 else "behind"
        detail = f"{abs(skew):.0f} s {side} the planner's clock"
        fix = "synchronise the clocks of both hosts (NTP): leases on weights expire at a given time"
        return CheckResult("clock", "warn", detail, fix)
    return CheckResult("clock", "ok", "agrees with the planner's clock")
