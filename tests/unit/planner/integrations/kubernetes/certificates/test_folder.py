"""A certificate in a directory that is renewed from outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.integrations.health import IntegrationStatus
from planner.integrations.kubernetes import certificates
from planner.integrations.kubernetes.certificates import (
    CERTIFICATE_DAYS,
    CertBundle,
    FolderCertSource,
    ServingCertificate,
)
from rfork.errors import SettingsError
from tests.unit.planner.integrations.kubernetes.certificates.webhook_replicas import (
    HOST,
    NOW,
    FakeUnixTime,
    errors,
)


class CertFolder:
    """A directory whose certificate the test renews."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, bundle: CertBundle) -> CertBundle:
        for name, content in bundle.data().items():
            (self.path / name).write_bytes(content)
        return bundle


@pytest.fixture
def folder(tmp_path: Path) -> CertFolder:
    folder = CertFolder(tmp_path)
    folder.write(certificates.generate_bundle([HOST], CERTIFICATE_DAYS, NOW))
    return folder


async def test_a_changed_directory_is_reloaded(folder: CertFolder, time: FakeUnixTime) -> None:
    """The next refresh uses the new pair."""
    serving = ServingCertificate(IntegrationStatus("webhook"), time.clock)
    cert_source = FolderCertSource(folder.path, serving)
    new = folder.write(certificates.generate_bundle([HOST], CERTIFICATE_DAYS, NOW + 10))
    await cert_source.refresh()
    assert new.pair == serving.current


@pytest.mark.parametrize("name", ["tls.crt", "tls.key"])
@pytest.mark.parametrize("content", [None, b"", b"half of it", "another"])
async def test_an_unusable_pair_keeps_the_previous_one(
    folder: CertFolder,
    time: FakeUnixTime,
    caplog: pytest.LogCaptureFixture,
    name: str,
    content: bytes | str | None,
) -> None:
    """A missing, empty, incomplete or mismatched file logs one error, and the old pair stays in use."""
    status = IntegrationStatus("webhook")
    serving = ServingCertificate(status, time.clock)
    cert_source = FolderCertSource(folder.path, serving)
    previous_pair = serving.current
    if content is None:
        (folder.path / name).unlink()
    else:
        other = certificates.generate_bundle([HOST], CERTIFICATE_DAYS, NOW).data()[name]
        (folder.path / name).write_bytes(content if isinstance(content, bytes) else other)
    await cert_source.refresh()
    await cert_source.refresh()
    assert previous_pair == serving.current
    assert status.not_ready_reason is None
    assert 1 == len(errors(caplog))


def test_a_directory_without_a_pair_is_an_error_at_the_start(tmp_path: Path, time: FakeUnixTime) -> None:
    """The error names the file and the setting."""
    with pytest.raises(SettingsError) as caught:
        FolderCertSource(tmp_path, ServingCertificate(IntegrationStatus("webhook"), time.clock))
    assert f"unusable webhook certificate: {tmp_path}/tls.crt: No such file or directory" == str(caught.value)
    assert "RFORK_K8S_CERTIFICATE_DIR must be a directory with tls.crt and tls.key, both PEM" == caught.value.hint
