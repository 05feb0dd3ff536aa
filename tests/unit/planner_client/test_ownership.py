"""The owner secret shared by the processes of a replica."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from rfork.planner_client.client import PlannerClient
from rfork.planner_client.lease import derive_key
from rfork.planner_client.ownership import OWNER_HEADER, SECRET, owner_secret, process_secret, shared_secret
from rfork.settings import InstanceSettings

CONFIGURED_SECRET = "g" * 32


def test_processes_of_a_replica_share_a_secret(tmp_path: Path) -> None:
    """The second process reads the secret of the first."""
    assert shared_secret("pod-a", tmp_path) == shared_secret("pod-a", tmp_path)


def test_replicas_have_different_secrets(tmp_path: Path) -> None:
    """Each replica has its own file."""
    assert shared_secret("pod-a", tmp_path) != shared_secret("pod-b", tmp_path)


def test_a_generated_secret_has_the_format_required_by_the_planner(tmp_path: Path) -> None:
    """It has at least 32 visible characters."""
    assert SECRET.fullmatch(shared_secret("pod-a", tmp_path))


def test_only_this_user_can_read_the_file(tmp_path: Path) -> None:
    """Folder and file have no permissions for others."""
    shared_secret("pod-a", tmp_path)
    modes = {path.stat().st_mode & 0o077 for path in tmp_path.rglob("*")}
    assert {0} == modes


def test_no_temporary_file_remains(tmp_path: Path) -> None:
    """The folder contains one file per replica."""
    shared_secret("pod-a", tmp_path)
    (folder,) = tmp_path.iterdir()
    assert 1 == len(list(folder.iterdir()))


def test_a_folder_writable_by_others_is_rejected(tmp_path: Path) -> None:
    """Another user may have placed a known secret there."""
    shared_secret("pod-a", tmp_path)
    (folder,) = tmp_path.iterdir()
    folder.chmod(0o777)
    with pytest.raises(OSError, match="not a private file or folder"):
        shared_secret("pod-a", tmp_path)


def test_a_link_to_a_file_is_rejected(tmp_path: Path) -> None:
    """The path must be the file itself."""
    shared_secret("pod-a", tmp_path)
    (folder,) = tmp_path.iterdir()
    (file,) = folder.iterdir()
    moved = file.rename(tmp_path / "moved")
    file.symlink_to(moved)
    with pytest.raises(OSError, match="not a private file or folder"):
        shared_secret("pod-a", tmp_path)


def test_a_file_without_a_secret_is_rejected(tmp_path: Path) -> None:
    """An empty secret could be guessed."""
    shared_secret("pod-a", tmp_path)
    (file,) = next(tmp_path.iterdir()).iterdir()
    file.write_text("")
    with pytest.raises(OSError, match="does not contain a secret"):
        shared_secret("pod-a", tmp_path)


def test_a_secret_in_the_settings_is_used() -> None:
    """A replica on several hosts can share a secret this way."""
    settings = InstanceSettings.model_validate({"owner_secret": CONFIGURED_SECRET, "replica": "pod-a"})
    assert CONFIGURED_SECRET == owner_secret(settings)


def test_a_process_without_a_replica_name_has_its_own_secret() -> None:
    """No other process can name its instances."""
    assert process_secret() == owner_secret(InstanceSettings())


@pytest.mark.parametrize(("method", "expected"), [("PUT", CONFIGURED_SECRET), ("GET", None)])
def test_only_modifying_calls_send_the_secret(method: str, expected: str | None) -> None:
    """Read-only calls do not need it."""
    seen: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get(OWNER_HEADER))
        return httpx.Response(204)

    with PlannerClient("http://p", owner=CONFIGURED_SECRET, transport=httpx.MockTransport(handler)) as client:
        client.remove("s") if method != "GET" else client.ready()
    assert [expected] == seen


def test_a_lease_key_depends_on_the_owner() -> None:
    """A new owner of an id gets different keys than the previous one."""
    keys = {derive_key(b"s", "a"), derive_key(b"s", "a", "1"), derive_key(b"s", "a", "2")}
    assert 3 == len(keys)
