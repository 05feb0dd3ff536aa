"""Builds the images with buildah, without a container engine: `make images`. Needs root.

    python -m deploy.buildah.images [--base IMAGE] [--engine vllm] [--out build/images]

1. A base with Debian's Python, made by debootstrap, unless another image is named.
2. The planner's image (Dockerfile), checked for names of private package indexes, with an SBOM (CycloneDX).
3. For each named engine: an image with its CPU build, and rfork added to it (engine.Dockerfile). No package
   that was installed before may change.

The results are in `--out`: `planner.json` describes the planner's image and its root file system for tests,
`images.json` has the sizes. Images are in the buildah storage below it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from deploy.buildah.pip_settings import PipSettings, pip_settings
from deploy.docker.requirements import ROOT
from deploy.release import sbom
from rfork import __version__

OUT: Final = ROOT / "build" / "images"
DOCKER: Final = ROOT / "deploy" / "docker"
ENGINE_SETUP: Final = ROOT / "tests" / "engines" / "setup"
SOURCES: Final = ("pyproject.toml", "constraints.txt", "deploy/docker", "rfork", "planner")
SUITE: Final = "bookworm"
BASE_PACKAGES: Final = ("python3", "python3-venv", "ca-certificates")
BASE: Final = "localhost/rfork-base"
PLANNER: Final = f"localhost/rfork:{__version__}"
ROOTFS_CONTAINER: Final = "rfork-rootfs"
DESCRIPTION: Final = "planner.json"
EMPTIED: Final = ("etc/hostname", "etc/resolv.conf")
"""Files that debootstrap copies from this machine."""
CACHES: Final = ("var/cache/apt", "var/lib/apt/lists", "var/log", "var/cache/debconf")


class BuildError(Exception):
    """An image could not be built, or is wrong. One line."""


class Builder:
    """buildah with a storage of its own."""

    def __init__(self, out: Path, settings: PipSettings, secrets: Path) -> None:
        self._command = ["buildah", "--storage-driver", "vfs"]
        self._command += ["--root", str(out / "storage"), "--runroot", str(out / "run")]
        self._settings = settings
        self._secrets = ["--secret", f"id=pip.conf,src={secrets / 'pip.conf'}"]
        (secrets / "pip.conf").write_text(settings.config(), "utf-8")
        if settings.ca is not None:
            self._secrets += ["--secret", f"id=pip-ca,src={settings.ca}"]

    def run(self, *words: str | Path) -> str:
        """Return the output of a buildah command. Raises BuildError with its errors."""
        done = subprocess.run([*self._command, *map(str, words)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"buildah {words[0]} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def has(self, image: str) -> bool:
        """Return True if the image exists."""
        return bool(json.loads(self.run("images", "--json", "--filter", f"reference={image}") or "[]"))

    def build(self, image: str, dockerfile: Path, context: Path, *, packages: bool = False, **arguments: str) -> None:
        """Build a Dockerfile. `packages`: mount the directories of packages on this machine as well."""
        print(f"{image} …", flush=True)
        words = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        if packages:
            words += [word for folder in self._settings.folders() for word in ("--volume", f"{folder}:{folder}:ro")]
        where = ("--file", dockerfile, "--tag", image, context)
        self.run("bud", "--isolation", "chroot", *self._secrets, *words, *where)

    def root_of(self, image: str, container: str) -> Path:
        """Return the root file system of a new container, replacing one of that name."""
        if container in self.run("containers", "--format", "{{.ContainerName}}").split():
            self.run("rm", container)
        self.run("from", "--pull-never", "--name", container, image)
        return Path(self.run("mount", container))

    def inspect(self, image: str) -> dict[str, Any]:
        """Return the image's configuration and history."""
        found: dict[str, Any] = json.loads(self.run("inspect", "--type", "image", image))
        return found


def build(out: Path, base: str, engines: Sequence[str]) -> None:
    """Build everything. Raises BuildError."""
    out.mkdir(parents=True, exist_ok=True)
    settings = pip_settings()
    with tempfile.TemporaryDirectory(prefix="rfork-secrets-") as secrets:
        builder = Builder(out, settings, Path(secrets))
        if not base:
            base = BASE
            make_base(builder)
        sizes = {PLANNER: planner(builder, base, out, settings)}
        for engine in engines:
            sizes |= engine_images(builder, base, engine, settings)
    (out / "images.json").write_text(json.dumps(sizes, indent=1) + "\n", "utf-8")
    for image, size in sizes.items():
        print(f"{image}: {size['bytes'] / 1e6:,.0f} MB, of which {size['added_bytes'] / 1e6:,.0f} MB above its base")


