"""Runs forks with many versions of each engine, and records what works in docs/engine-matrix.json.

    python -m tests.engines.matrix [ENGINE | ENGINE:VERSION …] [--venvs FOLDER] [--base VENV] [--delete]
                                 [--output FILE]

Each version gets its own venv, which takes about 3.5 GB and some minutes; ``--delete`` removes it afterwards.
``--base`` names a venv of another version of the engine on the same file system: the new one shares its files. A
version that does not run on a CPU is checked against the sources of its wheel. Rows of versions that were not
selected are kept. The exit code is 1 if a version is not supported.

Levels: ``forked`` (a server forked here: equal tensors and tokens), ``checked`` (every hook target exists in the
wheel's sources), ``unsupported``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

from rfork.engines.hook_targets import HookTarget
from tests.engines.setup.install import SetupError, set_up
from tests.engines.wheel_sources import WheelSources, check_sources

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "docs" / "engine-matrix.json"

Level = Literal["forked", "checked", "unsupported"]


@dataclass(frozen=True)
class Row:
    """Result for one version of one engine."""

    engine: str
    version: str
    level: Level
    commit: str
    """Commit of rfork that was run."""
    notes: str = ""


class Engine(Protocol):
    """One engine, as the runner sees it."""

    name: str
    """``vllm`` or ``sglang``."""
    versions: Sequence[str]
    """Supported versions, oldest first."""
    without_cpu_build: Mapping[str, str]
    """Versions that do not run on a CPU, each with the reason."""

    def distribution(self, version: str) -> str:
        """Return the requirement whose wheel contains the sources of a version."""
        ...

    def fork(self, version: str, python: Path, scratch: Path) -> str:
        """Fork with the engine in this venv's Python; returns notes. Raises any exception if something differs."""
        ...

    def hook_targets(self, sources: WheelSources) -> Sequence[HookTarget]:
        """Return the hook targets of the version with these sources."""
        ...

    def check_methods(self, sources: WheelSources) -> Sequence[str]:
        """Return methods in these sources that may change weights and that rfork does not know."""
        ...


def engines() -> Mapping[str, Engine]:
    """Return the engines by name."""
    from tests.engines.matrix_sglang import SglangMatrix
    from tests.engines.matrix_vllm import VllmMatrix

    return {engine.name: engine for engine in (SglangMatrix(), VllmMatrix())}


def examine(engine: Engine, version: str, venvs: Path, base: Path | None, *, delete: bool) -> Row:
    """Fork with one version, or check its sources."""
    commit = _commit()
    if version in engine.without_cpu_build:
        level, notes = check(engine, version)
        return Row(engine.name, version, level, commit, "; ".join((engine.without_cpu_build[version], *notes)))
    venv = venvs / f"{engine.name}-{version}"
    try:
        set_up(engine.name, venv, version, base)
        with tempfile.TemporaryDirectory(prefix="rfork-matrix-") as scratch:
            notes = (engine.fork(version, venv.absolute() / "bin" / "python", Path(scratch)),)
        return Row(engine.name, version, "forked", commit, "; ".join(notes))
    except SetupError as error:
        print(error, file=sys.stderr)
        level, notes = check(engine, version)
        return Row(engine.name, version, level, commit, "; ".join(("its CPU build could not be installed", *notes)))
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Row(engine.name, version, "unsupported", commit, reason)
    finally:
        if delete:
            shutil.rmtree(venv, ignore_errors=True)


def check(engine: Engine, version: str) -> tuple[Level, Sequence[str]]:
    """Check the hook targets against the sources of a version's wheel. Returns the level, and notes."""
    with tempfile.TemporaryDirectory(prefix="rfork-wheel-") as folder:
        command = ("download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder, engine.distribution(version))
        subprocess.run([sys.executable, "-m", "pip", *command], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        sources = WheelSources(wheel)
        return judge(check_sources(wheel, engine.hook_targets(sources)), engine.check_methods(sources))


def judge(incompatible: Iterable[tuple[HookTarget, str]], unknown: Sequence[str]) -> tuple[Level, Sequence[str]]:
    """Return the level of a version that was only checked, and its notes."""
    found = list(incompatible)
    notes = [f"{target.path} {mismatch}" for target, mismatch in found]
    if unknown:
        notes.append(f"unknown methods that may change weights: {', '.join(unknown)}")
    supported = not unknown and all(target.tier == "comfort" for target, _ in found)
    return ("checked" if supported else "unsupported"), notes


def read(file: Path) -> Sequence[Row]:
    """Return the rows of a file; none if it does not exist."""
    return [Row(**row) for row in json.loads(file.read_text())] if file.exists() else []


def merge(old: Iterable[Row], new: Iterable[Row]) -> Sequence[Row]:
    """Return all rows in order, where a new row replaces an old one of the same version."""
    rows = {(row.engine, row.version): row for row in (*old, *new)}
    return sorted(rows.values(), key=lambda row: (row.engine, *map(_number, row.version.split("."))))


def write(file: Path, rows: Iterable[Row]) -> None:
    """Write rows to a file."""
    file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def _number(part: str) -> tuple[int, str]:
    digits = "".join(character for character in part if character.isdigit())
    return int(digits or 0), part


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def _selected(words: Sequence[str], known: Mapping[str, Engine]) -> Sequence[tuple[Engine, str]]:
    """Return the engines and versions that ``ENGINE`` and ``ENGINE:VERSION`` select; all without words."""
    found: list[tuple[Engine, str]] = []
    for word in words or known:
        name, _, version = word.partition(":")
        found.extend((known[name], each) for each in ([version] if version else known[name].versions))
    return found


def main() -> int:
    """Run the command."""
    known = engines()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="ENGINE[:VERSION]", help="default: all")
    parser.add_argument("--venvs", type=Path, default=ROOT / ".venv-matrix", help="folder for the venvs")
    parser.add_argument("--base", type=Path, help="venv of another version, whose files are shared")
    parser.add_argument("--delete", action="store_true", help="delete each venv after its version")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="file to update")
    parsed = parser.parse_args()
    if wrong := [word for word in parsed.versions if word.partition(":")[0] not in known]:
        parser.error(f"unknown engine in {', '.join(wrong)}; known: {', '.join(known)}")
    levels = []
    for engine, version in _selected(parsed.versions, known):
        row = examine(engine, version, parsed.venvs, parsed.base, delete=parsed.delete)
        print(f"{row.engine} {row.version}: {row.level}  {row.notes}", flush=True)
        write(parsed.output, merge(read(parsed.output), [row]))
        levels.append(row.level)
    return int("unsupported" in levels)


if __name__ == "__main__":
    sys.exit(main())
