"""The scaler's certificates."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import grpc
import grpc.aio
import pytest
import trustme

from planner.integrations.health import IntegrationStatus
from planner.integrations.keda.scaler import run
from planner.integrations.keda.v1.externalscaler_pb2_grpc import ExternalScalerStub
from rfork.errors import SettingsError
from rfork.net.grpc_credentials import server_credentials
from rfork.settings import KubernetesSettings, TlsSettings
from tests.integration.keda.scaler_harness import running_scaler
from tests.unit.planner.integrations.keda.fakes import MODEL, ScriptedPlannerApi


def write_certificate(authority: trustme.CA, folder: Path) -> bytes:
    """Write a new certificate of the scaler; return it."""
    issued = authority.issue_cert("localhost", "127.0.0.1")
    (folder / "tls.key").write_bytes(issued.private_key_pem.bytes())
    (folder / "tls.crt").write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    return issued.cert_chain_pems[0].bytes()


async def test_a_certificate_is_renewed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scaler_port: int) -> None:
    """With RFORK_TLS_* KEDA must present a certificate; the scaler's own is renewed without a restart."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    for name, file in (("CERTIFICATE", "tls.crt"), ("KEY", "tls.key"), ("CA", "ca.crt")):
        monkeypatch.setenv(f"RFORK_TLS_{name}", str(tmp_path / file))
    with pytest.raises(SettingsError, match="TLS files"):
        await run(KubernetesSettings(scaler_port=0), ScriptedPlannerApi(), IntegrationStatus("scaler"))
    first = write_certificate(authority, tmp_path)
    keda = authority.issue_cert("keda")
    credentials = grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(), keda.private_key_pem.bytes(), keda.cert_chain_pems[0].bytes()
    )
    where = f"127.0.0.1:{scaler_port}"
    channel = grpc.aio.secure_channel(where, credentials)
    metadata = {"model": MODEL, "metric": "waiting", "target": "10", "port": "8000"}
    async with running_scaler("http://127.0.0.1:1", metadata, port=scaler_port, channel=channel) as scaler:
        assert 10.0 == (await scaler.stub.GetMetricSpec(scaler.scaled_object())).metricSpecs[0].targetSizeFloat
        served_certificates = [await served_certificate(scaler_port, tmp_path, authority)]
        second = write_certificate(authority, tmp_path)
        served_certificates.append(await served_certificate(scaler_port, tmp_path, authority))
        (tmp_path / "tls.crt").write_text("half a renew")
        served_certificates.append(await served_certificate(scaler_port, tmp_path, authority))
        assert [first, second, second] == served_certificates
        unauthenticated_channel = grpc.aio.secure_channel(
            where, grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ExternalScalerStub(unauthenticated_channel).GetMetricSpec(scaler.scaled_object())
        assert grpc.StatusCode.UNAVAILABLE == refused.value.code()
        await unauthenticated_channel.close(None)


def test_files_that_change_while_they_are_checked_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A matching pair of key and certificate is used, not the files written right after the check."""
    authority, load_chain = trustme.CA(), ssl.SSLContext.load_cert_chain
    write_certificate(authority, tmp_path)

    def change(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
        load_chain(context, certificate, key)
        (tmp_path / "tls.crt").write_bytes(authority.issue_cert("localhost").cert_chain_pems[0].bytes())

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", change)
    with pytest.raises(SettingsError, match="TLS files"):
        server_credentials(TlsSettings(certificate=tmp_path / "tls.crt", key=tmp_path / "tls.key"))


async def served_certificate(port: int, folder: Path, authority: trustme.CA) -> bytes:
    """Return the certificate that the scaler presents to a new connection, as PEM."""
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    authority.issue_cert("keda").configure_cert(context)
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ssl.DER_cert_to_PEM_cert(der).encode()
