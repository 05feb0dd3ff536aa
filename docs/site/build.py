"""Build the documentation site: copy all pages, and the files that they link to, into one folder for
Zensical.

    python -m docs.site.build [--out FOLDER] [--serve]

Pages link to files of the repository, such as ``../rfork/settings.py``, so that the links work in any
checkout. In the site these files become pages. Generated parts of a page (``<!-- generated: NAME -->``) are
created at each build. Warnings are errors.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from docs.site.reference.pages import fill_markers

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
SITE: Final = DOCS / "site"

EXTRA_PAGES: Final = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "deploy/helm/rfork/README.md": "chart.md",
    "deploy/examples/README.md": "examples.md",
}
"""Pages outside docs/, and their names in the site."""
LANGUAGES: Final = {
    ".json": "json",
    ".proto": "proto",
    ".py": "python",
    ".sh": "bash",
    ".toml": "toml",
    ".txt": "text",
    ".yaml": "yaml",
    ".yml": "yaml",
}
FENCE: Final = re.compile(r"^ *(```+|~~~+)", re.MULTILINE)
LINK: Final = re.compile(r"(?<=\]\()(?P<target>[^)\s]+)(?=\))")
COMMENT: Final = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
"""Comments that pages contain for their tests (tests/docs)."""


class BrokenLink(Exception):
    """A page links to a file that does not exist."""


def outside_code(text: str) -> Iterator[tuple[str, bool]]:
    """Split a text into parts, each with a flag: prose, or a fenced block."""
    fence, prose = "", True
    piece: list[str] = []
    for line in text.splitlines(keepends=True):
        mark = FENCE.match(line)
        if mark and (prose or mark[1].startswith(fence)):
            if prose:
                yield "".join(piece), True
                piece, prose, fence = [line], False, mark[1]
            else:
                yield "".join([*piece, line]), False
                piece, prose = [], True
        else:
            piece.append(line)
    yield "".join(piece), prose


def is_elsewhere(target: str) -> bool:
    """Return True if a link leads to the web or to an anchor on its own page."""
    return target.startswith("#") or re.match(r"[a-z]+:", target) is not None


@dataclass
class SiteFolder:
    """Folder from which Zensical builds the site."""

    folder: Path
    rendered: set[Path] = field(default_factory=set)
    """Files of the repository that have become pages."""

    def run(self) -> None:
        """Fill the folder with all pages and pictures of docs/, the extra pages, and the files that these
        link to.
        """
        for path in sorted(DOCS.rglob("*")):
            inside = path.relative_to(DOCS)
            if path.is_dir() or inside.parts[0] == SITE.name:
                continue
            if path.suffix == ".md":
                self.page(path, inside)
            else:
                self.write(inside, path.read_bytes())
        for extra_page, name in EXTRA_PAGES.items():
            if (ROOT / extra_page).is_file():
                self.page(ROOT / extra_page, Path(name))
        for style in SITE.glob("*.css"):
            self.write(Path(style.name), style.read_bytes())

    def page(self, path: Path, name: Path) -> None:
        """Add a page with adapted links and without comments for its tests."""
        text = "".join(
            LINK.sub(lambda link: self.target(link["target"], path, name), COMMENT.sub("", piece)) if prose else piece
            for piece, prose in outside_code(fill_markers(path.read_text()))
        )
        self.write(name, text.encode())

    def target(self, target: str, page: Path, name: Path) -> str:
        """Return the target that a link of a page has in the site."""
        if is_elsewhere(target):
            return target
        path, _, anchor = target.partition("#")
        source_path = (page.parent / path).resolve()
        if not source_path.exists():
            raise BrokenLink(f"{page.relative_to(ROOT)} links to {target}, which does not exist")
        site_target = self.site_path(source_path)
        up = "../" * (len(name.parts) - 1)
        return f"{up}{site_target}{'#' + anchor if anchor else ''}"

    def site_path(self, source_path: Path) -> str:
        """Return the path in the site of a file or folder of the repository; add it if it is missing."""
        inside = str(source_path.relative_to(ROOT))
        if source_path.is_relative_to(DOCS):
            return str(source_path.relative_to(DOCS))
        if inside in EXTRA_PAGES:
            return EXTRA_PAGES[inside]
        if source_path.is_dir() and f"{inside}/README.md" in EXTRA_PAGES:
            return EXTRA_PAGES[f"{inside}/README.md"]
        page_path = f"files/{inside}.md"
        if source_path not in self.rendered:
            self.rendered.add(source_path)
            self.write(Path(page_path), self.render_file_page(source_path, inside).encode())
        return page_path

    def render_file_page(self, source_path: Path, inside: str) -> str:
        """Return a file as a page, or the list of a folder's contents."""
        title = f"---\nsearch:\n  exclude: true\n---\n\n# `{inside}`\n\n"
        if source_path.is_dir():
            files = sorted(path for path in source_path.rglob("*") if path.is_file() and path.suffix in LANGUAGES)
            up = "../" * len(Path("files", inside).parts[:-1])
            lines = [f"- [`{path.relative_to(source_path)}`]({up}{self.site_path(path)})" for path in files]
            return title + "\n".join(lines) + "\n"
        language = LANGUAGES.get(source_path.suffix, "text")
        return f"{title}``````{language}\n{source_path.read_text()}\n``````\n"

    def write(self, name: Path, content: bytes) -> None:
        """Write a file to the folder."""
        path = self.folder / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def build(out: Path, *, serve: bool = False) -> int:
    """Build the site into a folder, or serve it on a local port. Return Zensical's exit code."""
    with tempfile.TemporaryDirectory(prefix="rfork-docs-") as made:
        folder = Path(made)
        try:
            SiteFolder(folder).run()
        except BrokenLink as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        config = folder / "zensical.toml"
        config.write_text((SITE / "zensical.toml").read_text().replace("@ROOT@", str(ROOT)))
        how = ["serve"] if serve else ["build", "--strict"]
        command = [sys.executable, "-m", "zensical", *how, "--config-file", str(config)]
        done = subprocess.run(command, cwd=folder, check=False)
        if done.returncode == 0 and not serve:
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(folder / "site", out)
        return done.returncode


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs", help="output folder")
    parser.add_argument("--serve", action="store_true", help="serve the site on http://localhost:8000 instead")
    parsed = parser.parse_args()
    return build(parsed.out.resolve(), serve=parsed.serve)


if __name__ == "__main__":
    sys.exit(main())
