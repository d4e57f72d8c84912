"""What ``autofit explain`` tells of a plan; and an estimate of what waits on the host and stays unquantized."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import report_examples as examples
from report_examples import attempt, estimate, memory
from test_console import rendered
from test_contract import SLOW_TO_IMPORT, loaded_by

from autotrain_mem.report.estimate_view import estimate_view
from autotrain_mem.report.explain_view import explain_view
from autotrain_mem.search.memo import candidate
from autotrain_mem.support import codec
from autotrain_mem.support.files import write_json
from autotrain_mem.support.units import GIB, format_bytes
from autotrain_mem.types import Estimate, Owner, Plan
from autotrain_mem.types.plan_file import PLAN_NAME


def text_of(plan: Plan) -> str:
    return rendered(explain_view(plan), 120)


def bound(plan: Plan, name: str) -> str:
    """A line under ``what binds``."""
    (said,) = re.findall(rf"^  {name} +(.*)$", text_of(plan), re.MULTILINE)
    return str(said)


OTHERS = tuple(each for each in examples.PLAN.attempts if each.knobs != examples.TWICE)
LARGER_WITHOUT_LORA = (*OTHERS, attempt(replace(examples.TWICE, use_peft=False), 31.0))
LARGER_AND_SLOWER = (*examples.PLAN.attempts[:2], attempt(examples.TWICE, 10.5, tokens_per_second=1_100.0))


SINGLE_PAIR = replace(
    examples.REWARD_PLAN, estimate=estimate(knobs=replace(examples.CHOSEN, per_device_train_batch_size=1))
)
SINGLE_PAIR = replace(SINGLE_PAIR, attempts=(attempt(SINGLE_PAIR.knobs, 4.0),))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (examples.PLAN, "8 rows need 14.9 GiB, 3.73 GiB more than the budget"),  # of the whole model, not of few layers
        (replace(examples.PLAN, attempts=LARGER_WITHOUT_LORA), "no more than 4 rows"),
        (replace(examples.PLAN, attempts=LARGER_AND_SLOWER), "8 rows need 10.5 GiB, which fits, at 1,100 tokens/s"),
        (examples.UNCHANGED_PLAN, "the whole batch of 8"),
        (SINGLE_PAIR, "no more than 1 pair at once was tried"),
    ],
)
def test_the_next_larger_micro_batch_binds_as_it_was_rehearsed(plan: Plan, said: str) -> None:
    assert bound(plan, "more at once").startswith(said)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (examples.PLAN, "rounding needs 17.3 GiB at least: with the headroom 17.8 GiB"),  # 0.47 GiB of headroom
        (examples.PASSED_OVER, "rounding fits, but takes 4.2 times as long: --max_slowdown 5"),
        (examples.UNCHANGED_PLAN, "there is none"),
        (examples.AS_GIVEN, "nothing was searched"),
        (
            replace(examples.PASSED_OVER, alternatives=examples.PASSED_OVER.alternatives[-1:]),
            "no gentler level is left",
        ),
    ],
)
def test_less_harm_is_never_left_open(plan: Plan, said: str) -> None:
    assert bound(plan, "less harm").startswith(said)


def test_shares_of_a_step_sum_to_the_whole() -> None:
    title = "peak allocated by phase, and its share of a step's time"
    block = text_of(examples.PLAN).split(f"{title}\n")[1].split("\n\n")[0]
    assert sum(map(float, re.findall(r"([\d.]+) %", block))) == pytest.approx(100, abs=0.2)  # each has one digit
    assumed = text_of(replace(examples.PLAN, estimate=replace(examples.PLAN.estimate, time=examples.ASSUMED_TIME)))
    shares = assumed.split(f"{title}, by the rates of a100-80gb\n")[1].split("\n\n")[0]
    assert "%" in shares
    assert not re.search(r"\d m?s ", shares)


def test_each_way_of_sharing_stands_with_its_bytes_and_speed() -> None:
    text = text_of(examples.SHARED_PLAN)
    block = text.split("how the GPUs share the model, for each of them\n")[1].split("\n\n")[0]
    weights = memory().owners_at_peak[Owner.WEIGHTS]
    ddp, no_reshard, full, offloaded = block.splitlines()[1:5]
    assert re.match(rf"\s+DDP +~{format_bytes(4 * weights)} .* 13.1 GiB +too much", ddp)
    assert re.match(rf"\s+FSDP2, no reshard +~{format_bytes(weights)} .* not rehearsed", no_reshard)
    assert re.match(rf"\s+> FSDP2, full shard +{format_bytes(weights)} .* 9.60 GiB +1,240 tokens/s", full)
    assert re.match(r"\s+FSDP2, offloaded +~0 B +~0 B +~0 B", offloaded)
    assert "gathered weights 1.00 GiB at the peak" in block
    assert "how the GPUs share" not in text_of(examples.PLAN)
    tried = text.split("tried; needs")[1]
    assert re.search(r"2 x 4 x 4 +DDP +13.10", tried)
    assert "as asked for  max_length 1024, full fine-tuning" in tried


def test_what_was_asked_to_be_as_much_as_fits_stands_beside_each_attempt() -> None:
    first, *others = examples.GRPO_PLAN.attempts or (candidate(examples.GRPO_PLAN.estimate),)
    more = replace(first.knobs, max_completion_length=4096, num_generations=64)
    plan = replace(examples.GRPO_PLAN, attempts=(first, *others, replace(first, knobs=more)))
    assert "max_completion_length 4096, groups of 64" in " ".join(text_of(plan).split("tried; needs")[1].split())
    adapted = replace(first.knobs, use_peft=True, lora_r=256)
    ranks = [replace(first, knobs=replace(adapted, lora_r=rank)) for rank in (8, 256)]
    assert "rank 256" in text_of(replace(examples.GRPO_PLAN, attempts=tuple(ranks))).split("tried; needs")[1]


def test_the_batch_of_several_gpus_is_told_with_them() -> None:
    text = rendered(explain_view(examples.SHARED_PLAN), 120)
    assert "32 = 2 x 4 x 4 GPUs  (rows at once x accumulation x devices)" in text
    assert "4 GPUs (FSDP2, full shard), a process on each: bytes are those of one" in text
    assert "and only autofit has --gpus 4 --sharding fsdp2" in text


def test_a_plan_is_explained_without_any_library_that_is_slow_to_import(tmp_path: Path) -> None:
    """Nothing but the standard library and rich, so that it answers at once."""
    write_json(tmp_path / PLAN_NAME, codec.to_json(examples.PLAN))
    loaded, said = loaded_by(
        f"from autotrain_mem.cli import main\nassert main.run(['explain', {str(tmp_path)!r}]) == 0"
    )
    assert said.startswith("autofit sft --model Qwen/Qwen2.5-1.5B\nfits rtx3060")
    assert not loaded & (SLOW_TO_IMPORT | {"yaml", "pynvml", "psutil"})


def of_experts(**knobs: Any) -> Estimate:
    shown = examples.estimate()
    memory = replace(shown.memory, unquantized_bytes=54 * GIB)
    return replace(shown, memory=memory, knobs=replace(shown.knobs, use_peft=True, **knobs))


def test_bytes_that_bitsandbytes_leaves_are_told_where_a_quantized_base_is_asked_for() -> None:
    four = of_experts(load_in_4bit=True, dtype="bfloat16")
    assert four.unquantized.startswith("54.0 GiB of the base are not quantized to 4 bits")
    assert four.unquantized.endswith("stays in bfloat16")
    assert of_experts(load_in_8bit=True, dtype="float32").unquantized.endswith("(--dtype bfloat16 halves it)")
    assert of_experts().unquantized == ""
    assert replace(four, memory=replace(four.memory, unquantized_bytes=0)).unquantized == ""


def test_what_waits_in_host_memory_is_shown() -> None:
    shown = examples.estimate()
    offloaded = replace(shown, memory=replace(shown.memory, pinned_host_bytes=3 * GIB))
    assert "host      3.00 GiB of pinned host memory" in rendered(estimate_view(offloaded))
    assert "pinned" not in rendered(estimate_view(shown))
