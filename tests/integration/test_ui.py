"""The planner's page, in a real Chromium, over a real planner that is told of fleets."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright

from planner.service import running
from rfork.settings import PlannerSettings
from tests.conftest import StartRfork
from tests.ui_fleet import (
    GB,
    LLAMA,
    FleetPlayer,
    advance,
    identity,
    llama,
    play_busy_fleet,
    play_thousand,
    play_trouble,
)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PLANNER = r"planner.*(http://127\.0\.0\.1:\d+)"
HOSTILE = "<img src=x onerror=alert(1)>"
PATIENCE_S = 30
"""For what the page is to show soon: the machine may be busy."""
SERIOUS = ("serious", "critical")
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
"""Keeps the widths of the edges of the fork tree as it was drawn last."""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="NO chromium ON PATH: the planner's page is NOT tested"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of the module."""
    expect.set_options(timeout=PATIENCE_S * 1000)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A window of a desktop."""
    with browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce") as context:
        yield context


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A tab in which no script fails, and the page breaks no rule of its own policy."""
    page, wrong = context.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None
    )
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.set_default_timeout(PATIENCE_S * 1000)
    yield page
    page.close()
    assert [] == wrong


@pytest.fixture
def planner() -> Iterator[str]:
    """The URL of a planner that forgets nobody while a test looks."""
    with running(_settings()) as url:
        yield url


@pytest.fixture
def fleet(planner: str) -> Iterator[FleetPlayer]:
    """Everybody who reports to it."""
    with FleetPlayer(planner) as fleet:
        yield fleet


def _settings(**options: str | int | float) -> PlannerSettings:
    return PlannerSettings.model_validate(
        {
            "port": 0,
            "batch_s": 0,
            "gather_s": 0,
            "heartbeat_s": 600,
            "forget_s": 6000,
            "lease_ttl_s": 6000,
            **options,
        }
    )


def _open(page: Page, url: str) -> Page:
    page.goto(f"{url}/ui")
    expect(page.locator("#link-words")).to_have_text("live")
    return page


def _rows(page: Page) -> Locator:
    return page.locator("#treegrid .grid-body [role=row]")


def _edges(page: Page) -> list[float]:
    """How wide the edges of the fork tree are, the thinnest first; after `WATCH_EDGES`."""
    page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    return sorted(page.evaluate("window.edges"))


@contextlib.contextmanager
def _telling(fleet: FleetPlayer) -> Iterator[None]:
    """Its forks go on telling, as forks do: the page takes a rate that is some seconds old for none."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(1.0):
            fleet.progress_again()

    with ThreadPoolExecutor(1) as thread:
        telling = thread.submit(tell)
        try:
            yield
        finally:
            over.set()
    telling.result()


def _violations(page: Page) -> list[str]:
    """What axe-core finds that keeps somebody out: the rule, and the first element that breaks it."""
    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html']}" for each in found if each["impact"] in SERIOUS]


def _give_token(page: Page) -> None:
    """A wrong one, of which the page says so; then ``secret``."""
    token, wrong = page.locator("#token"), page.locator("#ask-wrong")
    expect(token).to_be_focused()
    assert [] == _violations(page)
    token.fill("guess")
    page.keyboard.press("Enter")
    expect(wrong).to_have_text("The planner does not know this token.")
    token.fill("secret")
    page.keyboard.press("Enter")


def test_an_empty_fleet_says_how_to_begin(page: Page, planner: str) -> None:
    """Nobody is there: the page says so, and names the commands with this planner's URL in them."""
    _open(page, planner)
    expect(page.locator("#headline")).to_have_text("No instance is here yet")
    assert planner in page.locator("#commands").inner_text()
    assert [False] * 4 == [
        page.locator(f"#{name}").is_visible() for name in ("tree", "models", "times", "troubles")
    ]
    assert [] == _violations(page)


