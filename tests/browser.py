"""Headless Chromium for tests of HTML, and axe-core in it. The fixture ``browser`` is one for all tests."""

import os
import pathlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
ABSENT = (
    "Chromium is not here: scripts/browser installs it where apt-get may; elsewhere install chromium and its driver"
)
in_chromium = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER) and "CI" not in os.environ, reason=ABSENT),
]

Browser = Any  # selenium ships no types for its remote calls


@contextmanager
def started() -> Iterator[Browser]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    assert CHROMIUM, ABSENT
    assert DRIVER, ABSENT
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def axe(browser: Browser, within: str = "html") -> list[str]:
    """The violations that axe-core finds in the first element of this selector; the package is not imported, since it
    wants Playwright's browsers."""
    located = metadata.distribution("axe-playwright-python").locate_file("axe_playwright_python/axe.min.js")
    browser.execute_script(pathlib.Path(str(located)).read_text(encoding="utf-8"))
    found = browser.execute_async_script(
        "axe.run(document.querySelector(arguments[0])).then((result) => arguments[1](result.violations))", within
    )
    return [f"{each['id']}: {node['html'][:120]}" for each in found for node in each["nodes"]]
