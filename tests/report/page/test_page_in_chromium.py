"""The report in headless Chromium: what a reader sees, points at, hears and saves. One browser serves all tests."""

import base64
import json
import pathlib
from typing import Any

import page_examples
import pytest

from autotrain_mem.report.page.render import page_html
from autotrain_mem.support.units import format_bytes
from tests import waiting
from tests.browser import Browser, axe, in_chromium

pytestmark = in_chromium


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    folder = tmp_path_factory.mktemp("reports")
    pages = {"usual": page_examples.page(page_examples.timeline(1500)), "hostile": page_examples.hostile_page()}
    paths = {name: folder / f"{name}.html" for name in pages}
    for name, page in pages.items():
        paths[name].write_text(page_html(page), encoding="utf-8")
    return paths


@pytest.fixture
def report(browser: Browser, files: dict[str, pathlib.Path]) -> Browser:
    return opened(browser, files["usual"])


def opened(browser: Browser, path: pathlib.Path, width: int = 1200, media: dict[str, str] | None = None) -> Browser:
    """Opens a report, and waits until its figures are drawn."""
    command = browser.execute_cdp_cmd
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    command("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": name, "value": value} for name, value in (media or {}).items()]
    command("Emulation.setEmulatedMedia", {"media": "", "features": features})
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(path.as_uri())
    until(browser, "return [...document.querySelectorAll('.figure')].every((each) => each.querySelector('.plot svg'))")
    return browser


def until(browser: Browser, script: str) -> None:
    waiting.until(lambda: browser.execute_script(script), seconds=5)


def text_of(browser: Browser, selector: str) -> str:
    text: str = browser.execute_script("return document.querySelector(arguments[0]).innerText", selector)
    return text


def hover(browser: Browser, share: float, kind: str = "mouseMoved", **more: Any) -> None:
    """Moves the mouse to a share of the first figure's width."""
    box = browser.execute_script(
        """const over = document.querySelector('.plot');
        over.scrollIntoView({block: 'center'});
        const box = over.getBoundingClientRect(); return [box.left, box.top, box.width, box.height];"""
    )
    where = {"x": box[0] + share * box[2], "y": box[1] + box[3] / 2}
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, **where, **more})


def press(browser: Browser, key: str) -> None:
    browser.execute_script("document.querySelector('.plot').focus()")
    browser.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": "keyDown", "key": key})


def assert_silent(browser: Browser, path: pathlib.Path) -> None:
    """Nothing stands in the console, and nothing but the file itself was asked for."""
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
    assert [url for url in urls if not url.startswith(("data:", "blob:"))] == [path.as_uri()]


def test_every_figure_is_drawn_in_silence(report: Browser, files: dict[str, pathlib.Path]) -> None:
    shapes = """return [...document.querySelectorAll('.figure')].map((figure) =>
    [...figure.querySelectorAll('svg svg > *')].filter((each) => each.getBoundingClientRect().width > 20).length)"""
    assert report.execute_script(shapes) == [8, 4, 1, 1, 2, 8]
    assert_silent(report, files["usual"])


def test_the_panel_tells_of_the_peak_until_a_reader_points_elsewhere(report: Browser) -> None:
    assert "at the peak" in text_of(report, ".panel .where")
    shown = page_examples.timeline(1500)
    allocated = format_bytes(sum(column[shown.peak] for column in shown.owners.values()))
    assert text_of(report, ".panel .sum").split() == ["tensors", *allocated.split()]
    hover(report, 0.4)
    until(report, "return !document.querySelector('.panel .where').innerText.includes('peak')")
    panel = text_of(report, ".panel")
    assert "model.layers." in panel
    assert "GiB" in panel.split("Largest holders")[1]
    for row in ("weights", "tensors", "reserved by torch", "budget"):
        assert row in panel
    report.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": 2, "y": 2})
    until(report, "return document.querySelector('.panel .where').innerText.includes('peak')")


def test_dragging_zooms_and_escape_shows_all_again(report: Browser) -> None:
    whole = "return document.querySelector('.tools button').hidden"
    assert report.execute_script(whole)
    hover(report, 0.3)
    hover(report, 0.3, "mousePressed", button="left", clickCount=1)
    hover(report, 0.5, buttons=1)
    hover(report, 0.5, "mouseReleased", button="left", clickCount=1)
    until(report, f"{whole} === false")
    press(report, "Escape")
    until(report, whole)


