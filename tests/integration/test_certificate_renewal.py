"""TLS files that are replaced on disk: planner, sources and clients load them without a restart."""

from __future__ import annotations

import datetime
import logging
import ssl
import time
from pathlib import Path

import pytest
import trustme

from planner.server import run_in_thread
from rfork.errors import LeaseRejected, PlannerUnreachable
from rfork.image.memory import compute_manifest
from rfork.net.tls import CurrentContext, client_context, not_after
from rfork.peer.client import PeerClient
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.deadline_transport import DeadlineTransport
from rfork.settings import InstanceSettings, PlannerSettings, TlsSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.transport.http import HttpTransport
from tests.unit.source.seeds import IMAGE

SOON_S = 60.0


class TlsFiles:
    """TLS files of one process, which can be renewed."""

    def __init__(self, folder: Path, authority: trustme.CA) -> None:
        folder.mkdir()
        self.tls = TlsSettings(certificate=folder / "certificate", key=folder / "key", ca=folder / "authorities")
        self._folder = folder
        self.write_certificate(authority)
        self.write_authorities(authority)

    def write_certificate(self, authority: trustme.CA, *, ends: datetime.datetime | None = None) -> None:
        """Write a new certificate by this authority."""
        leaf = authority.issue_cert("127.0.0.1", not_after=ends)
        self._replace("key", leaf.private_key_pem.bytes())
        self._replace("certificate", leaf.cert_chain_pems[0].bytes())

    def write_authorities(self, *authorities: trustme.CA) -> None:
        """Write these authorities as the trusted ones."""
        self._replace("authorities", b"".join(each.cert_pem.bytes() for each in authorities))

    def _replace(self, name: str, content: bytes) -> None:
        following = self._folder / "next"
        following.write_bytes(content)
        following.rename(self._folder / name)


@pytest.fixture
def old() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def new() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server(tmp_path: Path, old: trustme.CA, monkeypatch: pytest.MonkeyPatch) -> TlsFiles:
    """TLS files of the servers in this process."""
    made = TlsFiles(tmp_path / "server", old)
    for name in ("certificate", "key", "ca"):
        monkeypatch.setenv(f"RFORK_TLS_{name.upper()}", str(getattr(made.tls, name)))
    return made


def test_a_planner_and_its_clients_load_renewed_files(
    tmp_path: Path, server: TlsFiles, old: trustme.CA, new: trustme.CA
) -> None:
    """This includes a change of authority on both sides, the largest change of a renewal."""
    client = TlsFiles(tmp_path / "client", old)
    context = CurrentContext(client.tls, client_context)
    with run_in_thread(PlannerSettings(port=0)) as url:
        with PlannerClient(url, transport=DeadlineTransport(context)) as planner:
            assert [] == planner.models()
        server.write_authorities(old, new)
        server.write_certificate(new)
        with PlannerClient(url, tls=client.tls) as other, pytest.raises(PlannerUnreachable) as raised:
            other.models()
        assert "RFORK_TLS_CA" in raised.value.hint
        client.write_authorities(new)
        client.write_certificate(new)
        server.write_authorities(new)
        with PlannerClient(url, tls=client.tls) as other:
            assert [] == other.models()
        with PlannerClient(url, transport=DeadlineTransport(context)) as planner:  # opens a new connection
            assert [] == planner.models()


def test_an_expired_certificate_is_named(server: TlsFiles, old: trustme.CA) -> None:
    """The planner is running: the client's hint is to renew its certificate, not to start it."""
    with run_in_thread(PlannerSettings(port=0)) as url:
        server.write_certificate(old, ends=datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=1))
        with PlannerClient(url, tls=server.tls) as planner, pytest.raises(PlannerUnreachable) as raised:
            planner.models()
    assert "expired" in str(raised.value)
    assert "renew" in raised.value.hint
    assert "start it" not in raised.value.hint


def test_the_planner_reports_its_certificates_expiry(server: TlsFiles, old: trustme.CA) -> None:
    """The time is that of the current file."""
    ends = datetime.datetime(2031, 5, 4, 3, 2, 1, tzinfo=datetime.timezone.utc)
    with run_in_thread(PlannerSettings(port=0)) as url:
        server.write_certificate(old, ends=ends)
        with PlannerClient(url, tls=server.tls) as planner:
            text = planner._rest.call("GET", "/metrics").text
    metric_line = next(line for line in text.splitlines() if line.startswith("rfork_planner_certificate_not_after"))
    assert ends.timestamp() == float(metric_line.split()[-1])


@pytest.mark.parametrize("year", [2031, 2061])
def test_certificate_expiry_is_read_in_both_encodings(tmp_path: Path, year: int) -> None:
    """Years from 2050 on are encoded differently; the expiry of an expired certificate is read too."""
    ends = datetime.datetime(year, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)
    trustme.CA().issue_cert("a", not_after=ends).cert_chain_pems[0].write_to_path(tmp_path / "certificate")
    assert ends.timestamp() == not_after(tmp_path / "certificate")


def test_a_certificate_that_expires_soon_is_logged(
    server: TlsFiles, old: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning is logged when it is read, not on every connection."""
    caplog.set_level(logging.INFO)
    server.write_certificate(old, ends=datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=3))
    current = CurrentContext(server.tls, client_context)
    for _ in range(3):
        current()
    events = [record.rfork_fields["event"] for record in caplog.records if hasattr(record, "rfork_fields")]
    assert ["certificate expires soon"] == events


def test_an_incomplete_renewal_keeps_the_previous_files(server: TlsFiles, old: trustme.CA) -> None:
    """A certificate that does not match the key yet breaks no connection."""
    current = CurrentContext(server.tls, client_context)
    before = current()
    key = server.tls.key
    assert key is not None
    key.write_bytes(old.issue_cert("127.0.0.1").private_key_pem.bytes())
    assert before is current()


def test_a_source_loads_renewed_files(tmp_path: Path, server: TlsFiles, old: trustme.CA, new: trustme.CA) -> None:
    """Its data port and its peer service use them for new readers."""

    settings = InstanceSettings(node_name="node", transports=("http",))
    seed = Seed(
        IMAGE, InstanceIdentity("m"), settings, Connections([HttpTransport(settings)]), manifest=compute_manifest(IMAGE)
    )
    with seed:
        server.write_authorities(old, new)
        server.write_certificate(new)
        address = seed.report().address
        reader = TlsFiles(tmp_path / "reader", new)
        peer = PeerClient(address, lambda: "no lease", reader.tls)
        with pytest.raises(LeaseRejected):
            peer.full_manifest(time.monotonic() + SOON_S)
        peer.close()
        host, port = seed._exports["http"].endpoint().parameters["url"].split("/")[2].split(":")
        served_certificate = ssl.get_server_certificate((host, int(port)))
        assert server.tls.certificate is not None
        assert server.tls.certificate.read_text().strip() == served_certificate.strip()
