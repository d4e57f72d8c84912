"""The reference of flags names every flag of TRL's that is refused, and every one that does nothing."""

import pytest

from autotrain_mem.settings.flag_verdicts import GROUPS, REFUSED, REFUSED_WHEN_OFF, Verdict
from tests.docs.pages import DOCS, ROOT


def test_the_page_of_flags_holds_every_refused_and_every_idle_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from docs_pages.hook import filled

    page = filled((DOCS / "reference" / "flags.md").read_text(encoding="utf-8"))
    _, _, page = page.partition("## TRL's flags that are refused")
    refused, _, idle = page.partition("## TRL's flags that do nothing")
    for name, cure in {**REFUSED, **REFUSED_WHEN_OFF}.items():
        assert f"| `--{name}" in refused
        assert cure[1:] in refused
    names = {name for group in GROUPS if group.verdict is Verdict.IDLE for name in group.names}
    assert [name for name in sorted(names) if f"`--{name}`" not in idle] == []