def test_a_fleet_at_work(page: Page, fleet: FleetPlayer, planner: str) -> None:
    """Under way, how fast, how long yet, who reads from whom; η and what was saved; and it is live."""
    _open(page, planner)
    with _telling(fleet):
        play_busy_fleet(fleet)
        expect(page.locator("#headline")).to_have_text("All is well")
        expect(page.locator("#subline")).to_contain_text("13 forks under way")
        expect(page.locator("#figures")).not_to_contain_text("not known yet")
        expect(page.locator("#scaleup-list")).to_contain_text("10 replicas of")
        first = _rows(page).first
        expect(first).to_contain_text("llama-7c9f-0")
        assert ("1", "true") == (first.get_attribute("aria-level"), first.get_attribute("aria-expanded"))
        assert {"seed", "relay", "target"} <= set(page.locator("#legend").inner_text().split())
        expect(page.locator("#source-rows")).to_contain_text("1.60 GB/s")
        fleet.end(llama(11), fleet.ask(llama(11), "x"), 9.5)
        expect(page.locator("#subline")).to_contain_text("12 forks under way")
        page.locator("#model-rows button", has_text="Mistral").click()
        expect(_rows(page).first).to_contain_text("checkpoint /models/checkpoint")
        assert [] == _violations(page)
    # Its reader has not told since that it is held to this.
    fleet.report(llama(4), "a2-n11", egress_rate=int(1.4 * GB))
    expect(page.locator("#source-rows")).to_contain_text("at most 1.40 GB/s")


def test_a_fleet_in_trouble(page: Page, fleet: FleetPlayer, planner: str) -> None:
    """What is wrong stands first, with its reason; fallbacks are counted by reason."""
    play_trouble(fleet)
    _open(page, planner)
    troubles = page.locator("#trouble-list")
    expect(page.locator("#headline")).to_contain_text("things need a look")
    for said in (
        "ChunkMismatch: chunk 41 has another digest",
        "a reader found nobody there",
        "OutOfMemory: 16.1 GB are wanted",
        "gemma-0 on b3-n0 has no source",
        "fell back to checkpoint /models/checkpoint",
        "drains, and is still read from",
    ):
        expect(troubles).to_contain_text(said)
    assert "wrong" == troubles.locator("li").first.get_attribute("data-level")
    expect(page.locator("#reasons")).to_contain_text("SourceStalled→ checkpoint /models/checkpoint")
    assert page.title().startswith("(")
    assert [] == _violations(page)
    page.locator("#filter").fill("gemma")
    expect(troubles.locator("li")).to_have_count(2)
    expect(page.locator("#subline")).to_have_text("2 instances of 31 fit the filter.")


def test_a_fork_is_explained_in_a_dialog(page: Page, fleet: FleetPlayer, planner: str) -> None:
    """A click on a trouble opens all that is known of its instance; Escape closes it."""
    play_trouble(fleet)
    _open(page, planner)
    page.locator("#trouble-list button", has_text="llama-7c9f-40").click()
    details = page.locator("#details")
    for said in (llama(40), "OutOfMemory", "rack a4", "failed in 2.2 s", LLAMA):
        expect(details).to_contain_text(said)
    assert [] == _violations(page)
    page.keyboard.press("Escape")
    expect(details).to_be_hidden()


def test_each_edge_is_as_thick_as_the_fork_told(page: Page, fleet: FleetPlayer, planner: str) -> None:
    """Of two sources each has the rate that its reader told, and none where that tells of none."""
    for name, capped in (("fast", 3 * GB), ("slow", GB)):
        fleet.seed(name, f"a1-{name}", egress_rate=int(capped))
    plan = fleet.ask("target", "a2-n1", storage=())
    assert {"fast", "slow"} == {route.source_id for route in plan.routes}
    fleet.progress("target", 60, 4.1 * GB, plan, rates={"fast": 3.02 * GB, "slow": 1.01 * GB})
    page.add_init_script(WATCH_EDGES)
    with _telling(fleet):
        _open(page, planner)
        gives = page.locator("#source-rows")
        for said in ("3.02 GB/s", "1.01 GB/s"):
            expect(gives).to_contain_text(said)
        thin, thick = _edges(page)
        # An edge's width goes by the root of its rate.
        assert round(3.02 / 1.01, 2) == round((thick / thin) ** 2, 2)
        _rows(page).filter(has_text="target").first.click()
        expect(page.locator("#details")).to_contain_text("fast over http at 3.02 GB/s")
        fleet.progress("target", 61, 3.0 * GB, plan, rates={"fast": 2.99 * GB})
        expect(gives).to_contain_text("2.99 GB/s")
        assert [1, thick] == _edges(page)


