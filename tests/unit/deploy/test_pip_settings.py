"""pip settings that builds of images get as secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.buildah import images
from deploy.buildah.pip_settings import CA_SECRET, parse, pip_settings

LISTED = """\
:env:.index-url='https://user:password@mirror.example/simple'
:env:.find-links='/'
global.cert='/etc/ca.pem'
global.constraint='/etc/constraints.txt'
global.extra-index-url='\\nfile:///usr/simple\\nhttps://pypi.org/simple'
global.index-url='https://other.example/simple'
install.timeout='60'
list.format='columns'
"""


def test_settings_about_packages_are_passed() -> None:
    """Index, links and timeouts are passed; the environment overrides files; other settings stay here."""
    assert {
        "index-url": "https://user:password@mirror.example/simple",
        "extra-index-url": "file:///usr/simple https://pypi.org/simple",
        "find-links": "/",
        "timeout": "60",
    } == parse(LISTED).values


def test_the_ca_bundle_is_a_secret_of_its_own() -> None:
    """pip in the build reads the bundle from the secret."""
    settings = parse(LISTED)
    assert Path("/etc/ca.pem") == settings.ca
    assert f"cert = {CA_SECRET}" in settings.config().splitlines()
    assert "cert" not in parse("").config()


def test_directories_are_mounted() -> None:
    """Directories of packages are mounted; of an index in `simple`, the directory above it."""
    assert (Path("/usr"), Path("/")) == parse(LISTED).folders()


def test_private_names_exclude_the_public_index() -> None:
    """Host names of private indexes are searched for in images; pypi.org is no secret."""
    names = parse(LISTED).private_names()
    assert "mirror.example" in names
    assert "pypi.org" not in names


def test_this_machines_settings_are_readable() -> None:
    """The output of the installed pip is understood."""
    assert pip_settings().config().startswith("[global]\n")


def test_a_private_name_in_an_image_is_an_error(tmp_path: Path) -> None:
    """The configuration, and each file, are searched."""
    settings = parse(":env:.index-url='https://mirror.example/simple'\n")
    file = tmp_path / "METADATA"
    file.write_text("https://mirror.example/simple/rfork")
    images.check_names({"history": ["pip install"]}, (), settings)
    with pytest.raises(images.BuildError, match=r"mirror\.example in the configuration"):
        images.check_names({"history": ["--index-url https://mirror.example"]}, (), settings)
    with pytest.raises(images.BuildError, match=r"mirror\.example in .*METADATA"):
        images.check_names({}, (file,), settings)


def test_the_digest_is_of_the_sources_of_the_image() -> None:
    """The digest covers what Dockerfile copies."""
    assert set(images.SOURCES) <= {"deploy/docker", "planner", "rfork", "pyproject.toml", "constraints.txt"}
    assert images.source_digest() == images.source_digest()
