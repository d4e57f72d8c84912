"""What the command prints: sums that add up in every view, and the whole text of the views that have a golden file.

``AUTOFIT_UPDATE_GOLDEN=1 scripts/test tests/report`` writes those again, at width 100.
"""

import contextlib
import io
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import report_examples as examples
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import TRL_DEFAULTS, divided
from report_examples import CHOSEN, PLAN, RTX3060, crowded, estimate, memory, reserved
from rich.console import ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from autotrain_mem.report import terminal
from autotrain_mem.report.comparison_view import cards_view
from autotrain_mem.report.difference_view import difference_view
from autotrain_mem.report.error_text import error_text, print_error
from autotrain_mem.report.estimate_view import estimate_view
from autotrain_mem.report.explain_view import explain_view
from autotrain_mem.report.layout import scale_for
from autotrain_mem.report.machine_view import gpus_view
from autotrain_mem.report.run_view import report_view
from autotrain_mem.report.shortage_view import explained
from autotrain_mem.report.terminal import CardsProgress, Console, SearchProgress, TrainingProgress
from autotrain_mem.support import codec, errors
from autotrain_mem.support.errors import GpuOutOfMemoryError, TrainingError
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import Counting, Hardware, Knobs, Owner, Phase, ReservedByMode, Shortage, Topology
from autotrain_mem.types.gpu_comparison import NOTHING_FITS, Cards, CardVerdict
from tests.golden import kept
from tests.waiting import until

GOLDEN = Path(__file__).parent / "golden"
ASLEEP = replace(examples.GRPO_PLAN.estimate, vllm_sleep=examples.SLEEPING)

NO_FLASH = (
    "--attn_implementation flash_attention_2 needs compute capability 8.0, and this card has 7.5: "
    "its kernels are not made for Turing."
)
SPLIT = divided(TRL_DEFAULTS, 2, 32, max_length=768)
LM_HEAD = (("base_model.model.lm_head", 2_400_000_000), ("outside the modules, as in the loss", 84_934_656))
OLDER = replace(
    PLAN,
    versions={**PLAN.versions, "trl": "1.11.0"},
    job=replace(PLAN.job, arguments={**PLAN.job.arguments, "max_grad_norm": 0.5}),
    estimate=replace(estimate(knobs=SPLIT), memory=memory(scale=0.9, modules_at_peak=LM_HEAD)),
)
OFFLOADED = replace(SPLIT, activation_offloading=True, optimizer_offload=True)
FOUR_BIT = replace(CHOSEN, load_in_4bit=True, activation_offloading=True)


def card(name: str, gib: float) -> Hardware:
    return replace(RTX3060, name=name, total_bytes=int(gib * GIB), free_bytes=int(gib * GIB))


def verdict(name: str, gib: float, level: str, knobs: Knobs, *, scale: float = 1.0) -> CardVerdict:
    hardware = card(name, gib)
    return CardVerdict(hardware=hardware, level=level, estimate=estimate(hardware, scale=scale, knobs=knobs))


def refused(name: str, gib: float, refusal: str) -> CardVerdict:
    return CardVerdict(hardware=card(name, gib), refusal=refusal)


SMALL = (
    replace(
        refused("rtx3050", 5.8, NOTHING_FITS), least=estimate(card("rtx3050", 5.8), scale=0.65), nearest="--use_peft"
    ),
    verdict("rtx4060", 7.63, "QLoRA, offloading", FOUR_BIT, scale=0.8),
    verdict("rtx3060", 11.63, "LoRA", CHOSEN),
    refused("t4", 14.56, NO_FLASH),
    verdict("rtx5060ti-16gb", 15.48, "rounding, offloading", replace(OFFLOADED, dtype="bfloat16"), scale=1.5),
)
LARGE = (
    verdict("rtx4090", 23.52, "lossless, offloading", OFFLOADED, scale=2.4),
    verdict("a100-40gb", 39.39, "lossless", replace(SPLIT, expandable_segments=True), scale=4),
    verdict("h100", 79.19, "lossless", replace(SPLIT, gradient_checkpointing=False), scale=7.5),
    verdict("rtx-pro-6000-blackwell", 94.97, "lossless", replace(SPLIT, gradient_checkpointing=False), scale=7.5),
)
UNKNOWN_SPEED = CardVerdict(
    hardware=card("141GiB", 141),
    level="lossless",
    estimate=replace(estimate(card("141GiB", 141), knobs=SPLIT), time=examples.ASSUMED_TIME),
)
TEN = Cards(verdicts=(*SMALL, *LARGE, UNKNOWN_SPEED))
SHORTER = Cards(
    verdicts=(verdict("rtx4060", 7.63, "shorter rows", replace(FOUR_BIT, max_length=512), scale=0.8), *SMALL[2:4])
)
NONE = Cards(verdicts=(SMALL[0],))


