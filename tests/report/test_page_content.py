"""What a report's page says of a plan and of a run: every figure is the plan's own, and nothing is made up."""

from dataclasses import replace
from typing import Any

from report_examples import DATA, MIXED, PLAN, RTX3060, estimate

from autotrain_mem.report.formatting import command_of
from autotrain_mem.report.page.content import page_of
from autotrain_mem.report.page.render import page_html
from autotrain_mem.types import Phase, Plan
from autotrain_mem.types.data import DataProfile
from autotrain_mem.types.experience import Happening, Moment, RunHistory
from autotrain_mem.types.page import CardOffer, Material, Page, Section
from autotrain_mem.types.report import MemoryReading

DEVICE = MemoryReading(
    allocated_bytes=10, peak_allocated_bytes=20, reserved_bytes=30, peak_reserved_bytes=40, num_alloc_retries=0
)


def moment(step: int, reserved_bytes: int = 30, **logs: float) -> Moment:
    device = replace(DEVICE, reserved_bytes=reserved_bytes)
    return Moment(seconds=float(step), step=step, device=device, tokens_per_second=100.0, logs=logs)


def history(*moments: Moment) -> RunHistory:
    return RunHistory(
        began=0.0,
        last=10.0,
        total_steps=60,
        total_bytes=99,
        predicted_bytes={Phase.FORWARD: 20},
        phases={},
        ranks=(moments,),
        happenings=(Happening(seconds=2.0, step=2, kind="out of memory", text="split"),),
        ending="finished",
    )


def page(plan: Plan = PLAN, **more: object) -> Page:
    return page_of(Material(plan=plan, command="autofit plan sft", **more))  # type: ignore[arg-type]


def section(found: Page, key: str) -> Section:
    (one,) = (each for each in found.sections if each.key == key)
    return one


def drawn(found: Page, key: str) -> Any:
    return section(found, key).figure


def test_a_plans_page_has_its_figures_and_all_its_attempts() -> None:
    found = page()
    assert found.fits is PLAN.estimate.fits
    assert found.verdict.startswith("fits ")
    attempts = section(found, "attempts")
    assert len(attempts.rows) == len(PLAN.attempts)
    assert attempts.strong == (4,)
    assert "> chosen; as asked for max_length 768, " in attempts.note
    assert [row[0] for row in section(found, "changes").rows] == [
        lever.name for lever in sorted(PLAN.levers, key=lambda each: each.harm)
    ]
    keys = [each.key for each in found.sections]
    assert len({*keys}) == len(keys)
    assert all(len(row) == len(each.columns) for each in found.sections for row in each.rows)
    (predicted,) = drawn(found, "phases")["series"]
    assert predicted["values"] == [*map(float, PLAN.estimate.memory.phases.values())]
    assert "predicted" in found.how_to_read[-1]


def test_of_the_data_the_whole_distribution_is_shown_where_it_is_known() -> None:
    few = drawn(page(replace(PLAN, data=DATA)), "lengths")
    assert (few["x"][-1], few["series"][0]["values"][-1]) == (DATA.longest, 1.0)
    profile = DataProfile(rows_by_length={10: 3, 40: 1})
    whole = drawn(page(replace(PLAN, data=DATA), profile=profile), "lengths")
    assert (whole["x"], whole["series"][0]["values"]) == ([10, 40], [0.75, 1.0])


def test_a_runs_page_keeps_the_highest_of_many_moments_and_marks_what_happened() -> None:
    moments = [moment(step, reserved_bytes=999 if step == 3333 else 30, loss=1.0) for step in range(5000)]
    found = page(history=history(*moments))
    memory = drawn(found, "memory-of-the-run")
    assert len(memory["x"]) < len(moments)
    assert max(memory["series"][1]["values"]) == 999.0
    assert [mark["text"] for mark in memory["marks"]] == ["split"]
    assert memory["limits"]["predicted peak reserved"] == PLAN.estimate.reserved_bytes
    assert [each.key for each in found.sections if each.key in ("loss", "reward", "speed")] == ["loss", "speed"]


def test_hours_and_cards_are_shown_where_they_are_known() -> None:
    mixed = replace(PLAN, estimate=replace(estimate(), memory=replace(estimate().memory, mixed_lengths=MIXED)))
    offer = CardOffer(hardware=RTX3060, required_bytes=2, budget_bytes=1, price=None)
    found = page(mixed, cards=(offer,))
    assert [line["name"] for line in drawn(found, "hours")["series"]] == ["longest rows first", "in any order"]
    cards = section(found, "cards")
    assert cards.rows[0][4] == "does not fit"
    assert cards.strong == (0,)


def test_its_command_holds_the_words_of_the_job_and_its_html_every_title() -> None:
    assert command_of(PLAN, trains=True).startswith(f"autofit {PLAN.method} --model {PLAN.model}")
    html = page_html(page())
    assert all(each.title in html for each in page().sections)
