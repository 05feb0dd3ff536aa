"""A certificate in a folder, which others renew."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.integrations.health import IntegrationStatus
from planner.integrations.kubernetes import certs
from planner.integrations.kubernetes.cert_source import FolderCertSource
from planner.integrations.kubernetes.certs import CertBundle
from planner.integrations.kubernetes.reloading_tls import CertificateMonitor, ReloadingContext
from rfork.errors import SettingsError
from tests.unit.planner.integrations.kubernetes.certs.webhook_replicas import (
    DAYS,
    HOST,
    NOW,
    FakeUnixTime,
    errors,
)


class CertFolder:
    """A folder of certificates that others renew."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, bundle: CertBundle) -> CertBundle:
        for name, content in bundle.data().items():
            (self.path / name).write_bytes(content)
        return bundle


@pytest.fixture
def folder(tmp_path: Path) -> CertFolder:
    folder = CertFolder(tmp_path)
    folder.write(certs.generate_bundle([HOST], DAYS, NOW))
    return folder


async def test_a_folder_is_read_again_when_it_changes(folder: CertFolder, time: FakeUnixTime) -> None:
    """The new pair is shown at the next look."""
    context = ReloadingContext()
    cert_source = FolderCertSource(folder.path, CertificateMonitor(context, IntegrationStatus("webhook"), time.clock))
    new = folder.write(certs.generate_bundle([HOST], DAYS, NOW + 10))
    await cert_source.refresh()
    assert new.pair == context.current


@pytest.mark.parametrize("name", ["tls.crt", "tls.key"])
@pytest.mark.parametrize("content", [None, b"", b"half of it", "another"])
async def test_a_pair_that_cannot_be_used_leaves_the_one_before(
    folder: CertFolder,
    time: FakeUnixTime,
    caplog: pytest.LogCaptureFixture,
    name: str,
    content: bytes | str | None,
) -> None:
    """A file that is missing, empty, half written, or not yet the other's: one error, and the old pair."""
    context, status = ReloadingContext(), IntegrationStatus("webhook")
    cert_source = FolderCertSource(folder.path, CertificateMonitor(context, status, time.clock))
    previous_pair = context.current
    if content is None:
        (folder.path / name).unlink()
    else:
        other = certs.generate_bundle([HOST], DAYS, NOW).data()[name]
        (folder.path / name).write_bytes(content if isinstance(content, bytes) else other)
    await cert_source.refresh()
    await cert_source.refresh()
    assert (previous_pair, None, 1) == (context.current, status.not_ready_reason, len(errors(caplog)))


def test_a_folder_without_a_pair_does_not_start(tmp_path: Path, time: FakeUnixTime) -> None:
    """One line says which file, and which setting."""
    with pytest.raises(SettingsError) as caught:
        FolderCertSource(tmp_path, CertificateMonitor(ReloadingContext(), IntegrationStatus("webhook"), time.clock))
    assert (
        f"the webhook's certificate cannot be used: {tmp_path}/tls.crt: No such file or directory",
        "RFORK_K8S_CERTIFICATE_DIR is a folder with tls.crt and tls.key, both PEM",
    ) == (str(caught.value), caught.value.hint)