def several(count: int, name: str, gib: float, level: str, scale: float = 1.0, nodes: int = 1) -> CardVerdict:
    processes, sharding = count * nodes, "ddp" if level == "rounding" else "fsdp2"
    knobs = replace(SPLIT, processes=processes, sharding=sharding if processes > 1 else None)
    one = verdict(name, gib, level, knobs, scale=scale)
    return replace(one, hardware=replace(one.hardware, topology=Topology(devices=count, nodes=nodes)))


SETS = Cards(
    verdicts=(
        several(1, "rtx4090", 23.52, "rounding"),
        several(2, "rtx4090", 23.52, "rounding", 2.2),
        several(4, "rtx4090", 23.52, "lossless", 2.0),
        several(4, "rtx4090", 23.52, "lossless", 1.2, nodes=2),
    )
)
CARDS = {"ten": TEN, "shorter_rows": SHORTER, "none": NONE, "sets": SETS}

# Full cards: one simulated, which tells all owners apart, one real, and one whose library did not say much.

OWNED = {**examples.OWNERS, Owner.ACTIVATIONS: 5_905_374_720, Owner.TEMPORARY: 1_100_000_256}

SIMULATED = Shortage(
    phase=Phase.BACKWARD,
    step=12,
    requested_bytes=1_288_490_189,
    segment_bytes=1_289_748_480,
    total_bytes=RTX3060.total_bytes,
    free_bytes=300 * MIB,
    allocated_bytes=sum(OWNED.values()),
    reserved_bytes=RTX3060.total_bytes - 505 * MIB,
    outside_bytes=205 * MIB,
    measured=OWNED,
)

ON_A_CARD = replace(
    SIMULATED,
    segment_bytes=SIMULATED.requested_bytes,
    free_bytes=100 * MIB,
    reserved_bytes=RTX3060.total_bytes - 1305 * MIB,
    measured={owner: OWNED[owner] for owner in (Owner.WEIGHTS, Owner.GRADIENTS, Owner.OPTIMIZER_STATE)},
)

MISHAP = replace(
    SIMULATED, phase=Phase.SAVE, free_bytes=6 * GIB, reserved_bytes=5 * GIB, allocated_bytes=5 * GIB, measured={}
)


class ShortageView:
    """An error as wide as a console, among the views that rich prints."""

    def __init__(self, shortage: Shortage, change: str | None) -> None:
        self._error = explained(shortage, PLAN, change)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Segment(error_text(self._error, options.max_width))


VIEWS = {
    "estimate_fits": estimate_view(estimate()),
    "estimate_does_not_fit_a_shared_card": estimate_view(estimate(examples.SHARED, scale=1.5)),
    "estimate_in_mib": estimate_view(estimate(examples.IMAGINED, scale=0.03)),
    "estimate_cpu": estimate_view(estimate(examples.HOST, scale=0.1, knobs=TRL_DEFAULTS)),
    "estimate_vllm": estimate_view(examples.GRPO_PLAN.estimate),
    "estimate_vllm_asleep": estimate_view(ASLEEP),
    "estimate_expandable": estimate_view(estimate(knobs=examples.EXPANDED)),
    "estimate_refused": estimate_view(crowded()),
    "estimate_retried": estimate_view(crowded(refused_bytes=None, fits_expanded=False)),
    "explain_vllm_asleep": explain_view(replace(examples.GRPO_PLAN, estimate=ASLEEP)),
    "explain_against": difference_view(PLAN, OLDER),
    "explain_ppo": explain_view(examples.PPO_PLAN),
    "explain_dpo": explain_view(examples.DPO_PLAN),
    "explain": explain_view(PLAN),
    "explain_passed_over": explain_view(examples.PASSED_OVER),
    "explain_grpo": explain_view(examples.GRPO_PLAN),
    "explain_shared_card": explain_view(replace(PLAN, estimate=estimate(examples.SHARED, scale=0.8))),
    "explain_cpu": explain_view(examples.UNCHANGED_PLAN),
    "explain_several_gpus": explain_view(examples.SHARED_PLAN),
    "gpus": gpus_view([RTX3060, examples.IMAGINED]),
    "report": report_view(examples.REPORT),
    "report_unmeasured": report_view(replace(examples.REPORT, measured=None, first_loss=None, last_loss=None)),
    "report_retried": report_view(replace(examples.REPORT, measured=replace(examples.MEASURED, num_alloc_retries=2))),
    **{f"cards_{name}": cards_view(cards) for name, cards in CARDS.items()},
    "error_shortage_simulated": ShortageView(SIMULATED, "--max_length 512 --load_in_4bit true"),
    "error_shortage_real": ShortageView(ON_A_CARD, "--optimizer_offload"),
    "error_shortage_unclear": ShortageView(MISHAP, None),
}