def test_keys_move_the_cursor_and_it_is_read_out(report: Browser) -> None:
    press(report, "Home")
    first = text_of(report, "#aloud")
    assert first.startswith("load, event 0 of")
    press(report, "ArrowRight")
    second = text_of(report, "#aloud")
    assert "Largest holders: model." in second
    assert second != first
    press(report, "End")
    assert text_of(report, ".panel .place") in text_of(report, "#aloud")


def test_the_legend_takes_an_owner_away(report: Browser) -> None:
    is_drawn = "return document.querySelector('svg path[fill=\"var(--weights)\"]') !== null"
    weights = "[...document.querySelectorAll('.legend')].find((each) => each.innerText === 'weights')"
    assert report.execute_script(is_drawn)
    for is_pressed in ("false", "true"):
        report.execute_script(f"{weights}.click()")
        assert report.execute_script(is_drawn) is (is_pressed == "true")
        assert report.execute_script(f"return {weights}.ariaPressed") == is_pressed


def test_a_mark_says_what_happened_when_the_cursor_meets_it(report: Browser) -> None:
    report.execute_script("document.querySelectorAll('.plot')[1].focus()")
    for key, count in (("Home", 1), ("PageDown", 6), ("ArrowRight", 8)):
        for _ in range(count):
            report.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": "keyDown", "key": key})
    assert "out of memory, step 80: split 8 rows into 2 x 4" in text_of(report, ".marked")


@pytest.mark.parametrize("name", ["usual", "hostile"])
def test_a_figure_is_saved(browser: Browser, files: dict[str, pathlib.Path], tmp_path: pathlib.Path, name: str) -> None:
    opened(browser, files[name], media={"prefers-color-scheme": "dark"})
    behaviour = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)
    browser.execute_script("document.querySelector('.tools button:last-child').click()")
    path = tmp_path / "autofit-memory.png"
    waiting.until(lambda: path.exists() and path.stat().st_size, seconds=5)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20], "big") == 1600
    assert 700 < int.from_bytes(content[20:24], "big") < 1000
    assert len(content) > 20_000


def test_hostile_names_inject_nothing(browser: Browser, files: dict[str, pathlib.Path]) -> None:
    opened(browser, files["hostile"])
    assert browser.title != "injected"
    assert browser.execute_script("return document.images.length + document.scripts.length") == 2
    names = browser.execute_script("return [...document.all].flatMap((each) => each.getAttributeNames())")
    assert [name for name in names if name.startswith("on")] == []
    assert page_examples.HOSTILE.split("\u2028")[0].strip() in text_of(browser, "h1")
    shown = browser.execute_script("return document.getElementById('command').textContent")
    assert shown == page_examples.hostile_page().command
    hover(browser, 0.5)
    press(browser, "ArrowRight")
    assert "</script>" in text_of(browser, "#aloud")
    assert_silent(browser, files["hostile"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Browser, files: dict[str, pathlib.Path], scheme: str) -> None:
    opened(browser, files["usual"], media={"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"})
    browser.execute_script("document.querySelectorAll('.figure')[5].querySelector('details').open = true")
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 29)"}[scheme]
    assert axe(browser) == []
    browser.execute_script("document.getElementById('scheme').click()")  # the other colours are one click away
    other = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert {ground, other} == {"rgb(255, 255, 255)", "rgb(21, 24, 29)"}
    assert text_of(browser, "#scheme").lower() == f"{scheme} colours"


@pytest.mark.parametrize("name", ["usual", "hostile"])
def test_a_phone_scrolls_no_page_sideways(browser: Browser, files: dict[str, pathlib.Path], name: str) -> None:
    opened(browser, files[name], width=360)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    assert browser.execute_script("return document.querySelector('.plot svg').getBoundingClientRect().right") <= 360


def test_on_paper_figures_are_light_and_whole_without_buttons(browser: Browser, files: dict[str, pathlib.Path]) -> None:
    opened(browser, files["usual"], media={"prefers-color-scheme": "dark"})
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    weights = "return getComputedStyle(document.querySelector('svg path[fill=\"var(--weights)\"]')).fill"
    assert browser.execute_script(weights) == "rgb(32, 73, 135)"
    display = "return getComputedStyle(document.querySelector('.tools')).display"
    assert browser.execute_script(display) == "none"
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.execute_script("return getComputedStyle(document.querySelector('.figure')).breakInside") == "avoid"
