"""The planner's page in Chromium, for fleets in various states."""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import Page, expect

from rfork.weights_version import short
from tests.fleet_player import (
    GB,
    LLAMA,
    FleetPlayer,
    advance_forks,
    llama,
    play_busy_fleet,
    play_large_fleet,
    play_rollout,
    play_unhealthy_fleet,
)
from tests.integration.ui.planner_page import accessibility_violations, drawn_rows, open_page

WATCH_EDGES = """
  window.edges = [];
  let edge = false;
  const pen = CanvasRenderingContext2D.prototype;
  const { clearRect, beginPath, bezierCurveTo, stroke } = pen;
  pen.clearRect = function (...box) { window.edges = []; return clearRect.apply(this, box); };
  pen.beginPath = function () { edge = false; return beginPath.apply(this); };
  pen.bezierCurveTo = function (...to) { edge = true; return bezierCurveTo.apply(this, to); };
  pen.stroke = function (...path) {
    if (edge) window.edges.push(this.lineWidth);
    return stroke.apply(this, path);
  };
"""
"""Records the edge widths of the fork tree as it was last drawn."""


def edges(page: Page) -> list[float]:
    """Return the edge widths of the fork tree in ascending order; needs `WATCH_EDGES`."""
    page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    return sorted(page.evaluate("window.edges"))


@contextlib.contextmanager
def repeating_progress(fleet: FleetPlayer) -> Iterator[None]:
    """Keep reporting the forks' progress, because the page treats a rate that is a few seconds old as none."""
    stopped = threading.Event()

    def resend_progress() -> None:
        while not stopped.wait(1.0):
            fleet.resend_progress()

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(resend_progress)
        try:
            yield
        finally:
            stopped.set()
    future.result()


@pytest.mark.slow  # logic: tests/unit/planner/ui/test_broadcaster.py
def test_an_empty_fleet_shows_how_to_start(page: Page, planner: str) -> None:
    """Without instances the page shows the commands to start some, with this planner's URL."""
    open_page(page, planner)
    expect(page.locator("#headline")).to_have_text("No instances yet")
    assert planner in page.locator("#commands").inner_text()
    assert [False] * 4 == [page.locator(f"#{name}").is_visible() for name in ("tree", "models", "phases", "problems")]
    assert [] == accessibility_violations(page)


def test_a_busy_fleet(page: Page, fleet: FleetPlayer, planner: str) -> None:
    """The page shows running forks, rates, remaining time, sources, efficiency and time saved, and updates
    live.
    """
    open_page(page, planner)
    with repeating_progress(fleet):
        play_busy_fleet(fleet)
        expect(page.locator("#headline")).to_have_text("No problems")
        expect(page.locator("#subline")).to_contain_text("13 forks running")
        expect(page.locator("#figures")).not_to_contain_text("unknown")
        expect(page.locator("#scaleup-list")).to_contain_text("10 replicas of")
        first = drawn_rows(page).first
        expect(first).to_contain_text("llama-7c9f-0")
        assert "1" == first.get_attribute("aria-level")
        assert "true" == first.get_attribute("aria-expanded")
        assert {"seed", "relay", "target"} <= set(page.locator("#legend").inner_text().split())
        expect(page.locator("#source-rows")).to_contain_text("1.60 GB/s")
        fleet.end(llama(11), fleet.request_fork(llama(11), "x"), 9.5)
        expect(page.locator("#subline")).to_contain_text("12 forks running")
        page.locator("#model-rows button", has_text="Mistral").click()
        expect(drawn_rows(page).first).to_contain_text("checkpoint /models/checkpoint")
        assert [] == accessibility_violations(page)
    # Its reader has not reported progress since the rate limit was set.
    fleet.report(llama(4), "a2-n11", egress_rate=int(1.4 * GB))
    expect(page.locator("#source-rows")).to_contain_text("1.40 GB/s")


