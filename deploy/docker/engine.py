"""Installs rfork into an engine's image without changing its other packages, for engine.Dockerfile.

``python3 engine.py WHEEL [--extras s3,mooncake] [--may-replace "protobuf grpcio"]``; needs only the standard
library and the image's pip.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

ENGINES: Final = ("torch", "vllm", "sglang")
"""Packages that are never replaced."""


def installed() -> dict[str, str]:
    """Return the versions of all installed packages, by lower-case name."""
    found: dict[str, str] = {}
    for each in metadata.distributions():
        name: str | None = each.metadata["Name"]
        if name is not None:
            found.setdefault(name.lower().replace("_", "-"), each.version)
    return found


def constraints(versions: Mapping[str, str], replaceable: Collection[str]) -> str:
    """Return a constraints file that pins all packages except `replaceable`. Raises ValueError for engines."""
    if engines := sorted(set(replaceable) & set(ENGINES)):
        raise ValueError(f"rfork does not replace engines: {', '.join(engines)}")
    return "".join(
        f"{name}=={version}\n"
        for name, version in sorted(versions.items())
        if name not in replaceable and name != "rfork"
    )


def changed(before: Mapping[str, str], after: Mapping[str, str], replaceable: Collection[str]) -> list[str]:
    """Return the packages that changed although they must not."""
    return [
        f"{name} was {version} and is {after.get(name, 'removed')}"
        for name, version in before.items()
        if after.get(name) != version and name not in replaceable and name != "rfork"
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Install rfork, and check that all other packages are unchanged."""
    parser = argparse.ArgumentParser(prog="engine.py", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--extras", default="", help="extras of rfork, comma separated")
    parser.add_argument("--may-replace", default="", help="packages that may change their version, separated by spaces")
    parsed = parser.parse_args(arguments)
    replaceable = {name.lower().replace("_", "-") for name in parsed.may_replace.split()}
    before = installed()
    with tempfile.TemporaryDirectory() as made:
        kept = Path(made, "constraints.txt")
        kept.write_text(constraints(before, replaceable), "utf-8")
        extras = f"[{parsed.extras}]" if parsed.extras else ""
        # No system package manager maintains the Python of an image.
        environment = {**os.environ, "PIP_BREAK_SYSTEM_PACKAGES": "1"}
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-cache-dir"]
        code = subprocess.run(
            [*pip, "--constraint", kept, f"rfork{extras} @ {parsed.wheel.resolve().as_uri()}"],
            env=environment,
            check=False,
        ).returncode
    if code:
        sys.exit(
            "rfork was not installed. If pip names packages of the image that are too old, "
            "allow newer versions with MAY_REPLACE, then test the engine"
        )
    now = subprocess.run(
        [
            sys.executable,
            "-c",
            "import engine; print(*map('=='.join, engine.installed().items()), sep='\\n')",
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    after = dict(line.split("==", 1) for line in now.splitlines())
    if problems := changed(before, after, replaceable):
        sys.exit("the image's packages changed: " + "; ".join(problems))


if __name__ == "__main__":
    main()
