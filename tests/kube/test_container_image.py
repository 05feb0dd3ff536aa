"""The planner's image from `make images`, with a real API server: all processes of the chart run from its root file
system, which is read-only, as its user, and Pods fork with the files that its init container copies.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

import httpx
import pytest
from lightkube import Client
from lightkube.resources.core_v1 import Pod

from planner.integrations.kubernetes.inject import FILES_VOLUME, NON_ROOT_UID, files_init_container
from rfork import __version__
from tests.kube.confined_process import resolve_in
from tests.kube.container_image import ContainerImage, Volumes, built_image
from tests.kube.control_plane import ControlPlane
from tests.kube.installation import Component, Installation, installed
from tests.kube.kubelet import Kubelet
from tests.kube.test_kubelet import until
from tests.kube.test_scaling import MEBIBYTES, NODES, PORT, SERVER, NamespaceView, deployment

COMPONENTS: Final[tuple[Component, ...]] = get_args(Component)
COMMANDS: Final = ("planner", "k8s", "drain", "status", "launch", "doctor", "explain", "top")
"""Commands that operators run in the image."""
RESTRICTED: Final[dict[str, Any]] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
}
FAILURES: Final = re.compile(r"Traceback|Read-only file system|Permission denied|No such file|ModuleNotFoundError")
PRINTS_ITS_PACKAGE: Final = """
import runpy, sys
import rfork
print("package", rfork.__file__, flush=True)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def image() -> ContainerImage:
    """The image; without one the tests are skipped."""
    return built_image()


@pytest.fixture
def fleet(
    image: ContainerImage, plane: ControlPlane, admin: Client, helm: Path, namespace: str, tmp_path: Path
) -> Iterator[Installation]:
    """The chart, with processes in the image, and injection by its init container."""
    with installed(plane, admin, helm, namespace, tmp_path, image) as made:
        made.values["instances"]["injectionMode"] = "init"
        made.values["planner"]["settings"] = {"scaleup_wait_s": 4}
        for component in COMPONENTS:
            made.start(component)
        yield made


