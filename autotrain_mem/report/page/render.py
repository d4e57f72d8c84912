"""Renders a page as one HTML file that holds its data, script and style, and loads nothing.

Texts may come from untrusted models, datasets and logs. They reach the file through Jinja's escaping, or as JSON that
cannot end its script element. The content security policy in the file's head allows its own script and style, by their
hashes, and no request.
"""

import base64
import hashlib
import json
from importlib import resources
from typing import Any

from autotrain_mem.types import Page

MARKER = '<meta name="generator" content="autofit report/1">'
"""Marks a report, near the top of the file; a file without it is never overwritten."""

_UNSAFE_IN_SCRIPT = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def page_html(page: Page) -> str:
    """Renders ``page`` as an HTML file."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    script, style = _static("page.js"), _static("page.css")
    code, rules = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (script, style))
    policy = (
        f"default-src 'none'; script-src 'sha256-{code}'; style-src 'sha256-{rules}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    environment = Environment(
        loader=FunctionLoader(_static), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
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


def _static(name: str) -> str:
    return resources.files(__package__).joinpath("static", name).read_text(encoding="utf-8")


def json_for_script(value: Any) -> str:
    r"""Writes JSON that cannot end the script element it is in.

    >>> json_for_script(["</script>"])
    '["\\u003c/script\\u003e"]'
    """
    written = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return written.translate(_UNSAFE_IN_SCRIPT)
