"""Takes the pictures of the planner's page that the documents show: ``python -m tests.ui_screens FOLDER``."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from planner.service import running
from rfork.settings import PlannerSettings
from tests.ui_fleet import (
    FleetPlayer,
    advance,
    play_busy_fleet,
    play_rollout,
    play_thousand,
    play_trouble,
)

MOST_BYTES: Final = 200_000
COLOURS: Final = 160
"""Of a picture's palette: enough for flat signs and text."""


@dataclass(frozen=True)
class Shot:
    """One picture."""

    name: str
    play: Callable[[FleetPlayer], None]
    width: int = 1360
    height: int = 1500
    colours: Literal["light", "dark"] = "light"
    scale: int = 1


def _nobody(fleet: FleetPlayer) -> None:
    pass


def _rollout(fleet: FleetPlayer) -> None:
    play_rollout(fleet)


def _thousand(fleet: FleetPlayer) -> None:
    plans = play_thousand(fleet)
    draw = random.Random(3)
    advance(fleet, plans, 1, draw)


SHOTS: Final = (
    Shot("ui-empty", _nobody, height=640),
    Shot("ui-fleet", play_busy_fleet),
    Shot("ui-rollout", _rollout, height=900),
    Shot("ui-trouble", play_trouble),
    Shot("ui-dark", play_busy_fleet, colours="dark"),
    Shot("ui-phone", play_trouble, width=360, height=1100, scale=2),
    Shot("ui-1000", _thousand),
)


def main(folder: Path) -> int:
    """Take all of them; 1 where one is too large for a page of documents."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        print("there is no chromium on PATH: install the package chromium")
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        stack.callback(browser.close)
        sizes = {shot.name: _take(browser, shot, folder) for shot in SHOTS}
    for name, nbytes in sizes.items():
        print(f"{folder / name}.png  {nbytes / 1000:.0f} kB")
    return int(max(sizes.values()) > MOST_BYTES)


def _take(browser: Browser, shot: Shot, folder: Path) -> int:
    settings = PlannerSettings(port=0, batch_s=0, gather_s=0, heartbeat_s=600, forget_s=6000)
    with running(settings) as url, FleetPlayer(url) as fleet:
        context = browser.new_context(
            viewport={"width": shot.width, "height": shot.height},
            color_scheme=shot.colours,
            device_scale_factor=shot.scale,
            reduced_motion="reduce",
        )
        with context:
            page = context.new_page()
            _open(page, url)
            shot.play(fleet)
            # The sums over all instances are told every two seconds: by then the picture is whole.
            page.wait_for_timeout(2600)
            picture = page.screenshot()
    path = folder / f"{shot.name}.png"
    few = Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    return path.stat().st_size


def _open(page: Page, url: str) -> None:
    page.goto(f"{url}/ui")
    page.wait_for_selector("body[data-link=live]")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
