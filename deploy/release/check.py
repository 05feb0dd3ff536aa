"""Builds and checks the artifacts of a release: `make release-check`, locally and in the release workflow.

    python -m deploy.release.check [--out dist] [--sbom build/release] [--repository URL]

1. Source distribution and wheel, from a clean copy of the files in git. README's links to files are replaced
by links to the repository if its address is known; otherwise they would be dead on a package index, which is
reported.
2. Their metadata (twine) and contents (check-wheel-contents, and our own rules).
3. The wheel in its own environment, without extras: `rfork --version`, `rfork doctor`, the public names, and that
`rfork planner` names its extra. Then with that extra.
4. A software bill of materials of that environment (CycloneDX), in JSON.

Needs only a package index. Exits with 1 at the first problem.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Final

from deploy.release import contents, links, sbom
from rfork import __version__

ROOT: Final = Path(__file__).parents[2]
PUBLIC: Final = "import rfork; [getattr(rfork, name) for name in rfork.__all__]; print(rfork.__version__)"


class ReleaseError(Exception):
    """A problem of the release, in one line."""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory of the distributions; emptied first")
    parser.add_argument("--sbom", type=Path, default=ROOT / "build" / "release", help="directory of the SBOM")
    parser.add_argument("--repository", default="", help="https address of the repository, for README's links")
    options = parser.parse_args()
    try:
        check(options.out.resolve(), options.sbom.resolve(), options.repository)
    except (ReleaseError, contents.InvalidContents, sbom.InvalidSbom) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def check(out: Path, sbom_folder: Path, repository: str = "") -> None:
    """Run all steps. Raises ReleaseError, InvalidContents or InvalidSbom."""
    with tempfile.TemporaryDirectory(prefix="rfork-release-") as made:
        folder = Path(made)
        files = clean_copy(folder / "source")
        if repository:
            set_repository_links(files, repository)
        source, wheel = build(files, out)
        step("metadata", [sys.executable, "-m", "twine", "check", "--strict", str(source), str(wheel)])
        step("wheel", [sys.executable, "-m", "check_wheel_contents", "--toplevel", "rfork,planner", str(wheel)])
        wheel_version = contents.check_wheel(wheel, files, __version__)
        contents.check_source(source, __version__)
        print(f"wheel: {wheel_version}")
        if repository:
            contents.check_links(wheel, repository)
        else:
            print("not for a package index: README's links would be dead (make release-check REPOSITORY=URL)")
        python = installed(wheel, folder / "venv")
        check_installed(python)
        check_planner(python, wheel)
        print(f"sbom: {sbom.of_environment(python, folder_versions(folder), sbom_folder)}")
    for path in (source, wheel):
        print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


def clean_copy(target: Path) -> Path:
    """Copy the files in git, in their current state, without untracked files."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.decode().split("\0")):
        path = ROOT / name
        if path.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target / name)
    return target


def set_repository_links(source: Path, repository: str) -> None:
    """Set the repository's address in a clean copy: in README's links and in the metadata."""
    if not repository.startswith("https://"):
        raise ReleaseError(f"{repository} is not an https address of a repository")
    readme, project = source / "README.md", source / "pyproject.toml"
    readme.write_text(links.absolute(readme.read_text(), source, repository, f"v{__version__}"))
    changes = f"{repository}/blob/v{__version__}/CHANGELOG.md"
    urls = f'\n[project.urls]\nRepository = "{repository}"\nChangelog = "{changes}"\n'
    project.write_text(project.read_text().replace("\n[project.scripts]", f"{urls}\n[project.scripts]", 1))


def build(source: Path, out: Path) -> tuple[Path, Path]:
    """Build the source distribution, and the wheel from it."""
    shutil.rmtree(out, ignore_errors=True)
    step("build", [sys.executable, "-m", "build", "--outdir", str(out), str(source)])
    return find_files(out, "*.tar.gz"), find_files(out, "*.whl")


def find_files(folder: Path, pattern: str) -> Path:
    """Return the only file that matches the pattern."""
    files = list(folder.glob(pattern))
    if len(files) != 1:
        raise ReleaseError(f"{folder} has {len(files)} files {pattern}, expected one")
    return files[0]


def installed(wheel: Path, folder: Path) -> Path:
    """Return the Python of a new environment with only the wheel and its requirements."""
    venv.create(folder)  # without pip, which is not needed at run time
    python = folder / "bin" / "python"
    # Install torch first: later packages could otherwise select its build.
    for what in ("torch", str(wheel)):
        install(python, what)
    return python


def install(python: Path, what: str) -> None:
    """Install a package with the pinned versions."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    step(f"install {Path(what).name}", [*pip, "-c", str(ROOT / "constraints.txt"), what])


def check_installed(python: Path) -> None:
    """Check the first steps of a user, outside the sources and without extras."""
    version_output = run_program(python.parent / "rfork", "--version")
    if version_output != __version__ or run_program(python, "-c", PUBLIC) != __version__:
        raise ReleaseError(f"the wheel's version is {version_output} instead of {__version__}")
    checks = json.loads(run_program(python.parent / "rfork", "doctor", "--json"))["checks"]
    if not checks:
        raise ReleaseError("`rfork doctor` of the wheel printed no checks")
    print(f"installed: rfork {version_output}, doctor made {len(checks)} checks")


def check_planner(python: Path, wheel: Path) -> None:
    """Check that `rfork planner` names its extra without it, and can run with it."""
    hint = "pip install 'rfork[planner]'"
    done = execute(python.parent / "rfork", "planner")
    if done.returncode != 2 or hint not in done.stderr or "Traceback" in done.stderr:
        raise ReleaseError(f"without its extra, `rfork planner` exited with {done.returncode}: {done.stderr}")
    install(python, f"{wheel}[planner]")
    run_program(python, "-c", "import planner.server")
    print("planner: needs and runs with rfork[planner]")


def folder_versions(folder: Path) -> Path:
    """Return pyproject.toml with the version from the code, for tools that only read that file."""
    text = (ROOT / "pyproject.toml").read_text()
    path = folder / "pyproject.toml"
    path.write_text(text.replace('dynamic = ["version"]', f'version = "{__version__}"'))
    shutil.copy2(ROOT / "LICENSE", folder)
    return path


def run_program(program: Path, *arguments: str) -> str:
    """Return the output of a program in the new environment; it must succeed."""
    done = execute(program, *arguments)
    if done.returncode not in (0, 1) or (done.returncode == 1 and "doctor" not in arguments):
        raise ReleaseError(f"{program.name} {' '.join(arguments)} exited with {done.returncode}: {done.stderr}")
    return done.stdout.strip()


def execute(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the new environment, started outside this repository."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RFORK", "PYTHON"))}
    return subprocess.run(
        [str(program), *arguments], cwd="/", env=environment, capture_output=True, text=True, check=False
    )


def step(name: str, command: list[str]) -> None:
    """Run one command; its output is shown if it fails."""
    print(f"{name} …", flush=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        raise ReleaseError(f"{name} exited with {done.returncode}")


if __name__ == "__main__":
    sys.exit(main())
