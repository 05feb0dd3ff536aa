"""The doctor's checks: each judged on literal inputs, no socket opened."""

from __future__ import annotations

import resource
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rfork.settings import Settings
from rfork.transport.doctor import (
    Status,
    check_clock,
    check_cuda,
    check_locked_memory,
    check_mooncake,
    check_planner,
    check_python,
    check_rdma,
    check_shared_memory,
    check_tls,
    check_token,
)
from rfork.transport.transfer_engine.library import LibraryState

WHEEL = "mooncake-transfer-engine-non-cuda"
PLANNER = Settings(planner="http://planner.test")


def write_pair(folder: Path, days: float) -> tuple[Path, Path]:
    """A self-signed certificate that ends in `days`, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rfork.test")])
    end = datetime.now(UTC) + timedelta(days=days)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(end - timedelta(days=100))
        .not_valid_after(end)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(exist_ok=True)
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return paths


@pytest.mark.parametrize(
    ("days", "status", "said"),
    [(90.5, "ok", "90 more days"), (3.5, "warn", "3 more days"), (-1, "fail", "expired")],
)
def test_certificates_are_dated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float, status: Status, said: str
) -> None:
    """A certificate is fine, ends soon, or has expired."""
    certificate, key = write_pair(tmp_path, days)
    monkeypatch.setenv("RFORK_TLS_CERTIFICATE", str(certificate))
    monkeypatch.setenv("RFORK_TLS_KEY", str(key))
    check = check_tls(Settings())
    assert (status, True) == (check.status, said in check.detail)


def test_a_key_of_another_certificate_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificate and key that do not belong together are named."""
    monkeypatch.setenv("RFORK_TLS_CERTIFICATE", str(write_pair(tmp_path / "one", 90)[0]))
    monkeypatch.setenv("RFORK_TLS_KEY", str(write_pair(tmp_path / "other", 90)[1]))
    assert "fail" == check_tls(Settings()).status


def test_a_missing_file_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CA file that is not there is a failure that names it."""
    monkeypatch.setenv("RFORK_TLS_CA", str(tmp_path / "none.pem"))
    check = check_tls(Settings())
    assert ("fail", True) == (check.status, "none.pem" in check.detail)


@pytest.mark.parametrize(("bind", "status"), [("127.0.0.1", "skip"), ("0.0.0.0", "warn")])
def test_no_tls_matters_off_loopback(bind: str, status: Status) -> None:
    """Without TLS, only a bind that others reach is worth a warning."""
    assert status == check_tls(Settings(bind=bind)).status


@pytest.mark.parametrize(
    ("state", "cuda", "status"),
    [
        (LibraryState((WHEEL,)), False, "ok"),
        (LibraryState((WHEEL,)), True, "warn"),
        (LibraryState((), "No module named 'mooncake'", "pip"), False, "skip"),
        (LibraryState((WHEEL,), "libibverbs.so.1: cannot open", "apt"), False, "fail"),
    ],
    ids=["fits", "no CUDA in the wheel", "absent", "broken"],
)
def test_mooncake(state: LibraryState, cuda: bool, status: Status) -> None:
    """An absent wheel is no fault, a broken one is, and one without CUDA is worth a word on a GPU machine."""
    assert status == check_mooncake(state, cuda=cuda).status


@pytest.mark.parametrize(
    ("devices", "wanted", "status"),
    [([], "", "skip"), (["mlx5_0"], "", "ok"), (["mlx5_0"], "mlx5_0", "ok"), (["mlx5_0"], "mlx5_9", "fail")],
)
def test_rdma(devices: list[str], wanted: str, status: Status) -> None:
    """Devices asked for must be there."""
    assert status == check_rdma(devices, wanted).status


@pytest.mark.parametrize(
    ("limit", "rdma", "status"),
    [(8 << 20, True, "warn"), (8 << 20, False, "skip"), (resource.RLIM_INFINITY, True, "ok")],
)
def test_locked_memory(limit: int, rdma: bool, status: Status) -> None:
    """The limit matters where memory is pinned."""
    assert status == check_locked_memory(limit, rdma=rdma).status


def test_the_machine() -> None:
    """Python, CUDA and shared memory are judged by what is passed."""
    assert ["ok", "fail", "skip", "ok", "warn", "warn", "ok"] == [
        check_python(("3", "11", "7"), "2.13.0").status,
        check_python(("3", "10", "1"), "2.13.0").status,
        check_cuda([]).status,
        check_cuda(["NVIDIA H200"]).status,
        check_shared_memory(None).status,
        check_shared_memory(1 << 20).status,
        check_shared_memory(1 << 30).status,
    ]


@pytest.mark.parametrize(
    ("status", "shown", "expected"),
    [(200, True, "ok"), (200, False, "ok"), (401, False, "fail"), (403, True, "fail"), (500, True, "warn")],
)
def test_token(status: int, shown: bool, expected: Status) -> None:
    """A refusal is a failure, an error of the planner a warning."""
    assert expected == check_token(status, shown=shown).status


@pytest.mark.parametrize(
    ("date", "offset", "status"),
    [
        ("Thu, 01 Jan 1970 00:16:40 GMT", 0.9, "ok"),
        ("Thu, 01 Jan 1970 00:16:40 GMT", 60, "warn"),
        ("Thu, 01 Jan 1970 00:16:40 GMT", -60, "warn"),
        (None, 0, "skip"),
        ("yesterday", 0, "skip"),
    ],
)
def test_clock(date: str | None, offset: float, status: Status) -> None:
    """More than five seconds to either side is worth a warning."""
    assert status == check_clock(date, 1000 + offset).status


def test_a_planner_that_answers() -> None:
    """Reachable, token accepted, clock unknown."""
    answers = httpx.MockTransport(lambda request: httpx.Response(200, json={}))
    assert [("planner", "ok"), ("token", "ok"), ("clock", "skip")] == [
        (check.name, check.status) for check in check_planner(PLANNER, answers)
    ]


def test_a_planner_that_is_down() -> None:
    """Unreachable is one failure that names the URL."""

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Connection refused")

    (check,) = check_planner(PLANNER, httpx.MockTransport(refuse))
    assert ("fail", "http://planner.test: Connection refused") == (check.status, check.detail)


def test_no_planner_is_worth_a_warning() -> None:
    """Without a planner every fork falls back."""
    assert ["warn"] == [check.status for check in check_planner(Settings())]
