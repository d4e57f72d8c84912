"""What an adapter is where a plan turns LoRA on, and what is asked, advised and proposed beside a plan."""

import ast
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from synthetic_memory import TRL, LinearMemory, search

from autotrain_mem.search.adapter import adapter_for
from autotrain_mem.search.advice import (
    FLASH_ATTENTION,
    PADDING_PAYS,
    WORST_BATCH_PAYS,
    advice,
    context_cut,
    proposals,
    questions,
)
from autotrain_mem.search.levels import levels
from autotrain_mem.search.memo import candidate
from autotrain_mem.search.space import Space, make_space
from autotrain_mem.support.units import GIB
from autotrain_mem.types import DataProfile, Estimate, Harm, Job, Knobs, Owner, Trained
from autotrain_mem.types.model import ModelFacts

WIDTH = 500_000
"""Parameters of an adapter for each of its ranks."""

FACTS = ModelFacts(
    context_length=None,
    is_quantized=False,
    lora_targets=("q_proj", "v_proj"),
    adapted="all-linear",
    adapter_width=WIDTH,
    checkpoint_dtype="bfloat16",
)


def job_of(method: str = "sft", **words: object) -> Job:
    return Job(method=method, model="toy-1B", dataset=None, arguments=words)


def profile_of(tokens: int | None) -> DataProfile | None:
    return None if tokens is None else DataProfile(rows_by_length={tokens // 1000: 1000})


def space_of(tokens: int | None = None, **words: object) -> Space:
    space = make_space(TRL, job_of(**words), FACTS, longest=1024, profile=profile_of(tokens))
    return replace(space, base=replace(space.base, max_length=1024))


def test_the_rank_has_room_for_what_the_data_say() -> None:
    for tokens, rank in ((None, 16), (1_000_000, 16), (19_000_000, 64), (10**9, 256)):
        assert adapter_for(TRL, job_of("sft"), FACTS, profile_of(tokens)).lora_r == rank
    assert adapter_for(TRL, job_of("dpo"), FACTS, profile_of(10**9)).lora_r == 16


def test_lora_of_the_plan_is_on_all_layers_with_a_rate_of_its_own_and_the_users_words_stay() -> None:
    for words, targets, rate in (
        ({}, ("all-linear",), 2e-4),
        ({"learning_rate": 3e-5, "lora_target_modules": ["q_proj", "o_proj"]}, ("q_proj", "o_proj"), 3e-5),
        ({"use_peft": True}, None, TRL.learning_rate),
    ):
        knobs = search(space_of(**words), LinearMemory(budget_bytes=4 * GIB)).estimate.knobs
        assert (knobs.use_peft, knobs.lora_target_modules, knobs.learning_rate) == (True, targets, rate)


class Ranked(LinearMemory):
    """An adapter's weights, gradients and optimizer state grow with its rank: all of them in float32."""

    def owners(self, knobs: Knobs) -> dict[Owner, int]:
        held = super().owners(knobs)
        if not knobs.use_peft:
            return held
        adapter_bytes = 4 * WIDTH * knobs.lora_r
        held[Owner.WEIGHTS] += adapter_bytes
        return held | {Owner.GRADIENTS: adapter_bytes, Owner.OPTIMIZER_STATE: 2 * adapter_bytes}

    def estimate(self, knobs: Knobs) -> Estimate:
        whole = super().estimate(knobs)
        count = WIDTH * knobs.lora_r if knobs.use_peft else self.parameters
        trained = Trained(parameters=count, of_parameters=self.parameters, dtype="float32")
        return replace(whole, memory=replace(whole.memory, trained=trained))


def test_a_rank_that_the_card_has_no_memory_for_makes_way_for_the_largest_that_fits() -> None:
    space, model = space_of(10**9), Ranked(budget_bytes=int(3.3 * GIB))
    found = search(space, model)
    assert (found.level, found.estimate.knobs.lora_r) == ("LoRA", 64)
    level = next(each for each in levels(space) if each.name == "LoRA")
    larger, same = (model.estimate(level.of_rank(rank).least) for rank in (128, 64))
    assert same.fits
    assert not larger.fits
    (lever,) = [lever for lever in found.levers if lever.name == "lora_r"]
    assert (lever.before, lever.after) == (16, 64)
    assert re.fullmatch(
        r"rank 256 needs at least \S+ GiB, the budget is \S+ GiB: the data ask for more, and there is no memory for it",
        lever.why,
    )
    assert search(space_of(10**9, lora_r=256), model).level != "LoRA"  # one that the user gave is kept


def test_half_precision_of_frozen_weights_that_are_saved_so_is_no_harm() -> None:
    found = search(replace(space_of(use_peft=True), fit="lossless"), LinearMemory(budget_bytes=4 * GIB))
    assert found.level == "lossless"
    assert [lever.harm for lever in found.levers if lever.name == "dtype"] == [Harm.NONE]
    kept = search(space_of(use_peft=True, dtype="float32"), LinearMemory(budget_bytes=8 * GIB))
    assert kept.estimate.knobs.dtype == "float32"


def test_a_coarser_level_is_asked_about_where_it_is_much_faster() -> None:
    model = LinearMemory(budget_bytes=40 * GIB)
    chosen, other = model.estimate(TRL), model.estimate(replace(TRL, dtype="bfloat16"))
    offered = candidate(other, beside=chosen, level="rounding")
    (question,) = questions("lossless", TRL, [replace(offered, ratio=1.3)])
    assert question.flags == "--max_slowdown 1.2 --fit rounding"
    assert not questions("lossless", TRL, [replace(offered, ratio=1.2)])


def test_what_hurts_by_the_users_own_words_is_advised_against() -> None:
    for words, knobs, flags in (
        ({}, replace(TRL, use_peft=True), ["--learning_rate 0.0002", "--lora_target_modules all-linear"]),
        ({}, replace(TRL, use_peft=True, learning_rate=1e-4, lora_target_modules=("all-linear",)), []),
        ({}, replace(TRL, dtype="bfloat16"), ["--optim stable_adamw"]),
        ({}, replace(TRL, dtype="bfloat16", optim="stable_adamw"), []),
        ({"dtype": "bfloat16"}, replace(TRL, dtype="bfloat16"), ["--dtype float32"]),
        ({}, replace(TRL, dtype="bfloat16", learning_rate=1e-3), []),
    ):
        assert [each.flags for each in advice(job_of(**words), knobs, TRL, FACTS)] == flags, knobs


FLASH = "flash_attention_2"
SPREAD = DataProfile(rows_by_length=dict.fromkeys(range(1, 1001), 10))
"""Lengths as far apart as can be: half of a batch of many rows is padding."""
ALIKE = DataProfile(rows_by_length={512: 5000})
ONE_LONG = DataProfile(rows_by_length={500: 9995, 1000: 5})


def knobs(max_length: int | None = 1000, **changes: Any) -> Knobs:
    return replace(TRL, max_length=max_length, **changes)


def proposed(profile: DataProfile, planned: Knobs, *method: str, flash: str | None = FLASH, **words: Any) -> list[str]:
    return [each.flags for each in proposals(profile, planned, job_of(*method, **words), flash_attention=flash)]


ONE_ROW = knobs(per_device_train_batch_size=1)
GROUPED = "--train_sampling_strategy group_by_length"
LITTLE_PADDING = DataProfile(rows_by_length={500: 1000, 530: 1000})
HARDLY_SHORTER = DataProfile(rows_by_length={900: 9995, 1000: 5})
HUNDRED_LONG = DataProfile(rows_by_length={500: 9950, 1000: 50})


def test_what_saves_padding_or_the_worst_batch_is_proposed() -> None:
    assert proposed(SPREAD, knobs()) == [f"--packing --attn_implementation {FLASH}", GROUPED]
    assert proposed(SPREAD, knobs(), flash=None) == [GROUPED]
    assert proposed(SPREAD, knobs(), attn_implementation=FLASH) == ["--packing", GROUPED]
    assert proposed(SPREAD, knobs(packing=True)) == []
    assert proposed(SPREAD, ONE_ROW) == [], "a batch of one row has no padding"
    assert proposed(ALIKE, knobs()) == proposed(LITTLE_PADDING, knobs()) == []
    assert proposed(ONE_LONG, ONE_ROW) == ["--max_length p99.9"]
    assert proposed(HARDLY_SHORTER, ONE_ROW) == []
    assert proposed(HUNDRED_LONG, ONE_ROW) == ["--max_length p99"]
    for method in ("grpo", "rloo", "ppo"):
        assert proposed(SPREAD, knobs(None), method) == [], "prompts stay whole"
    # The examples lie just below what pays.
    assert 0 < LITTLE_PADDING.padding_fraction(8) < PADDING_PAYS
    assert HARDLY_SHORTER.percentile(0.999) > (1 - WORST_BATCH_PAYS) * HARDLY_SHORTER.longest


def test_what_the_user_has_decided_is_not_proposed() -> None:
    both = DataProfile(rows_by_length={**SPREAD.rows_by_length, 9000: 1})
    for name, value in {"packing": False, "train_sampling_strategy": "sequential", "max_length": 1000}.items():
        assert any(flag.startswith(f"--{name}") for flag in proposed(both, knobs(9000)))
        assert not any(flag.startswith(f"--{name}") for flag in proposed(both, knobs(9000), **{name: value}))


def test_the_reason_for_a_shorter_length_says_what_it_saves_and_what_it_cuts_or_drops() -> None:
    (found,) = proposals(ONE_LONG, ONE_ROW, job_of(), flash_attention=None)
    assert found.why == (
        "the worst batch gets 50 % smaller, 500 tokens a row instead of 1000; that cuts 5 of 10,000 rows, 0.05 % of "
        "the tokens"
    )
    pairs = replace(ONE_LONG, shorter_sides={500: 9995 * 100, 1000: 5 * 100}, drops=True)
    (found,) = proposals(pairs, knobs(), job_of("reward"), flash_attention=FLASH)
    assert found.flags == "--max_length p99.9"
    assert "drops 5 of 10,000 pairs" in found.why


def test_every_flash_attention_that_trl_knows_is_known() -> None:
    trl = find_spec("trl")
    assert trl is not None
    source = Path(str(trl.origin)).with_name("trainer").joinpath("sft_trainer.py").read_text(encoding="utf-8")
    (values,) = re.findall(r"^FLASH_ATTENTION_VARIANTS = (\{.*?\})", source, re.MULTILINE | re.DOTALL)
    assert set(FLASH_ATTENTION) == ast.literal_eval(values)


def test_rows_beyond_the_context_are_counted_and_pairs_dropped_whole() -> None:
    assert context_cut(ONE_LONG, 1000, "sft") is context_cut(ONE_LONG, None, "sft") is None
    assert context_cut(ONE_LONG, 600, "sft") == (
        "5 of 10,000 rows (0.05 %) are longer than the model's context of 600 tokens, the longest 1,000: that cuts "
        "0.04 % of all tokens"
    )
    text = context_cut(replace(ONE_LONG, drops=True), 600, "reward") or ""
    assert "5 of 10,000 pairs" in text
    assert "drops them, with 0.1 % of all tokens" in text