def make_base(builder: Builder) -> None:
    """Make the base, unless it exists: a minimal Debian with Python and venv."""
    if builder.has(BASE):
        return
    print(f"{BASE} …", flush=True)
    with tempfile.TemporaryDirectory(prefix="rfork-base-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        include = f"--include={','.join(BASE_PACKAGES)}"
        done = subprocess.run(
            ["debootstrap", "--variant=minbase", include, SUITE, folder], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise BuildError(f"debootstrap exited with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr}")
        for name in EMPTIED:
            (folder / name).write_text("")
        for name in CACHES:
            for each in (folder / name).iterdir():
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        container = builder.run("from", "scratch")
        builder.run("copy", container, folder, "/")
        builder.run("config", "--cmd", "bash", container)
        builder.run("commit", "--rm", container, BASE)


def planner(builder: Builder, base: str, out: Path, settings: PipSettings) -> dict[str, int]:
    """Build the planner's image, check and describe it. Returns its sizes."""
    builder.build(PLANNER, DOCKER / "Dockerfile", ROOT, BASE=base)
    root = builder.root_of(PLANNER, ROOTFS_CONTAINER)
    configuration = builder.inspect(PLANNER)
    check_names(configuration, files_of(root / "opt"), settings)
    config = configuration["OCIv1"]["config"]
    described = {
        "image": PLANNER,
        "sources": source_digest(),
        "rootfs": str(root),
        "user": config["User"],
        "entrypoint": config["Entrypoint"],
        "environment": dict(each.split("=", 1) for each in config["Env"]),
    }
    (out / DESCRIPTION).write_text(json.dumps(described, indent=1) + "\n", "utf-8")
    print(f"sbom: {sbom.of_image(root, out / f'rfork-image-{__version__}.cdx.json')}")
    size = disk_bytes(root)
    return {"bytes": size, "added_bytes": disk_bytes(root / "opt" / "rfork")}


def engine_images(builder: Builder, base: str, engine: str, settings: PipSettings) -> dict[str, dict[str, int]]:
    """Build an engine's image and the one with rfork added; returns their sizes. Raises BuildError."""
    plain, forking = f"localhost/{engine}-cpu", f"localhost/{engine}-cpu-rfork"
    if not builder.has(plain):
        builder.build(plain, ENGINE_SETUP / "Dockerfile", ENGINE_SETUP, packages=True, BASE=base, ENGINE=engine)
    builder.build(forking, DOCKER / "engine.Dockerfile", ROOT, BASE=plain, RFORK_IMAGE=PLANNER)
    before, after = (builder.root_of(each, f"{each.rpartition('/')[2]}-rootfs") for each in (plain, forking))
    check_names(builder.inspect(forking), (), settings)
    had, has = installed(before), installed(after)
    if changed := [f"{name} {version} -> {has.get(name)}" for name, version in had.items() if has.get(name) != version]:
        raise BuildError(f"{forking} changes packages of the engine: {', '.join(changed)}")
    print(f"{forking}: {len(had)} packages unchanged, added: {', '.join(sorted(has.keys() - had.keys()))}")
    sizes = disk_bytes(before), disk_bytes(after)
    return {forking: {"bytes": sizes[1], "added_bytes": sizes[1] - sizes[0]}}


def installed(root: Path) -> dict[str, str]:
    """Return the versions of the packages in an engine's environment."""
    (packages,) = (root / "opt" / "venv" / "lib").glob("python3.*/site-packages")
    return {each.name: each.version for each in metadata.distributions(path=[str(packages)])}


def check_names(configuration: object, files: Iterator[Path] | tuple[Path, ...], settings: PipSettings) -> None:
    """Raise BuildError if an image's configuration, history or files contain a name of a private package index."""
    names = settings.private_names()
    text = json.dumps(configuration)
    found = [f"{name} in the configuration" for name in names if name in text]
    for file in files:
        content = file.read_bytes()
        found += [f"{name} in {file}" for name in names if name.encode() in content]
    if found:
        raise BuildError(f"the image names a private package index: {', '.join(sorted(found))}")


def files_of(root: Path) -> Iterator[Path]:
    """Yield all regular files below a directory."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                yield path


def disk_bytes(root: Path) -> int:
    """Return the size of all files below a directory."""
    return sum(path.stat().st_size for path in files_of(root))


def source_digest() -> str:
    """Return a digest of the files from which the planner's image is built."""
    digest = hashlib.sha256()
    for name in SOURCES:
        path = ROOT / name
        for file in sorted(files_of(path)) if path.is_dir() else [path]:
            if "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", default="", help="base image; empty: a new one, made by debootstrap")
    parser.add_argument("--engine", action="append", default=[], help="engine to which rfork is added: vllm, sglang")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    needed = ["buildah"] if options.base else ["buildah", "debootstrap"]
    if missing := [name for name in needed if shutil.which(name) is None]:
        print(f"no image was built: {' and '.join(missing)} not installed", file=sys.stderr)
        return 1
    if os.geteuid() != 0:
        print("no image was built: builds with chroot isolation need root (sudo make images)", file=sys.stderr)
        return 1
    try:
        build(options.out.resolve(), options.base, options.engine)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