def rendered(view: RenderableType, width: int = 100, *, color: bool = False, height: int | None = None) -> str:
    """Returns what a pipe gets, or a terminal with colors, or one with a window of this height."""
    file, system = io.StringIO(), "truecolor" if color else None
    options = {"no_color": not color, "force_terminal": color or height is not None, "color_system": system}
    Console(file=file, width=width, height=height, **options).print(view)
    return file.getvalue()


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.stem)
def test_text_is_the_golden_one(path: Path) -> None:
    text = rendered(VIEWS[path.stem])
    assert text == kept(path, text)


TOO_LOW = replace(examples.MEASURED, peak_allocated_bytes=6_000_000_000)


def test_a_report_says_what_there_is_to_say() -> None:
    for changes, line in (
        ({"last_loss": 2.3142, "budget_bytes": 12 * GIB}, "s, loss 2.314, peak 8.20 of 12.0 GiB reserved, predicted "),
        ({"began_at": 100}, "\nfinished: 20 steps in 3 min 20 s, from step 100 to 120, loss 2.314 -> 1.870, peak"),
        ({"began_at": 120}, "  runs/[first] try\nnothing was left to train: the run was finished at step 120\n"),
        ({"incidents": 2, "restarts": 1}, "survived       2 out-of-memory errors, 1 restart\n"),
        ({"measured": TOO_LOW}, "error +32.8 % (the prediction is for the"),
        ({"measured": TOO_LOW, "longest_rows_first": True}, "error +32.8 % (the prediction is too high"),
        ({"not_finite_step": 7, "last_loss": None}, "s, loss not a number from step 7 on: the trained weights are"),
    ):
        assert line in rendered(report_view(replace(examples.REPORT, **changes)), width=120), changes


@pytest.mark.parametrize("name", VIEWS)
def test_no_line_is_wider_than_the_console_or_ends_in_spaces_and_colour_adds_nothing_else(name: str) -> None:
    for width in (80, 100, 120):
        for line in rendered(VIEWS[name], width).splitlines():
            assert len(line) <= width
            assert line == line.rstrip()
    without_escapes = re.sub(r"\x1b\[[0-9;]*m", "", rendered(VIEWS[name], color=True))
    assert without_escapes == rendered(VIEWS[name])


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40 * GIB), min_size=len(Owner), max_size=len(Owner)).filter(any),
    cached=st.tuples(st.integers(0, 5 * GIB), st.integers(0, 5 * GIB)),
    expandable=st.booleans(),
    non_torch=st.integers(0, GIB),
    free=st.integers(1, 200 * GIB),
)
def test_any_estimate_adds_up_as_shown(
    sizes: list[int], cached: tuple[int, int], expandable: bool, non_torch: int, free: int
) -> None:
    hardware = replace(RTX3060, total_bytes=200 * GIB, free_bytes=free, non_torch_bytes=non_torch)
    owners = dict(zip(Owner, sizes, strict=True))
    native, expanded = (reserved(sum(sizes) + more) for more in cached)
    needed = replace(memory(owners), reserved=ReservedByMode(native=native, expandable_segments=expanded))
    knobs = examples.EXPANDED if expandable else CHOSEN
    text = rendered(estimate_view(replace(estimate(hardware, knobs=knobs), memory=needed)))
    rows = re.findall(r"^([+= ])  (\S[A-Za-z' ]*?) +(\d+\.\d\d)(?:  |$)", text, flags=re.MULTILINE)
    figures = {name: int(number.replace(".", "")) for _, name, number in rows}  # in hundredths
    running = 0
    for sign, name, _ in rows:
        running += figures[name] if sign == "+" else 0
        assert sign != "=" or figures[name] == running
    left = figures["left"] if "left" in figures else -figures["too much"]
    assert figures["budget"] - figures["needed"] == left
    (peak,) = re.findall(r"^  \S.*? +(\d+)\.(\d\d) (?:[KMG]i)?B .*counted above$", text, flags=re.MULTILINE)
    assert int("".join(peak)) == figures["peak allocated"] + figures["cached by the allocator"]
    assert {"outside torch"} < figures.keys()