def test_an_image_of_a_holder_is_no_engine(page: Page, fleet: FleetPlayer, planner: str) -> None:
    """It is shown as a holder, counts as a seed, and an old version that it keeps is no rollout."""
    open_page(page, planner)
    fleet.seed("serving-1", "a1-n1", version="v2")
    fleet.seed("held-1", "a1-n2", version="v1", holder="holder-1")
    expect(page.locator("#legend")).to_contain_text("holder")
    expect(page.locator("#subline")).to_contain_text("2 seeds of 1 model")
    expect(page.locator("#rollouts")).to_be_hidden()
    assert [] == accessibility_violations(page)


@pytest.mark.slow  # logic: tests/unit/planner/ui/test_broadcaster.py
def test_a_rollout_of_new_weights(page: Page, fleet: FleetPlayer, planner: str) -> None:
    """Both versions are counted, each has its own row and its own fork tree, and no problem is listed."""
    open_page(page, planner)
    before, after = play_rollout(fleet)
    rollout = page.locator("#rollout-list > li")
    expect(rollout).to_have_text(re.compile(f"{LLAMA}.*6 serving.*1 serving, 3 loading"))
    assert [before, after] == [each.get_attribute("title") for each in rollout.locator(".version").all()]
    expect(page.locator("#headline")).to_have_text("No problems")
    title, models = page.locator("#tree-title"), page.locator("#model-rows tr")
    expect(title).to_have_text(f"Fork tree of {LLAMA}, {short(after)}")
    expect(models).to_have_count(2)
    models.filter(has_text=short(before)).get_by_role("button").click()
    expect(title).to_have_text(f"Fork tree of {LLAMA}, {short(before)}")
    expect(page.locator("#tree-words")).to_have_text("no forks running; 6 instances in the table")
    page.locator("#filter").fill(after)
    expect(models).to_have_count(1)
    drawn_rows(page).filter(has_text="llama-7c9f-01").click()
    expect(page.locator("#details-body")).to_contain_text(after)
    assert [] == accessibility_violations(page)


@pytest.mark.slow  # logic: tests/unit/planner/ui/test_broadcaster.py
def test_the_first_instance_of_a_version_is_no_problem(page: Page, fleet: FleetPlayer, planner: str) -> None:
    """It has no source and loads from storage while others serve the previous version: the start of a
    rollout.
    """
    open_page(page, planner)
    fleet.seed("old", "a1-n1", version="v1")
    for name in ("waits", "loaded"):
        plan = fleet.request_fork(name, "a1-n2", version=f"v2-{name}", storage=())
        assert f"first of version v2-{name} of model {LLAMA}; 1 instance serves v1" == plan.reason
    why = (f"NoSource: {plan.reason}",)
    fleet.end("loaded", plan, 30.0, outcome="fallback", fallback="loader:", reasons=why)
    expect(page.locator("#outcomes")).to_contain_text("1 fell back")
    expect(page.locator("#headline")).to_have_text("No problems")


def test_the_page_shortens_versions_as_commands_do(page: Page, planner: str) -> None:
    """A version reads the same on the page and in a terminal."""
    versions = ["2026-11-23", f"files:{'a' * 32}", f"commit:{'b' * 40}", "update:llama-7c9f:12", "files:", ""]
    open_page(page, planner)
    script = "(versions) => import('./page/format.js').then((format) => versions.map(format.shortVersion))"
    assert [short(version) if version else "" for version in versions] == page.evaluate(script, versions)