def test_a_thousand_instances_are_drawn_as_far_as_they_are_seen(
    page: Page, fleet: FleetPlayer, planner: str
) -> None:
    """The table holds rows for what is seen alone, says how many there are, and goes to its end by key."""
    plans = play_thousand(fleet)
    advance(fleet, plans, 1, random.Random(1))
    _open(page, planner)
    expect(page.locator("#subline")).to_contain_text("150 forks under way")
    expect(page.locator("#subline")).to_contain_text("1,000 instances in all")
    assert 1000 == page.locator("#racks .dot").count()
    assert 40 > _rows(page).count()
    assert 150 < int(page.locator("#treegrid").get_attribute("aria-rowcount") or 0)
    page.locator("#treegrid").focus()
    page.keyboard.press("End")
    last = _rows(page).last
    expect(last).to_contain_text("that nobody reads from")


def test_a_phone_shows_it_all_without_scrolling_sideways(
    browser: Browser, fleet: FleetPlayer, planner: str
) -> None:
    """At 360 px nothing is wider than the screen, in the dark either, and contrast holds."""
    play_trouble(fleet)
    options = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "is_mobile": True}
    with browser.new_context(**options) as context:  # type: ignore[arg-type]  # a mapping of its options
        page = _open(context.new_page(), planner)
        expect(page.locator("#trouble-list")).to_contain_text("ChunkMismatch")
        assert 360 == page.evaluate("document.documentElement.scrollWidth")
        assert "rgb(14, 20, 27)" == page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert [] == _violations(page)


def test_the_colours_are_chosen_and_kept(page: Page, planner: str) -> None:
    """The switch goes before what the system says, also after the page was loaded anew."""
    _open(page, planner)
    ground = "getComputedStyle(document.body).backgroundColor"
    assert "rgb(243, 245, 247)" == page.evaluate(ground)
    page.locator("#theme").select_option("dark")
    assert "rgb(14, 20, 27)" == page.evaluate(ground)
    page.reload()
    assert "rgb(14, 20, 27)" == page.evaluate(ground)
    page.locator("#theme").select_option("auto")


def test_the_keyboard_alone_is_enough(page: Page, fleet: FleetPlayer, planner: str) -> None:
    """Skip link, filter by /, and the tree by arrows: in, out, open, to one's details and back."""
    play_busy_fleet(fleet)
    _open(page, planner)
    page.keyboard.press("Tab")
    assert "Skip to the fleet" == page.evaluate("document.activeElement.textContent")
    page.keyboard.press("/")
    page.keyboard.type("llama-7c9f-04")
    expect(page.locator("#subline")).to_contain_text("1 instance of")
    page.keyboard.press("Escape")
    expect(page.locator("#subline")).to_contain_text("under way")
    page.locator("#treegrid").focus()
    active = page.locator("#treegrid [data-here]")
    expect(active).to_have_attribute("aria-level", "1")
    page.keyboard.press("ArrowRight")
    expect(active).to_have_attribute("aria-level", "2")
    page.keyboard.press("ArrowLeft")
    expect(active).to_have_attribute("aria-expanded", "false")
    page.keyboard.press("ArrowLeft")
    expect(active).to_have_attribute("aria-level", "1")
    assert page.locator("#treegrid").get_attribute("aria-activedescendant") == active.get_attribute("id")
    page.keyboard.press("Enter")
    expect(page.locator("#details")).to_contain_text("holds every chunk")
    page.keyboard.press("Escape")
    expect(page.locator("#treegrid")).to_be_focused()