@given(sizes=st.lists(st.integers(0, 300 * GIB), min_size=1, max_size=9))
def test_a_shared_figure_is_never_a_whole_digit_off(sizes: list[int]) -> None:
    scale = scale_for(sum(sizes))
    *parts, total = (round(100 * float(cell)) for cell in scale.column([*sizes, None]))
    assert sum(parts) == total == scale.hundredths(sum(sizes))
    for size, part in zip(sizes, parts, strict=True):
        assert abs(part * scale.unit_bytes - size * 100) <= scale.unit_bytes


def test_a_shortfall_smaller_than_a_digit_is_still_named() -> None:
    fits = estimate()
    told = rendered(estimate_view(replace(fits, budget_bytes=fits.required_bytes - 3 * MIB)))
    assert "does not fit rtx3060: needs 8.51 GiB of 8.51 GiB (fixed-size segments), 3.00 MiB" in told


def test_an_error_is_wrapped_below_its_text_on_a_terminal_and_whole_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    error = TrainingError("It does not fit.", hint="--plan_only  plans for that card and trains nothing")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    file, terminal = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    print_error(error, file)
    print_error(error, terminal)
    assert file.getvalue() == "error: It does not fit.\n  --plan_only  plans for that card and trains nothing\n"
    assert terminal.getvalue() == (
        "\x1b[1;31merror: \x1b[0mIt does not fit.\n"
        "  --plan_only  plans for that card and\n               trains nothing\n"
    )
    assert error_text(TrainingError("")) == "error: TrainingError\n"


def test_the_figures_of_a_shortage_go_with_the_error_to_another_process() -> None:
    received = errors.from_json(codec.to_json(explained(SIMULATED, PLAN, None)))
    assert isinstance(received, GpuOutOfMemoryError)
    assert received.details is not None
    assert codec.from_json(Shortage, received.details) == SIMULATED
    assert "details" not in GpuOutOfMemoryError("x").to_json()


HOSTILE = "tiny\x1b[2J\x1b]0;title\x07 \x9b31m \u202elanguage\udcff [bold]x :smile:"
"""Clears the screen, names the window, turns red, writes backwards, and is no UTF-8."""


def test_text_of_others_is_shown_whole_and_never_steers_the_terminal() -> None:
    of_others = replace(PLAN.job, model=HOSTILE)
    plan = explain_view(replace(PLAN, job=of_others, level=HOSTILE, warnings=(HOSTILE,)))
    error = TrainingError(HOSTILE, hint=f"--model  {HOSTILE}")
    for text in (rendered(plan), rendered(error_text(error)), rendered(f"note: {HOSTILE}"), str(error)):
        assert all(each.isprintable() or each == "\n" for each in text)
        words = " ".join(text.split())  # wrapped as any other text
        for each in (r"tiny\x1b[2J\x1b]0;title", r"\x9b31m \u202elanguage\udcff [bold]x :smile:"):
            assert each in words


def console_of(width: int = 80, *, terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=width, no_color=True, force_terminal=terminal), file


def test_a_search_prints_one_whole_line_per_attempt_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    console, file = console_of()
    with SearchProgress(console, PLAN.job, PLAN.defaults) as progress:
        for attempt in PLAN.attempts:
            progress.tried(attempt)
    lines = file.getvalue().splitlines()
    assert len(lines) == len(PLAN.attempts)
    assert lines[0] == "rehearsing: micro-batch 1, as asked for ... needs 31.2 GiB, does not fit"
    assert lines[4].endswith(", LoRA, bfloat16, whole model ... needs 8.51 GiB, fits")
    monkeypatch.setattr(terminal, "REPEAT_SECONDS", 0.01)
    with SearchProgress(console, PLAN.job, PLAN.defaults) as progress:
        progress.counting(Counting(done=10, rows=7473, doing="Tokenizing"))
        until(lambda: file.getvalue().count("counting tokens: 10 of 7,473 rows, tokenizing (") >= 2)