def test_problems_come_first(page: Page, fleet: FleetPlayer, planner: str) -> None:
    """Problems are listed first, with their reasons; fallbacks are counted by reason."""
    play_unhealthy_fleet(fleet)
    open_page(page, planner)
    problems = page.locator("#problem-list")
    expect(page.locator("#headline")).to_contain_text("problems")
    for text in (
        "ChunkMismatch: chunk 41 does not match its digest",
        "a reader could not connect",
        "OutOfMemory: 16.1 GB required",
        "gemma-0 on b3-n0 has no source",
        "fell back to checkpoint /models/checkpoint",
        "is draining and still has readers",
    ):
        expect(problems).to_contain_text(text)
    assert "error" == problems.locator("li").first.get_attribute("data-level")
    expect(page.locator("#reasons")).to_contain_text("SourceTimeout→ checkpoint /models/checkpoint")
    assert page.title().startswith("(")
    assert [] == accessibility_violations(page)
    page.locator("#filter").fill("gemma")
    expect(problems.locator("li")).to_have_count(2)
    expect(page.locator("#subline")).to_have_text("2 instances of 31 match the filter.")


def test_a_fork_is_explained_in_a_dialog(page: Page, fleet: FleetPlayer, planner: str) -> None:
    """A click on a problem opens the details of its instance; Escape closes them."""
    play_unhealthy_fleet(fleet)
    open_page(page, planner)
    page.locator("#problem-list button", has_text="llama-7c9f-40").click()
    details = page.locator("#details")
    for text in (llama(40), "OutOfMemory", "rack a4", "failed in 2.2 s", LLAMA):
        expect(details).to_contain_text(text)
    assert [] == accessibility_violations(page)
    page.keyboard.press("Escape")
    expect(details).to_be_hidden()


@pytest.mark.slow  # logic: tests/unit/planner/ui/test_broadcaster.py
def test_edge_width_shows_the_reported_rate(page: Page, fleet: FleetPlayer, planner: str) -> None:
    """Each of two sources shows the rate that its reader reported, and no rate if the reader reported none."""
    for name, max_rate in (("fast", 3 * GB), ("slow", GB)):
        fleet.seed(name, f"a1-{name}", egress_rate=int(max_rate))
    plan = fleet.request_fork("target", "a2-n1", storage=())
    assert {"fast", "slow"} == {route.source_id for route in plan.routes}
    fleet.progress("target", 60, 4.1 * GB, plan, rates={"fast": 3.02 * GB, "slow": 1.01 * GB})
    page.add_init_script(WATCH_EDGES)
    with repeating_progress(fleet):
        open_page(page, planner)
        source_rows = page.locator("#source-rows")
        for text in ("3.02 GB/s", "1.01 GB/s"):
            expect(source_rows).to_contain_text(text)
        narrow, wide = edges(page)
        # An edge's width is proportional to the square root of its rate.
        assert round(3.02 / 1.01, 2) == round((wide / narrow) ** 2, 2)
        drawn_rows(page).filter(has_text="target").first.click()
        expect(page.locator("#details")).to_contain_text("fast over http at 3.02 GB/s")
        fleet.progress("target", 61, 3.0 * GB, plan, rates={"fast": 2.99 * GB})
        expect(source_rows).to_contain_text("2.99 GB/s")
        assert [1, wide] == edges(page)


@pytest.mark.slow  # logic: tests/unit/planner/ui/test_broadcaster.py
def test_only_visible_rows_of_a_thousand_instances_are_rendered(page: Page, fleet: FleetPlayer, planner: str) -> None:
    """The table renders only visible rows, shows the total count, and scrolls to its end with the End key."""
    plans = play_large_fleet(fleet)
    advance_forks(fleet, plans, 1, random.Random(1))
    open_page(page, planner)
    expect(page.locator("#subline")).to_contain_text("150 forks running")
    expect(page.locator("#subline")).to_contain_text("1,000 instances in total")
    assert 1000 == page.locator("#racks .dot").count()
    assert 40 > drawn_rows(page).count()
    assert 150 < int(page.locator("#treegrid").get_attribute("aria-rowcount") or 0)
    page.locator("#treegrid").focus()
    page.keyboard.press("End")
    last = drawn_rows(page).last
    expect(last).to_contain_text("without readers")
