"""A certificate in a folder, which others renew."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.hooks.kubernetes import authority
from planner.hooks.kubernetes.authority import Own
from planner.hooks.kubernetes.certificates import FolderKeeper
from planner.hooks.kubernetes.showing import LiveContext, Watch
from planner.hooks.probes import Status
from rfork.errors import SettingsError
from tests.unit.hooks.certificates.replicas import DAYS, HOST, NOW, Time, errors


class Folder:
    """A folder of certificates that others renew."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, own: Own) -> Own:
        for name, content in own.data().items():
            (self.path / name).write_bytes(content)
        return own


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path)
    folder.write(authority.make_own([HOST], DAYS, NOW))
    return folder


async def test_a_folder_is_read_again_when_it_changes(folder: Folder, time: Time) -> None:
    """The new pair is shown at the next look."""
    live = LiveContext()
    keeper = FolderKeeper(folder.path, Watch(live, Status("webhook"), time.clock))
    new = folder.write(authority.make_own([HOST], DAYS, NOW + 10))
    await keeper.look()
    assert new.shown == live.shown


@pytest.mark.parametrize("name", ["tls.crt", "tls.key"])
@pytest.mark.parametrize("content", [None, b"", b"half of it", "another"])
async def test_a_pair_that_cannot_be_used_leaves_the_one_before(
    folder: Folder, time: Time, caplog: pytest.LogCaptureFixture, name: str, content: bytes | str | None
) -> None:
    """A file that is missing, empty, half written, or not yet the other's: one error, and the old pair."""
    live, status = LiveContext(), Status("webhook")
    keeper = FolderKeeper(folder.path, Watch(live, status, time.clock))
    shown = live.shown
    if content is None:
        (folder.path / name).unlink()
    else:
        other = authority.make_own([HOST], DAYS, NOW).data()[name]
        (folder.path / name).write_bytes(content if isinstance(content, bytes) else other)
    await keeper.look()
    await keeper.look()
    assert (shown, None, 1) == (live.shown, status.why_not, len(errors(caplog)))


def test_a_folder_without_a_pair_does_not_start(tmp_path: Path, time: Time) -> None:
    """One line says which file, and which setting."""
    with pytest.raises(SettingsError) as caught:
        FolderKeeper(tmp_path, Watch(LiveContext(), Status("webhook"), time.clock))
    assert (
        f"the webhook's certificate cannot be used: {tmp_path}/tls.crt: No such file or directory",
        "RFORK_HOOK_CERTIFICATES is a folder with tls.crt and tls.key, both PEM",
    ) == (str(caught.value), caught.value.hint)
