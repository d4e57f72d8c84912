"""A notebook shows a result as the terminal does, and nothing in a name becomes markup."""

from dataclasses import replace

from report_examples import PLAN

from autotrain_mem.types import Plan


def test_a_plan_shows_itself_and_its_names_are_escaped() -> None:
    hostile: Plan = replace(PLAN, warnings=("<script>alert(1)</script>",))
    html = hostile._repr_html_()
    assert html.startswith("<pre")
    assert "fits" in html
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert PLAN.estimate._repr_html_().count("<pre") == 1


def test_a_plan_is_a_line_where_it_is_printed() -> None:
    assert repr(PLAN).startswith(f"<Plan of {PLAN.method}, {PLAN.model}: fits rtx3060, 8.51 GiB of 11.2 GiB, ")
    assert "\n" not in repr(PLAN)
