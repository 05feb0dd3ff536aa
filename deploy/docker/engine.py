"""The one step of engine.Dockerfile: rfork into the Python of an engine's image, of which nothing changes.

``python3 engine.py WHEEL [--extras s3,mooncake] [--may-replace "protobuf grpcio"]``; nothing but the standard
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
"""What is never replaced, whatever is asked for."""


def installed() -> dict[str, str]:
    """The version of each package that this Python finds, by its name in lower case."""
    found: dict[str, str] = {}
    for each in metadata.distributions():
        name: str | None = each.metadata["Name"]
        if name is not None:
            found.setdefault(name.lower().replace("_", "-"), each.version)
    return found


def constraints(versions: Mapping[str, str], replaceable: Collection[str]) -> str:
    """A constraints file that holds all but some packages to their versions. ValueError for engines."""
    if engines := sorted(set(replaceable) & set(ENGINES)):
        raise ValueError(f"rfork replaces no engine: {', '.join(engines)}")
    return "".join(
        f"{name}=={version}\n"
        for name, version in sorted(versions.items())
        if name not in replaceable and name != "rfork"
    )


def changed(before: Mapping[str, str], after: Mapping[str, str], replaceable: Collection[str]) -> list[str]:
    """What is no longer as it was, though nobody allowed that."""
    return [
        f"{name} was {version} and is {after.get(name, 'gone')}"
        for name, version in before.items()
        if after.get(name) != version and name not in replaceable and name != "rfork"
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Install, and look whether all else is as it was."""
    parser = argparse.ArgumentParser(prog="engine.py", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--extras", default="", help="extras of rfork, comma separated")
    parser.add_argument("--may-replace", default="", help="packages that may change their version, with blanks")
    parsed = parser.parse_args(arguments)
    replaceable = {name.lower().replace("_", "-") for name in parsed.may_replace.split()}
    before = installed()
    with tempfile.TemporaryDirectory() as made:
        kept = Path(made, "constraints.txt")
        kept.write_text(constraints(before, replaceable), "utf-8")
        extras = f"[{parsed.extras}]" if parsed.extras else ""
        # Images are no machines that a package manager looks after.
        environment = {**os.environ, "PIP_BREAK_SYSTEM_PACKAGES": "1"}
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-cache-dir"]
        code = subprocess.run(
            [*pip, "--constraint", kept, f"rfork{extras} @ {parsed.wheel.resolve().as_uri()}"],
            env=environment,
            check=False,
        ).returncode
    if code:
        sys.exit(
            "rfork was not installed. Where pip names packages of the image that are too old for it, "
            "MAY_REPLACE lets it take newer ones: try the engine afterwards"
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
