"""The checks behind `rfork doctor`: what this machine has, and what to mend. The CLI prints them.

Each check takes what it judges as arguments, returns `Check` values and never raises; `run_checks`
calls all of them with what this machine says. Nothing is left behind: ports are tried and let go.
"""

from __future__ import annotations

import math
import os
import platform
import resource
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Literal

import httpx
import torch

from rfork.errors import SettingsError
from rfork.settings import LOOPBACK, Settings, TlsSettings
from rfork.transport.certificate import authority_expires_at, expires_at
from rfork.transport.choice import explain
from rfork.transport.tls import client_context, server_context
from rfork.transport.transfer_engine.library import LibraryState, library_state, rdma_devices

Status = Literal["ok", "warn", "fail", "skip"]
MOST_CLOCK_SKEW_S = 5.0
LEAST_SHARED_MEMORY = 64 << 20
SOON_DAYS = 14


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: what was looked at, how it stands, what was seen, and what to do about it."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def run_checks(settings: Settings) -> list[Check]:
    """Every check on this machine, in the order to print; takes at most a few planner timeouts."""
    devices = rdma_devices()
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return [
        check_python(platform.python_version_tuple(), torch.__version__),
        check_cuda([torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]),
        check_rdma(devices, settings.rdma_devices),
        check_mooncake(library_state(), cuda=torch.cuda.is_available()),
        check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], rdma=bool(devices)),
        check_shared_memory(shared.f_bavail * shared.f_frsize if shared else None),
        check_port("peer_port", settings.bind, settings.peer_port),
        check_port("http_port", settings.bind, settings.http_port),
        check_tls(settings),
        *check_planner(settings),
        *check_transports(settings),
    ]


def check_python(version: Sequence[str], torch_version: str) -> Check:
    """The interpreter and torch."""
    detail = f"Python {'.'.join(version)}, torch {torch_version}"
    if (int(version[0]), int(version[1])) < (3, 11):
        return Check("python", "fail", detail, "use Python 3.11 or newer")
    return Check("python", "ok", detail)


def check_cuda(names: Sequence[str]) -> Check:
    """The CUDA devices that torch sees."""
    if not names:
        return Check("cuda", "skip", "no CUDA device (weights in host memory work as well)")
    return Check("cuda", "ok", f"{len(names)} devices: {', '.join(dict.fromkeys(names))}")


def check_rdma(devices: Sequence[str], wanted: str) -> Check:
    """The RDMA devices, and whether those named by RFORK_RDMA_DEVICES are among them."""
    missing = [name for name in wanted.split(",") if name and name not in devices]
    if missing:
        found = ", ".join(devices) or "none"
        return Check(
            "rdma", "fail", f"no device {', '.join(missing)} (found: {found})", "correct RFORK_RDMA_DEVICES"
        )
    if not devices:
        return Check("rdma", "skip", "no device in /sys/class/infiniband")
    return Check("rdma", "ok", ", ".join(devices))


def check_mooncake(state: LibraryState, *, cuda: bool) -> Check:
    """The wheel that brings transfer_engine, and whether it fits this machine (`cuda`: it has a GPU)."""
    if not state.wheels and state.error:
        return Check("mooncake", "skip", "not installed, so no transfer_engine", state.hint)
    if state.error:
        return Check("mooncake", "fail", state.error, state.hint)
    detail = ", ".join(state.wheels) or "imports, but belongs to no known wheel"
    if cuda and not state.cuda:
        return Check(
            "mooncake",
            "warn",
            f"{detail} cannot read GPU memory",
            "pip uninstall it, then pip install 'rfork[mooncake-cuda12]' or 'rfork[mooncake-cuda13]'",
        )
    return Check("mooncake", "ok", detail)


def check_locked_memory(limit: int, *, rdma: bool) -> Check:
    """The locked-memory limit in bytes (RLIMIT_MEMLOCK): RDMA pins all registered memory."""
    unlimited = limit == resource.RLIM_INFINITY
    detail = "unlimited" if unlimited else f"{limit >> 10} KiB"
    if not rdma:
        return Check("memlock", "skip", f"{detail} (matters with RDMA only)")
    if unlimited:
        return Check("memlock", "ok", detail)
    fix = "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)"
    return Check("memlock", "warn", detail, fix)


def check_shared_memory(free: int | None) -> Check:
    """Free bytes of /dev/shm, which engines use between their processes; None: there is none."""
    if free is None:
        return Check("shm", "warn", "no /dev/shm", "mount a tmpfs there")
    if free < LEAST_SHARED_MEMORY:
        return Check("shm", "warn", f"{free >> 20} MiB free in /dev/shm", "raise it (docker: --shm-size=2g)")
    return Check("shm", "ok", f"{free >> 20} MiB free in /dev/shm")


