"""Takes the documentation's screenshots of the planner's page: ``python -m tests.ui_screenshots FOLDER``."""

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

from planner.server import run_in_thread
from rfork.settings import PlannerSettings
from tests.fleet_player import (
    FleetPlayer,
    advance_forks,
    play_busy_fleet,
    play_large_fleet,
    play_rollout,
    play_unhealthy_fleet,
)

MAX_BYTES: Final = 200_000
COLOURS: Final = 160
"""Number of colours in a picture's palette: sufficient for flat shapes and text."""


@dataclass(frozen=True)
class Screenshot:
    """One picture."""

    name: str
    play: Callable[[FleetPlayer], None]
    width: int = 1360
    height: int = 1500
    colours: Literal["light", "dark"] = "light"
    scale: int = 1


def _play_nothing(fleet: FleetPlayer) -> None:
    pass


def _play_rollout(fleet: FleetPlayer) -> None:
    play_rollout(fleet)


def _play_large_fleet(fleet: FleetPlayer) -> None:
    plans = play_large_fleet(fleet)
    draw = random.Random(3)
    advance_forks(fleet, plans, 1, draw)


SCREENSHOTS: Final = (
    Screenshot("ui-empty", _play_nothing, height=640),
    Screenshot("ui-fleet", play_busy_fleet),
    Screenshot("ui-rollout", _play_rollout, height=900),
    Screenshot("ui-trouble", play_unhealthy_fleet),
    Screenshot("ui-dark", play_busy_fleet, colours="dark"),
    Screenshot("ui-phone", play_unhealthy_fleet, width=360, height=1100, scale=2),
    Screenshot("ui-1000", _play_large_fleet),
)


def main(folder: Path) -> int:
    """Take all screenshots; return 1 if one is too large for a documentation page."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        print("there is no chromium on PATH: install the package chromium")
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        stack.callback(browser.close)
        sizes = {screenshot.name: _capture_screenshot(browser, screenshot, folder) for screenshot in SCREENSHOTS}
    for name, nbytes in sizes.items():
        print(f"{folder / name}.png  {nbytes / 1000:.0f} kB")
    return int(max(sizes.values()) > MAX_BYTES)


def _capture_screenshot(browser: Browser, screenshot: Screenshot, folder: Path) -> int:
    settings = PlannerSettings(
        port=0, batch_window_s=0, scaleup_wait_s=0, heartbeat_interval_s=600, instance_ttl_s=6000
    )
    with run_in_thread(settings) as url, FleetPlayer(url) as fleet:
        context = browser.new_context(
            viewport={"width": screenshot.width, "height": screenshot.height},
            color_scheme=screenshot.colours,
            device_scale_factor=screenshot.scale,
            reduced_motion="reduce",
        )
        with context:
            page = context.new_page()
            _open_page(page, url)
            screenshot.play(fleet)
            # The page receives totals every two seconds; afterwards the screenshot is complete.
            page.wait_for_timeout(2600)
            picture = page.screenshot()
    path = folder / f"{screenshot.name}.png"
    few = Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    return path.stat().st_size


def _open_page(page: Page, url: str) -> None:
    page.goto(f"{url}/ui")
    page.wait_for_selector("body[data-link=live]")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
