"""What is proposed beside a plan, and what is not."""

import ast
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nouns import TRL_DEFAULTS

from autotrain_mem.search.advice import FLASH_ATTENTION, PADDING_PAYS, WORST_BATCH_PAYS, context_cut, proposals
from autotrain_mem.types import DataProfile, Job, Knobs

FLASH = "flash_attention_2"
SPREAD = DataProfile(rows_by_length=dict.fromkeys(range(1, 1001), 10))
"""Lengths as far apart as can be: half of a batch of many rows is padding."""
ALIKE = DataProfile(rows_by_length={512: 5000})
ONE_LONG = DataProfile(rows_by_length={500: 9995, 1000: 5})


def job(method: str = "sft", **arguments: Any) -> Job:
    return Job(method=method, model="m", dataset="d.jsonl", arguments=arguments)


def knobs(max_length: int | None = 1000, **changes: Any) -> Knobs:
    return replace(TRL_DEFAULTS, max_length=max_length, **changes)


def flags(
    profile: DataProfile, planned: Knobs | None = None, asked: Job | None = None, flash: str | None = FLASH
) -> list[str]:
    found = proposals(profile, planned or knobs(), asked or job(), flash_attention=flash)
    return [proposal.flags for proposal in found]


ONE_ROW = knobs(per_device_train_batch_size=1)
GROUPED = "--train_sampling_strategy group_by_length"
LITTLE_PADDING = DataProfile(rows_by_length={500: 1000, 530: 1000})
HARDLY_SHORTER = DataProfile(rows_by_length={900: 9995, 1000: 5})
HUNDRED_LONG = DataProfile(rows_by_length={500: 9950, 1000: 50})


def test_what_saves_padding_or_the_worst_batch_is_proposed() -> None:
    for profile, planned, asked, flash, expected in (
        (SPREAD, knobs(), job(), FLASH, [f"--packing --attn_implementation {FLASH}", GROUPED]),
        (SPREAD, knobs(), job(), None, [GROUPED]),
        (SPREAD, knobs(), job(attn_implementation=FLASH), FLASH, ["--packing", GROUPED]),
        (SPREAD, knobs(packing=True), job(), FLASH, []),
        (SPREAD, ONE_ROW, job(), FLASH, []),  # a batch of one row has no padding
        (ALIKE, knobs(), job(), FLASH, []),
        (LITTLE_PADDING, knobs(), job(), FLASH, []),
        (ONE_LONG, ONE_ROW, job(), FLASH, ["--max_length p99.9"]),
        (HARDLY_SHORTER, ONE_ROW, job(), FLASH, []),
        (HUNDRED_LONG, ONE_ROW, job(), FLASH, ["--max_length p99"]),
        *((SPREAD, knobs(None), job(method), FLASH, []) for method in ("grpo", "rloo", "ppo")),  # prompts stay whole
    ):
        assert flags(profile, planned, asked, flash) == expected, (profile, planned, asked)
    # The examples lie just below what pays.
    assert 0 < LITTLE_PADDING.padding_fraction(8) < PADDING_PAYS
    assert HARDLY_SHORTER.percentile(0.999) > (1 - WORST_BATCH_PAYS) * HARDLY_SHORTER.longest


def test_what_the_user_has_decided_is_not_proposed() -> None:
    both = DataProfile(rows_by_length={**SPREAD.rows_by_length, 9000: 1})
    for name, value in {"packing": False, "train_sampling_strategy": "sequential", "max_length": 1000}.items():
        assert any(flag.startswith(f"--{name}") for flag in flags(both, knobs(9000)))
        assert not any(flag.startswith(f"--{name}") for flag in flags(both, knobs(9000), job(**{name: value})))


def test_the_reason_for_a_shorter_length_says_what_it_saves_and_what_it_cuts_or_drops() -> None:
    (found,) = proposals(ONE_LONG, ONE_ROW, job(), flash_attention=None)
    assert found.why == (
        "the worst batch gets 50 % smaller, 500 tokens a row instead of 1000; that cuts 5 of 10,000 rows, 0.05 % of "
        "the tokens"
    )
    pairs = replace(ONE_LONG, shorter_sides={500: 9995 * 100, 1000: 5 * 100}, drops=True)
    (found,) = proposals(pairs, knobs(), job("reward"), flash_attention=FLASH)
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
