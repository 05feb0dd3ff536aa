"""The site of docs/: built with warnings as errors, complete, and readable without internet access."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.slow  # also: `make docs`

ROOT = Path(__file__).parents[2]
RESOURCE_ATTRIBUTES = {
    ("audio", "src"), ("embed", "src"), ("iframe", "src"), ("img", "src"), ("img", "srcset"),
    ("input", "src"), ("link", "href"), ("object", "data"), ("script", "src"), ("source", "src"),
    ("video", "poster"), ("video", "src"),
}  # fmt: skip
"""Attributes whose URL a browser fetches automatically."""
NOT_FETCHED = {"canonical", "next", "prev", "alternate"}


class SitePage(HTMLParser):
    """Links, loaded resources and link anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attributes if value is not None}
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif values.get("rel") not in NOT_FETCHED:
            self.loads += [value for name, value in values.items() if (tag, name) in RESOURCE_ATTRIBUTES]


def is_external(link: str) -> bool:
    """Return True if a link leaves the site."""
    return bool(urlsplit(link).scheme or urlsplit(link).netloc)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the built site."""
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("NO Zensical: THE SITE OF THE DOCS IS NOT TESTED: pip install 'rfork[docs]'")
    out = tmp_path_factory.mktemp("docs") / "site"
    built = subprocess.run(
        [sys.executable, "-m", "docs.site.build", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == built.returncode, built.stdout + built.stderr
    assert out.is_dir(), built.stdout + built.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, SitePage]:
    """Every page of the site."""
    return {path: SitePage(path) for path in site.rglob("*.html")}


def inner_links(path: Path, page: SitePage) -> Iterator[tuple[str, Path, str]]:
    """Each link of a page within the site: as written, the file, and the anchor in it."""
    for link in page.links:
        parts = urlsplit(link)
        if not is_external(link):
            target = path.parent / unquote(parts.path) if parts.path else path
            target = target.resolve()
            yield link, target / "index.html" if target.is_dir() else target, unquote(parts.fragment)


def test_each_page_of_docs_is_in_the_site(site: Path) -> None:
    """Every page is part of the site and linked from the navigation of the first."""
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    expected = {str(path.with_suffix(".html")) for path in sources if path.parts[0] != "site"}
    navigated = {
        str(target.relative_to(site.resolve()))
        for _, target, _ in inner_links(site / "index.html", SitePage(site / "index.html"))
        if target.is_relative_to(site.resolve())
    }
    config = (ROOT / "docs" / "site" / "zensical.toml").read_text()
    assert set() == {page for page in expected if not (site / page).is_file()}
    assert set() == {page for page in expected if f'"{page.removesuffix(".html")}.md"' not in config}
    assert "quickstart.html" in navigated


def test_links_and_anchors_exist(pages: dict[Path, SitePage]) -> None:
    """Each link within the site leads to an existing page and anchor."""
    known = {path.resolve(): page for path, page in pages.items()}
    wrong = [
        f"{path.name}: {link}"
        for path, page in pages.items()
        if path.name != "404.html"
        for link, target, anchor in inner_links(path, page)
        if not target.is_file() or (target in known and anchor not in known[target].anchors)
    ]
    assert [] == wrong


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, SitePage]) -> None:
    """No font, script, style or picture comes from another host."""
    assert [] == [f"{path.name}: {url}" for path, page in pages.items() for url in page.loads if is_external(url)]


def test_styles_load_nothing_from_elsewhere(site: Path) -> None:
    """No style sheet or drawing refers to another host."""
    wrong = [
        path.name
        for pattern in ("*.css", "*.svg")
        for path in site.rglob(pattern)
        if "url(http" in (text := path.read_text()) or "url(//" in text or "@import" in text or 'href="http' in text
    ]
    assert [] == wrong


def test_comments_to_tests_are_not_shown(site: Path) -> None:
    """Comments for tests are not part of the site."""
    assert [] == [path.name for path in site.rglob("*.html") if "<!-- run by" in path.read_text()]
