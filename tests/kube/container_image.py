"""The planner's image as built by `make images`: runs its containers from its root file system.

With the containers' securityContext: not root, without capabilities, read-only root file system. Volumes of
Pods (emptyDir, Secrets) are directories of this machine.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from deploy.buildah.images import DESCRIPTION, OUT, source_digest
from tests.kube.confined_process import Confinement

Document = dict[str, Any]
REQUIRED_VARIABLE: Final = "RFORK_TEST_IMAGE"
"""`required`: tests that need the image fail instead of being skipped. `all`: as well, all tests run the chart's
processes from it."""
MODE: Final = os.environ.get(REQUIRED_VARIABLE, "")
SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
LAUNCHER: Final = Path(__file__).with_name("confined_process.py")
DEFAULT_MODE: Final = 0o644
"""Mode of a Secret's files."""
DIRECTORY_MODE: Final = 0o2777
"""Mode of an emptyDir: its files belong to the fsGroup."""


@dataclass(frozen=True)
class ContainerImage:
    """An image's root file system and configuration."""

    name: str
    root: Path
    user: str
    entrypoint: tuple[str, ...]
    environment: Mapping[str, str]

    def launcher(self, pod: Document, container: Document, mounts: Sequence[tuple[Path, str, bool]] = ()) -> list[str]:
        """Return the command of a container's process. `mounts`: directory, mount path, read-only.

        Raises ValueError if the kubelet would not start it: runAsNonRoot, and a user that is root or a name.
        """
        security = {**(pod.get("securityContext") or {}), **(container.get("securityContext") or {})}
        user, _, group = self.user.partition(":")
        if security.get("runAsNonRoot") and not (security.get("runAsUser") or (user.isdecimal() and int(user))):
            raise ValueError(f"container has runAsNonRoot and image has non-numeric or root user {self.user!r}")
        if (security.get("capabilities") or {}).get("drop") != ["ALL"] or security.get(
            "allowPrivilegeEscalation", True
        ):
            raise ValueError("only containers without capabilities and new privileges can be run")
        group_id = int(security.get("runAsGroup") or group or 0)
        groups = [group_id, *([security["fsGroup"]] if "fsGroup" in security else [])]
        confinement = Confinement(
            root=str(self.root),
            command=[*(container.get("command") or self.entrypoint), *container.get("args", ())],
            user=int(security.get("runAsUser") or user),
            group=group_id,
            groups=list(dict.fromkeys(groups)),
            read_only=bool(security.get("readOnlyRootFilesystem")),
            mounts=[(str(source), path, read_only) for source, path, read_only in mounts],
        )
        return [sys.executable, "-S", str(LAUNCHER), confinement.to_json()]


def built_image() -> ContainerImage:
    """Return the image, or skip the test and name the reason; a failure if the image is required."""
    report = pytest.fail if MODE else pytest.skip
    file = OUT / DESCRIPTION
    if not file.exists():
        report(f"no image of the planner in {OUT}: `make images` builds it")
    if os.geteuid() != 0:
        report("running processes from an image's root file system needs root")
    described = json.loads(file.read_text("utf-8"))
    if described["sources"] != source_digest():
        report("the image of the planner was built from other sources: run `make images` again")
    return ContainerImage(
        described["image"],
        Path(described["rootfs"]),
        described["user"],
        tuple(described["entrypoint"]),
        described["environment"],
    )


def image_for_all_tests() -> ContainerImage | None:
    """Return the image if all tests are to use it."""
    return built_image() if MODE == "all" else None


class Volumes:
    """Volumes of one Pod as directories, created when they are first used."""

    def __init__(self, folder: Path, pod: Document, secrets: Mapping[str, Mapping[str, str]]) -> None:
        """`secrets`: data of Secrets in base64, by name."""
        self._folder = folder
        self._pod = pod
        self._secrets = secrets

    def mounts(self, container: Document) -> Iterator[tuple[Path, str, bool]]:
        """Yield the mounts of emptyDirs and Secrets of a container: directory, mount path, read-only."""
        for mount in container.get("volumeMounts") or ():
            volume = next(each for each in self._pod.get("volumes") or () if each["name"] == mount["name"])
            if "emptyDir" in volume or "secret" in volume:
                yield self._directory(volume), mount["mountPath"], bool(mount.get("readOnly")) or "secret" in volume

    def _directory(self, volume: Document) -> Path:
        folder = self._folder / str(volume["name"])
        if folder.exists():
            return folder
        folder.mkdir(parents=True)
        group = (self._pod.get("securityContext") or {}).get("fsGroup", 0)
        if "emptyDir" in volume:
            shutil.chown(folder, group=group)
            folder.chmod(DIRECTORY_MODE)
        else:
            write_secret(folder, volume["secret"], self._secrets[volume["secret"]["secretName"]], group)
        return folder


def write_secret(folder: Path, source: Document, data: Mapping[str, str], group: int) -> None:
    """Write a Secret's keys to files, as a kubelet does."""
    items = source.get("items") or [{"key": key, "path": key} for key in data]
    for item in items:
        file = folder / item["path"]
        file.write_bytes(base64.b64decode(data[item["key"]]))
        shutil.chown(file, group=group)
        file.chmod(source.get("defaultMode", DEFAULT_MODE))
