"""The built pages: strict, no request to anywhere, searched from a folder, and no accessibility error."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autotrain_mem.settings.levers import LADDER
from autotrain_mem.support import errors
from tests.browser import Browser, axe, in_chromium
from tests.docs.pages import ROOT

pytest.importorskip("mkdocstrings")
pytestmark = pytest.mark.slow

FETCHED = re.compile(r"<(?:script|img|iframe)[^>]*src=\"?(?:https?:)?//|<link[^>]*stylesheet[^>]*(?:https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {
        **os.environ,
        "NO_MKDOCS_2_WARNING": "true",
        "PYTHONPATH": str(ROOT),
        "http_proxy": "http://0.0.0.0:9",
    }
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")
    return folder


def test_no_page_fetches_anything_or_has_an_empty_place_for_a_table(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not FETCHED.search(text), page
        assert "<p>{{" not in text, page


def test_every_lever_every_error_class_and_every_verb_has_its_row(site: Path) -> None:
    levers = (site / "reference" / "levers.html").read_text(encoding="utf-8")
    assert [row.name for row in LADDER if f"<code>{row.name}</code>" not in levers] == []
    table = (site / "reference" / "errors.html").read_text(encoding="utf-8")
    coded = [each for each in errors._tree(errors.AutofitError).values() if "exit_code" in vars(each)]
    assert [each.__name__ for each in coded if f"<code>{each.__name__}</code>" not in table] == []

    page = (site / "reference" / "python.html").read_text(encoding="utf-8")
    for verb in ("estimate", "plan", "fit", "cards", "gpus", "write_report"):
        assert f'id="autotrain_mem.verbs.{verb}"' in page


class TestInChromium:
    pytestmark = in_chromium

    @pytest.mark.parametrize(("page", "scheme"), [("index", "dark"), ("reference/levers", "light")])
    def test_axe_finds_nothing(self, browser: Browser, site: Path, page: str, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": features})
        browser.get((site / f"{page}.html").as_uri())
        browser.execute_script("localStorage.clear(); location.reload()")  # the theme keeps the first scheme
        ground = browser.execute_script("return document.body.dataset.mdColorScheme")
        assert ground == {"light": "default", "dark": "slate"}[scheme]
        assert axe(browser, "html") == []

    def test_a_page_opened_from_a_folder_can_be_searched(self, browser: Browser, site: Path) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        browser.set_window_size(1300, 900)
        browser.get((site / "index.html").as_uri())
        browser.find_element("css selector", ".md-search__input").send_keys("headroom")
        found = "return document.querySelector('.md-search-result').innerText"
        WebDriverWait(browser, 10).until(lambda each: "matching documents" in each.execute_script(found))
