"""Takes the README's picture, the first figure of a report, in headless Chromium.

python -m docs_pages.picture REPORT.html docs/assets/report.png
"""

import base64
import sys
from pathlib import Path

import bench

WIDTH = 1000
FIGURE = "const box = document.querySelector('.figure').getBoundingClientRect()"


def take(report: Path, picture: Path) -> None:
    """Writes the figure as a PNG of ``WIDTH`` pixels."""
    driver = bench.chromium("--disable-gpu", f"--window-size={WIDTH},900")
    try:
        driver.get(report.resolve().as_uri())
        driver.execute_script("document.querySelector('.figure').scrollIntoView()")
        driver.execute_async_script("setTimeout(arguments[0], 1000)")
        top, height = driver.execute_script(f"{FIGURE}; return [box.top + scrollY, box.height]")
        clip = {"x": 0, "y": top - 56, "width": WIDTH, "height": height + 68, "scale": 1}
        shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        picture.write_bytes(base64.b64decode(shot["data"]))
    finally:
        driver.quit()


if __name__ == "__main__":
    take(Path(sys.argv[1]), Path(sys.argv[2]))