def test_names_of_callers_are_text(page: Page, fleet: FleetPlayer, planner: str) -> None:
    """Markup in a model's name, a host and a reason is shown as it is written."""
    fleet.seed("s", HOSTILE, model=HOSTILE)
    plan = fleet.ask("t", f"{HOSTILE}2", model=HOSTILE)
    fleet.end("t", plan, 2.0, outcome="failed", reasons=(f"{HOSTILE}: so it was",))
    _open(page, planner)
    for part in ("#model-rows", "#racks", "#trouble-list", "#reasons", "#tree-title"):
        expect(page.locator(part)).to_contain_text(HOSTILE)
    assert 0 == page.locator("main img").count()


def test_a_planner_that_dies_is_told_of_and_found_again(
    page: Page, rfork_process: StartRfork, free_port: int
) -> None:
    """The old picture stays, and says how old it is; a new planner on the same port is taken up by itself."""
    options = {"RFORK_PLANNER_HEARTBEAT_S": "600", "RFORK_PLANNER_FORGET_S": "6000"}
    first = rfork_process("planner", "--port", str(free_port), until=PLANNER, environment=options)
    url = f"http://127.0.0.1:{free_port}"
    with FleetPlayer(url) as fleet:
        fleet.seed(identity("first"), "a1-n1")
        _open(page, url)
        expect(page.locator("#racks")).to_contain_text("a1-n1")
        first.signal(signal.SIGKILL)
        expect(page.locator("#gone")).to_contain_text("The planner is gone")
        expect(page.locator("#link-words")).to_have_text("planner gone")
        expect(page.locator("#racks")).to_contain_text("a1-n1")
        assert [] == _violations(page)
    rfork_process("planner", "--port", str(free_port), until=PLANNER, environment=options)
    with FleetPlayer(url) as fleet:
        fleet.seed(identity("second"), "a2-n2")
        expect(page.locator("#link-words")).to_have_text("live")
        expect(page.locator("#gone")).to_be_hidden()
        expect(page.locator("#racks")).to_contain_text("a2-n2")
        expect(page.locator("#racks")).not_to_contain_text("a1-n1")


def test_a_token_is_asked_for_once(page: Page) -> None:
    """The page itself is open; a wrong token is said to be wrong; a right one stays with the tab."""
    with running(_settings(token="secret")) as url, FleetPlayer(url, token="secret") as fleet:
        fleet.seed(identity("s"), "a1-n1")
        page.goto(f"{url}/ui")
        _give_token(page)
        expect(page.locator("#link-words")).to_have_text("live")
        expect(page.locator("#ask")).to_be_hidden()
        expect(page.locator("#racks")).to_contain_text("a1-n1")
        page.reload()
        expect(page.locator("#link-words")).to_have_text("live")
        assert f"{url}/ui/" == page.url
        assert "secret" == page.evaluate("sessionStorage.getItem('rfork-token')")
        assert 0 == page.evaluate("localStorage.length")
        page.get_by_role("link", name="metrics").click()
        metrics = page.locator(".opblock.is-open").filter(has=page.locator("[data-path='/metrics']"))
        metrics.get_by_role("button", name="Try it out").click()
        metrics.get_by_role("button", name="Execute").click()
        expect(metrics.locator(".live-responses-table")).to_contain_text("rfork_")


def test_the_api_is_shown_and_tried(page: Page) -> None:
    """Nothing comes from elsewhere; the token is asked for once, and shown with each call that is tried."""
    asked = list[str]()
    page.on("request", lambda request: asked.append(request.url))
    with running(_settings(token="secret")) as url:
        page.goto(f"{url}/docs")
        _give_token(page)
        models = page.locator(".opblock").filter(has=page.locator("[data-path='/v1/models']"))
        models.locator(".opblock-summary").click()
        models.get_by_role("button", name="Try it out").click()
        models.get_by_role("button", name="Execute").click()
        expect(models.locator(".live-responses-table .response-col_status").last).to_have_text("200")
        page.reload()
        expect(models).to_be_visible()
        assert [] == [each for each in asked if not each.startswith((url, "data:", "blob:"))]