def check_port(name: str, bind: str, port: int) -> Check:
    """Whether `bind:port` can be listened on; it is let go at once."""
    setting = f"RFORK_{name.upper()}"
    try:
        family, _, _, _, address = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        detail = f"{bind}:{port}: {error.strerror or error}"
        return Check(name, "fail", detail, f"set {setting} (0 picks one) or RFORK_BIND")
    return Check(name, "ok", f"{bind}:{port} is free" if port else f"any free port on {bind}")


def check_tls(settings: Settings) -> Check:
    """The TLS files: readable, belonging together, and not about to expire."""
    try:
        tls = settings.tls
        if not tls.enabled:
            if settings.bind in LOOPBACK:
                return Check("tls", "skip", "off; bound to loopback")
            detail = f"off, and bound to {settings.bind}"
            return Check("tls", "warn", detail, "set RFORK_TLS_CERTIFICATE and RFORK_TLS_KEY")
        server_context(tls)
        client_context(tls)
        days = (_first_end(tls) - time.time()) / 86400
    except (SettingsError, ValueError, OSError) as error:
        detail = " ".join(str(error).split())
        return Check("tls", "fail", detail, "correct or renew the files that RFORK_TLS_* name")
    if days < SOON_DAYS:
        return Check("tls", "warn", f"valid for {math.floor(days)} more days", "renew it soon")
    return Check("tls", "ok", f"valid for {math.floor(days)} more days")


def _first_end(tls: TlsSettings) -> float:
    ends = []
    if tls.certificate is not None and tls.key is not None:
        ends.append(expires_at(tls.certificate, tls.key))
    if tls.ca is not None:
        ends.append(authority_expires_at(tls.ca))
    return min(ends)


def check_planner(settings: Settings, transport: httpx.BaseTransport | None = None) -> list[Check]:
    """Whether the planner answers, takes our token, and shares our clock (`transport`: for tests)."""
    if settings.planner is None:
        detail = "none set: every fork falls back at once"
        return [Check("planner", "warn", detail, "set RFORK_PLANNER to its URL")]
    headers = {"Authorization": f"Bearer {settings.token.get_secret_value()}"} if settings.token else {}
    try:
        verify = client_context(settings.tls)
        with httpx.Client(
            base_url=settings.planner,
            timeout=settings.planner_timeout_s,
            verify=verify,
            transport=transport,
            headers=headers,
        ) as client:
            asked = time.time()
            health = client.get("/healthz")
            heard = time.time()
            listing = client.get("/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL, SettingsError, ValueError) as error:
        detail = f"{settings.planner}: {error or type(error).__name__}"
        return [Check("planner", "fail", detail, "start it (rfork planner), or correct RFORK_PLANNER")]
    if health.status_code != 200:
        detail = f"{settings.planner}/healthz answered {health.status_code}"
        return [Check("planner", "fail", detail, "is that a planner? correct RFORK_PLANNER")]
    return [
        Check("planner", "ok", f"{settings.planner} answers in {(heard - asked) * 1000:.0f} ms"),
        check_token(listing.status_code, shown=settings.token is not None),
        check_clock(health.headers.get("Date"), (asked + heard) / 2),
    ]


def check_token(status: int, *, shown: bool) -> Check:
    """What the planner's answer to a call that needs a token says about ours."""
    if status in (401, 403):
        detail = "the planner refuses the token" if shown else "the planner wants a token"
        return Check("token", "fail", detail, "set RFORK_TOKEN to the planner's RFORK_PLANNER_TOKEN")
    if status != 200:
        return Check(
            "token", "warn", f"the planner answered {status} to GET /v1/models", "see the planner's log"
        )
    return Check("token", "ok", "accepted" if shown else "the planner asks for none")


def check_clock(date: str | None, now: float) -> Check:
    """This clock (`now`, seconds since the epoch) against an HTTP Date header, which counts whole seconds."""
    if date is None:
        return Check("clock", "skip", "the planner sends no Date")
    try:
        # The header cuts the fraction off: half a second is its mean.
        skew = now - (parsedate_to_datetime(date).timestamp() + 0.5)
    except ValueError:
        return Check("clock", "skip", f"the planner sends an unreadable Date ({date})")
    if abs(skew) > MOST_CLOCK_SKEW_S:
        side = "ahead of" if skew > 0 else "behind"
        detail = f"{abs(skew):.0f} s {side} the planner's"
        return Check("clock", "warn", detail, "synchronise the clocks (NTP): leases have end times")
    return Check("clock", "ok", "agrees with the planner's")


def check_transports(settings: Settings) -> list[Check]:
    """One line for each transport: used or not, and why; a failure when none is left."""
    rows = explain(settings)
    checks: list[Check] = []
    for row in rows:
        if row.used:
            detail = f"used, choice {row.place}: {row.reason}"
            checks.append(Check(f"transport {row.name}", "ok", detail, row.hint))
        else:
            asked = settings.transports is not None and row.name in settings.transports
            status: Status = "fail" if asked else "skip"
            checks.append(Check(f"transport {row.name}", status, f"not used: {row.reason}", row.hint))
    if not any(row.used for row in rows):
        checks.append(Check("transports", "fail", "none can be used", "see the lines above"))
    return checks