def test_a_search_in_a_notebook_shows_one_line_that_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Mock()
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    for quiet in (True, False):
        with SearchProgress(Console(force_jupyter=True, quiet=quiet), PLAN.job, PLAN.defaults) as progress:
            progress.tried(PLAN.attempts[2])
    notebook.display.assert_called_once_with({"text/plain": "planning"}, raw=True, display_id=True)
    shown = [call.args[0]["text/plain"] for call in notebook.display().update.call_args_list]
    assert shown[1].startswith("rehearsing, 1 tried: needs 14.7 GiB, does not fit: micro-batch 8")
    assert (shown[0], shown[2:]) == ("planning", [""])
    monkeypatch.setattr(terminal, "NOTEBOOK_SECONDS", 0.01)
    with SearchProgress(Console(force_jupyter=True), PLAN.job, PLAN.defaults):
        until(lambda: "planning (0.1 s)" in str(notebook.display().update.call_args_list))


def train(console: Console, patch: pytest.MonkeyPatch, total: int, steps: Iterable[int], **logs: float) -> None:
    """Takes two seconds a step."""
    seconds = [0.0]
    patch.setattr(terminal.time, "monotonic", lambda: seconds[0])
    patch.setattr(terminal, "event_line", lambda event: "")
    with contextlib.suppress(KeyboardInterrupt), TrainingProgress(console, budget_bytes=12 * GIB) as progress:
        for event in terminal._WAITS:
            progress.on_event({"event": event})
            progress.refresh()
        progress.on_event({"event": "start", "total_steps": total})
        progress.on_event({"event": "log", "logs": logs})
        for step in steps:
            seconds[0] = 2.0 * step
            memory = {"peak_reserved_bytes": (7 if step < 3 else 8) * GIB} if logs else None
            progress.on_event({"event": "step", "step": step, "memory": memory})
            progress.refresh()
        raise KeyboardInterrupt


@pytest.mark.parametrize("steps", [1, 10, 37, 100])
def test_without_a_terminal_a_run_prints_about_ten_plain_lines(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    console, file = console_of()
    train(console, monkeypatch, steps, range(1, steps + 1), loss=2.54, reward=0.5)
    lines = file.getvalue().splitlines()
    assert "\x1b" not in file.getvalue()
    assert lines[1].startswith(f"step 1/{steps}")
    assert lines[-1].startswith(f"step {steps}/{steps}")
    assert len(lines) - 1 == min(steps, 11 if steps > 10 else 10)
    half = "step 50/100  1 min 40 s left  loss 2.540  reward 0.5000  peak 8.00 of 12.0 GiB"
    assert (half in lines) is (steps == 100)
    for total, of_this_process, last in ((1, (1,), "step 1/1"), (100, (81, 90), "step 90/100  20.0 s left")):
        train(console, monkeypatch, total, of_this_process)
        assert file.getvalue().splitlines()[-1] == last


@pytest.mark.parametrize("width", [80, 120])
def test_no_live_line_is_wrapped_and_the_cursor_returns(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console, file = console_of(width, terminal=True)
    with SearchProgress(console, PLAN.job, PLAN.defaults) as progress:
        progress.counting(Counting(done=150_000, rows=200_000, doing="Tokenizing train dataset"))
        progress.refresh()
        progress.tried(PLAN.attempts[0])
        progress.tried(PLAN.attempts[2])
    with CardsProgress(console, 2) as cards:
        for card in (examples.IMAGINED, replace(RTX3060, name="[/rtx3060")):
            cards.tried(card, PLAN.attempts[3])
    train(console, monkeypatch, 1000, range(1, 1001), loss=1.0)
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()))
    assert any("counting tokens: 150,000 of 200,000 rows, tokenizing train" in line for line in lines)
    assert any("rehearsing, 2 tried: needs 14.7 GiB, does not fit: micro-batch 8, " in line for line in lines)
    assert any("card 2 of 2: [/rtx3060, 4 x 16" in line for line in lines)
    steps = ["step 999/1000  2.0 s left  loss 1.000  peak 8.00 of 12.0 GiB", "saving after step 1000/1000  loss 1.000"]
    for doing in (*terminal._WAITS.values(), *steps):
        assert any(re.search(rf"^[━╸╺ ]*{doing}.* 0:00:0\d$", line) for line in lines), doing
    assert max(map(len, lines)) <= width
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")
