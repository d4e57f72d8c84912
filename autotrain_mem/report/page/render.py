"""Renders a page as one HTML file that holds its figures' library, its data and its style.

The texts come from models, datasets and logs of others. They reach the file through Jinja's escaping, or as JSON in
which nothing can end the script element that holds it; the policy in the file's head allows the two blocks of code and
style that are in it, by their hash, and no request.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib import metadata, resources
from typing import TYPE_CHECKING, Any

from autotrain_mem.support.errors import MissingExtraError

if TYPE_CHECKING:
    from autotrain_mem.types.page import Page

MARKER = '<meta name="generator" content="autofit report/1">'
"""Stands near the top of each report; a file without it is not ours to write over."""

_PACKAGE = "uplot-python"
_REQUIREMENT = "uplot-python>=1.1,<2"
_LIBRARY, _LIBRARY_STYLE = "uplot/static/uPlot.iife.js", "uplot/static/uPlot.min.css"
_SCRIPTS = ("format", "colours", "canvas", "plot", "timeline", "chart", "bars", "panel", "view", "png", "page")
"""Files of ``static``, in the order in which they stand in the page."""
_UNSAFE_IN_SCRIPT = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def page_html(page: Page) -> str:
    """Renders ``page`` as an HTML file. Raises MissingExtraError: uPlot, which draws the figures, is not installed."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    script, style = _code_and_style()
    code, rules = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (script, style))
    policy = (  # under which only that script runs, and only that style applies
        f"default-src 'none'; script-src 'sha256-{code}'; style-src 'sha256-{rules}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    environment = Environment(
        loader=FunctionLoader(_own), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    figures = [each for each in page.sections if each.figure is not None]
    drawn = [{"key": each.key, "title": each.title, **(each.figure or {})} for each in figures]
    return environment.get_template("page.html").render(
        page=page,
        figures=figures,
        tables=[each for each in page.sections if each.figure is None],
        marker=MARKER,
        policy=policy,
        script=script,
        style=style,
        data=json_for_script({"title": page.title, "figures": drawn}),
    )


def json_for_script(value: Any) -> str:
    r"""Writes JSON that may stand in a script element, whatever its texts hold.

    >>> json_for_script(["</script>"])
    '["\\u003c/script\\u003e"]'
    """
    written = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return written.translate(_UNSAFE_IN_SCRIPT)


@cache
def _code_and_style() -> tuple[str, str]:
    own = "\n".join(_own(f"{name}.js") for name in _SCRIPTS)
    script = f"{_of_library(_LIBRARY)}\n(() => {{\n'use strict';\n{own}\n}})();\n"
    return script, f"{_of_library(_LIBRARY_STYLE)}\n{_own('page.css')}"


def _own(name: str) -> str:
    return resources.files(__package__).joinpath("static", name).read_text(encoding="utf-8")


def _of_library(path: str) -> str:
    """Reads a file of the installed package. It is not imported: that would import IPython, which takes a second."""
    try:
        # read_text of the located path, since that of the distribution looks into its metadata alone
        located = metadata.distribution(_PACKAGE).locate_file(path)
        with open(str(located), encoding="utf-8") as file:
            return file.read()
    except (metadata.PackageNotFoundError, OSError) as error:
        is_absent = isinstance(error, metadata.PackageNotFoundError)
        problem = "is not installed" if is_absent else f"is installed without its file {path}"
        raise MissingExtraError(
            f"The report's figures are drawn by uPlot, and the package that holds it, {_PACKAGE}, {problem}.",
            hint=f"Install it: pip install {'' if is_absent else '--force-reinstall --no-deps '}'{_REQUIREMENT}'",
        ) from None
