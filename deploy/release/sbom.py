"""Software bills of materials (CycloneDX, JSON): of a Python environment, and of the planner's image."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from rfork import __version__

REQUIRED: Final = ("torch", "fastapi", "grpcio", "numpy", "pydantic", "safetensors", "uvicorn", "xxhash")
"""Components that the bill of an environment must contain."""
REQUIRED_IN_IMAGE: Final = ("fastapi", "grpcio", "libc6", "lightkube", "pydantic", "python3-minimal", "uvicorn")
MAX_LICENCE_NAME: Final = 80
"""Some packages have the licence's text in that field."""

Component = dict[str, Any]


class InvalidSbom(Exception):
    """A bill of materials could not be made, or lacks something. One line."""


def of_environment(python: Path, project: Path, folder: Path) -> Path:
    """Write the environment's packages with versions and licences, validated against CycloneDX's schema."""
    path = folder / f"rfork-{__version__}.cdx.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--validate", "--output-reproducible"]
    about = ["--pyproject", str(project), "--mc-type", "library"]
    output = ["--output-format", "JSON", "--output-file", str(path)]
    done = subprocess.run([*command, *about, *output, str(python)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InvalidSbom(f"cyclonedx_py exited with {done.returncode}: {done.stderr}")
    document = json.loads(path.read_text())
    subject = document["metadata"]["component"]
    if (subject["name"], subject.get("version")) != ("rfork", __version__):
        named = f"{subject['name']} {subject.get('version')}"
        raise InvalidSbom(f"the SBOM describes {named} instead of rfork {__version__}")
    _require(document, REQUIRED)
    return path


def of_image(root: Path, path: Path) -> Path:
    """Write the packages of an image's root file system: Debian's, the planner's, and those for engines."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    debian = _debian_packages(root / "var" / "lib" / "dpkg" / "status")
    folders = sorted((root / "opt" / "rfork").glob("venv/lib/python3.*/site-packages"))
    folders += sorted((root / "opt" / "rfork" / "files" / "deps").iterdir())
    python = (each for folder in folders for each in _python_packages(folder, root))
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "metadata": {"component": {"type": "container", "name": "rfork", "version": __version__, "bom-ref": "rfork"}},
        "components": [*debian, *python],
    }
    text = json.dumps(document, indent=1)
    if errors := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise InvalidSbom(f"the image's SBOM does not match CycloneDX's schema: {errors}")
    _require(document, REQUIRED_IN_IMAGE)
    path.write_text(text + "\n", "utf-8")
    return path


def _require(document: Component, names: tuple[str, ...]) -> None:
    components = {each["name"].lower() for each in document["components"]}
    if missing := [name for name in names if name not in components]:
        raise InvalidSbom(f"the SBOM lacks {', '.join(missing)}")


def _debian_packages(status: Path) -> Iterator[Component]:
    for paragraph in status.read_text("utf-8").split("\n\n") if status.exists() else ():
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
        if fields.get("Status") == "install ok installed":
            name, version = fields["Package"], fields["Version"]
            purl = f"pkg:deb/debian/{name}@{version.replace(':', '%3A')}?arch={fields['Architecture']}"
            yield {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}


def _python_packages(folder: Path, root: Path) -> Iterator[Component]:
    """Yield the packages in a directory. Those in several directories are listed once for each."""
    location = f"/{folder.relative_to(root)}"
    for each in sorted(metadata.distributions(path=[str(folder)]), key=lambda found: found.name.lower()):
        about = each.metadata
        component: Component = {
            "type": "library",
            "name": each.name,
            "version": each.version,
            "purl": f"pkg:pypi/{each.name.lower().replace('_', '-')}@{each.version.replace('+', '%2B')}",
            "bom-ref": f"{location}/{each.name}",
            "properties": [{"name": "rfork:path", "value": location}],
        }
        if expressions := about.get_all("License-Expression"):
            component["licenses"] = [{"expression": expressions[0]}]
        elif (names := about.get_all("License")) and len(names[0]) < MAX_LICENCE_NAME:
            component["licenses"] = [{"license": {"name": names[0]}}]
        yield component