def run(image: ContainerImage, command: list[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in a container without volumes but, optionally, an emptyDir at /tmp."""
    mounts = [(folder, "/tmp", False)] if folder is not None else []
    words = image.launcher({}, {"command": command, "securityContext": RESTRICTED}, mounts)
    return subprocess.run(words, env=dict(image.environment), capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_process_is_confined_as_the_chart_requires(
    fleet: Installation, image: ContainerImage, component: Component
) -> None:
    """It runs in the image, read-only, as 65532, without capabilities or new privileges, and logs no failure."""
    process = Path("/proc", str(fleet.process_id(component)))
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line)
    assert [str(NON_ROOT_UID)] * 4 == status["Uid"].split()
    assert [str(NON_ROOT_UID)] * 4 == status["Gid"].split()
    assert [0] * 4 == [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd")]
    assert "1" == status["NoNewPrivs"]
    assert image.root == (process / "root").readlink() or (process / "root").samefile(image.root)
    (options,) = [
        line.split()[5] for line in (process / "mountinfo").read_text().splitlines() if line.split()[4] == "/"
    ]
    assert "ro" in options.split(",")
    assert [] == FAILURES.findall(fleet.log(component))


def test_pods_fork_with_files_from_the_image(
    fleet: Installation, image: ContainerImage, plane: ControlPlane, admin: Client, namespace: str, tmp_path: Path
) -> None:
    """The init container copies rfork's files to a volume; the servers import them, and one forks from the other."""
    until(lambda: "a controller leads" in fleet.log("webhook"), "Pods with a readiness gate")
    seen = NamespaceView(admin, namespace)
    # A file outside of the checkout, where Python would find this checkout's rfork.
    program = tmp_path / "server.py"
    program.write_text(PRINTS_ITS_PACKAGE)
    command = [sys.executable, str(program), str(SERVER), str(PORT), str(MEBIBYTES)]
    with Kubelet(plane, namespace, tmp_path / "pods", nodes=NODES, image=image) as kubelet:
        admin.create(deployment("llama", 2, command, engine="pytorch"), namespace=namespace)
        until(lambda: len(seen.ready()) == 2, "both Pods to be ready")
        names = seen.ready()
        assert 1 == len(seen.digests())
        for name in names:
            volume = tmp_path / "pods" / f"{name}-volumes" / FILES_VOLUME
            assert f"package {volume}/path/rfork/__init__.py" in kubelet.log(name).splitlines()
            assert NON_ROOT_UID == (volume / "path").stat().st_uid
        lines = [httpx.get(f"http://{address}:{PORT}/digest").json()["line"] for address in addresses(seen.pods())]
        assert 1 == sum("(http)" in line for line in lines), lines
    for component in COMPONENTS:
        assert [] == FAILURES.findall(fleet.log(component))


def addresses(pods: list[Pod]) -> list[str]:
    """Return the addresses of Pods."""
    return [str(pod.status.podIP) for pod in pods if pod.status]


@pytest.mark.parametrize("user", [NON_ROOT_UID, 1000])
def test_the_init_container_copies_as_any_user(image: ContainerImage, tmp_path: Path, user: int) -> None:
    """The Pod's user applies to it, too; the files are readable and complete."""
    container = files_init_container(image.name, runs_as_root=False)
    container["securityContext"]["runAsUser"] = user
    pod = {"volumes": [{"name": FILES_VOLUME, "emptyDir": {}}]}
    words = image.launcher(pod, container, list(Volumes(tmp_path, pod, {}).mounts(container)))
    done = subprocess.run(words, env=dict(image.environment), capture_output=True, text=True, timeout=120)
    assert "" == done.stderr
    assert 0 == done.returncode
    source, copied = image.root / "opt" / "rfork" / "files", tmp_path / FILES_VOLUME
    assert relative_files(source) == relative_files(copied)
    assert user == (copied / "bin" / "rfork").stat().st_uid
    assert os.stat(copied / "bin" / "rfork").st_mode & 0o111


def relative_files(folder: Path) -> set[str]:
    """Return the paths of all files below a directory."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_runs_in_the_image(image: ContainerImage, command: str) -> None:
    """Its help needs no writable directory."""
    done = run(image, [*image.entrypoint, command, "--help"])
    assert "" == done.stderr
    assert 0 == done.returncode


def test_the_image_has_this_version(image: ContainerImage) -> None:
    """The command in the image prints the version of these sources."""
    done = run(image, [*image.entrypoint, "--version"])
    assert f"{__version__}\n" == done.stdout


def test_only_volumes_are_writable(image: ContainerImage, tmp_path: Path) -> None:
    """The root file system refuses writes, an emptyDir accepts them."""
    tmp_path.chmod(0o777)
    assert "Read-only file system" in run(image, ["touch", "/opt/rfork/new"]).stderr
    assert "Read-only file system" in run(image, ["touch", "/tmp/new"]).stderr
    assert 0 == run(image, ["touch", "/tmp/new"], tmp_path).returncode


def test_links_of_the_image_stay_inside_of_it(tmp_path: Path) -> None:
    """Debian's /var/run is a link to /run: a mount below it must not touch this machine's /run."""
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "run").symlink_to("/run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "relative").symlink_to("other")
    assert f"{tmp_path}/run/secrets/x" == resolve_in(str(tmp_path), "/var/run/secrets/x")
    assert f"{tmp_path}/run/other/y" == resolve_in(str(tmp_path), "/run/relative/y")


def test_an_image_with_a_named_user_is_refused(image: ContainerImage) -> None:
    """runAsNonRoot needs a numeric user, as in a kubelet."""
    named = ContainerImage(image.name, image.root, "root", image.entrypoint, image.environment)
    with pytest.raises(ValueError, match="non-numeric or root user 'root'"):
        named.launcher({}, {"command": ["true"], "securityContext": RESTRICTED})
