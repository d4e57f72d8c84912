"""The search over all levels: what it takes, what it keeps beside that, and its reasons; and segments that grow."""

import ast
import re
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from synthetic_memory import TRL, LinearMemory, search, space_of

from autotrain_mem.search import advice
from autotrain_mem.search.adapter import adapter_for, adapter_learning_rate
from autotrain_mem.search.advice import PADDING_PAYS, WORST_BATCH_PAYS, context_cut, proposals, questions
from autotrain_mem.search.changes import against
from autotrain_mem.search.levels import allowed, levels
from autotrain_mem.search.memo import Memo, candidate
from autotrain_mem.search.nearest import budget_line
from autotrain_mem.search.space import Space, loses_updates, make_space
from autotrain_mem.settings.levers import EXPANDABLE, LEVERS
from autotrain_mem.settings.words import MAX_SLOWDOWN
from autotrain_mem.support.errors import DoesNotFitError
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import DataProfile, Estimate, Harm, Job, Knobs, ModelFacts, Owner, StepTime, Trained
from autotrain_mem.types.estimate import MixedLengths


def test_everything_that_fits_is_found_in_three_rehearsals_and_without_recomputing() -> None:
    """The first and the last point of the level, and the first of the next."""
    model = LinearMemory(budget_bytes=200 * GIB)
    found = search(space_of(), model)
    assert len(model.calls) == 3
    (lever,) = found.levers
    assert (lever.name, lever.before, lever.after, lever.harm) == ("gradient_checkpointing", True, False, Harm.NONE)
    as_asked = search(space_of(gradient_checkpointing=True), LinearMemory(budget_bytes=200 * GIB))
    assert (as_asked.levers, as_asked.estimate.knobs) == ((), TRL)


def crawling(by: float = 8.0, budget_gib: float = 11) -> LinearMemory:
    """Full fine-tuning in float32 fits with the optimizer on the host alone, which takes so many times as long."""
    slowed = {"gradient_checkpointing": 1.2, "activation_offloading": 1.2, "optimizer_offload": by}
    return LinearMemory(budget_bytes=int(budget_gib * GIB), slowed=slowed, frees_gradients=False)


PASSED_OVER = {"lossless": False, "lossless, offloading": True, "LoRA": True}


def test_the_levels_around_are_kept_with_what_they_have_to_offer() -> None:
    for words, model, level, around in (
        ({}, LinearMemory(21 * GIB, frees_gradients=False), "lossless", {"rounding": True}),
        # A level that offloads has nothing to offer to a plan that fits without it.
        ({"effective_batch_size": 64}, LinearMemory(24 * GIB), "lossless", {"rounding": True}),
        ({}, LinearMemory(11 * GIB), "lossless, offloading", {"lossless": False, "rounding": True}),
        # A plan far slower than the next level is passed over, by as much as the user says, and never for a level that
        # the user rules out.
        ({}, crawling(), "rounding", PASSED_OVER),
        ({"max_slowdown": 20}, crawling(8), "lossless, offloading", {"lossless": False, "rounding": True}),
        ({"max_slowdown": 1.5}, crawling(2), "rounding", PASSED_OVER),
        ({"fit": "lossless"}, crawling(50), "lossless, offloading", {"lossless": False}),
    ):
        found = search(space_of(learning_rate=1e-4, **words), model)
        assert (found.level, {rival.level: rival.fits for rival in found.alternatives}) == (level, around)
        assert all((rival.ratio is not None) == rival.fits for rival in found.alternatives)


def test_levels_that_do_not_fit_are_kept_with_the_least_that_they_need_if_that_was_rehearsed() -> None:
    space, model = space_of(learning_rate=1e-4), LinearMemory(budget_bytes=4 * GIB, cards=("an L4",))
    found = search(space, model)
    below = ["lossless", "rounding", "rounding, offloading"]  # float32 weights are beyond the card, wherever state is
    assert [rival.level for rival in found.alternatives] == below  # an 8-bit base would gain nothing
    named = {level.name: level for level in levels(space)}
    for rival in found.alternatives:
        floors = [model.estimate(knobs) for knobs in named[rival.level].floors if knobs in model.calls]
        assert rival.required_bytes == min(each.required_bytes for each in floors)
        assert rival.would_fit == ("an L4",)


ON_THE_DEVICE = {"optimizer_offload": False, "activation_offloading": False}


def test_no_plan_loses_updates_that_the_job_keeps() -> None:
    for words, level, optim in (
        ({}, "rounding", "stable_adamw"),
        ({"optim": "adamw_torch"}, "LoRA", "adamw_torch"),
        ({"optim": "adamw_torch", "learning_rate": 1e-4}, "rounding", "adamw_torch"),
        ({"dtype": "bfloat16"}, "lossless", TRL.optim),
    ):
        found = search(space_of(**ON_THE_DEVICE, **words), LinearMemory(budget_bytes=13 * GIB))
        assert (found.level, found.estimate.knobs.optim) == (level, optim)
    host = space_of(use_peft=False, optim="adamw_torch", activation_offloading=False)
    found = search(host, LinearMemory(budget_bytes=5 * GIB))
    assert (found.level, found.estimate.knobs.dtype) == ("rounding, offloading", "bfloat16"), "float32 on the host"
    for words in ({}, ON_THE_DEVICE, {"optimizer_offload": True}):
        *_, shorter = levels(space_of(use_peft=False, longest=512, **words))
        assert not loses_updates(shorter.settings[0])
        assert (shorter.settings[0].dtype == "bfloat16") is (words != ON_THE_DEVICE), "an 8-bit optimizer needs as much"


def test_rows_are_never_cut_for_speed() -> None:
    """Attention grows with the square of the length: 64 tokens are computed at many times the speed."""

    class Quadratic(LinearMemory):
        def time(self, knobs: Knobs) -> StepTime:
            time = super().time(knobs)
            seconds = time.step_seconds * ((knobs.max_length or 4096) / 64) ** 2
            return replace(time, phases=dict.fromkeys(time.phases, seconds))

    space = space_of(use_peft=True, load_in_4bit=True, fit="all")
    found = search(space, Quadratic(budget_bytes=24 * GIB))
    assert found.estimate.knobs.max_length == space.base.max_length


def test_lever_says_what_the_gentler_rung_would_have_needed() -> None:
    found = search(space_of(), LinearMemory(budget_bytes=4 * GIB))
    needs = "needs at least 4.13 GiB, the budget is 4.00 GiB"
    assert [(lever.name, lever.before, lever.after, lever.why.partition(": ")[0]) for lever in found.levers] == [
        ("micro_batch", "8 x 1", "2 x 4", "a micro-batch of 4 rows needs 5.41 GiB, the budget is 4.00 GiB"),
        ("gradient_checkpointing", True, False, "the activations fit without recomputing them, which is faster"),
        ("dtype", "float32", "bfloat16", "the base model is frozen and loses no update to rounding"),
        ("use_peft", False, True, f"full fine-tuning {needs}"),
        ("learning_rate", 2e-5, 1.5e-4, found.levers[-1].why),
    ]
    assert found.levers[-2].why.endswith(": a LoRA adapter is trained and the base model stays frozen")


def test_scales_of_a_4_bit_base_are_a_change_where_it_was_asked_for_and_part_of_it_where_it_was_not() -> None:
    class Scaled(LinearMemory):
        def owners(self, knobs: Knobs) -> dict[Owner, int]:
            owners = super().owners(knobs)
            saved = 9 if knobs.use_bnb_nested_quant else 10
            return {**owners, Owner.WEIGHTS: owners[Owner.WEIGHTS] * saved // 10}

    words = {"use_peft": True, "load_in_4bit": True, "dtype": "bfloat16", "optim": "sgd", **ON_THE_DEVICE}
    found = search(space_of(max_length=64, **words), Scaled(budget_bytes=830 * MIB))
    (rounded,) = [lever for lever in found.levers if lever.harm is Harm.ROUNDING]
    assert (found.level, rounded.name, rounded.after) == ("rounding", "use_bnb_nested_quant", True)
    assert rounded.why.startswith("without it a micro-batch of 1 row needs 869.7 MiB, the budget is 830.0 MiB: ")
    found = search(space_of(max_length=64), Scaled(budget_bytes=850 * MIB))
    assert found.level.startswith("QLoRA")
    assert found.estimate.knobs.use_bnb_nested_quant
    assert "use_bnb_nested_quant" not in [lever.name for lever in found.levers]


def test_a_need_that_reads_as_the_budget_is_told_by_what_is_missing() -> None:
    assert against(76 * GIB + 12 * MIB, 76 * GIB) == "12.0 MiB more than the budget of 76.0 GiB"
    estimate = LinearMemory(budget_bytes=GIB).estimate(TRL)
    assert "too little" not in budget_line(estimate)
    lacking = replace(estimate, budget_bytes=estimate.required_bytes - 1)
    assert budget_line(lacking).endswith(" headroom), 1 B too little")


def test_a_lever_pulled_for_speed_says_so() -> None:
    found = search(space_of(learning_rate=1e-4), crawling())
    (passed,) = [rival for rival in found.alternatives if rival.level == "lossless, offloading"]
    ratio = 1 / (passed.ratio or 1)
    assert ratio > MAX_SLOWDOWN
    whys = [lever.why for lever in found.levers if lever.name in ("dtype", "optim")]
    assert f"without it a plan fits that takes {ratio:.1f} times as long" in {why.partition(": ")[0] for why in whys}
    measured = r"without it (a plan fits that takes|the same fits at|a micro-batch of \d+ rows? needs) [\d.]+ .*: "
    assert all(re.match(measured, why) for why in whys)


def test_what_parameters_alone_exceed_is_asked_while_the_choice_is_confirmed_and_changes_no_plan() -> None:
    space, model = space_of(), LinearMemory(budget_bytes=5 * GIB, copied_layers=2)
    counting = replace(model, counts_parameters=True, calls=[], whole_calls=[], foreseen=[])
    found, quicker = search(space, model), search(space, counting)
    assert (quicker.level, quicker.estimate, quicker.levers) == (found.level, found.estimate, found.levers)
    assert [each.level for each in quicker.alternatives] == [each.level for each in found.alternatives]
    assert not counting.exceeds(counting.calls[0])
    assert any(counting.exceeds(knobs) for knobs in counting.calls), "what the level would need is told all the same"
    assert all(knobs.optimizer_offload for knobs in model.calls if knobs.activation_offloading), "state is too large"
    beside = {knobs for points in counting.foreseen if points[1:] for knobs in points}
    begun = [level.name for level in levels(space) if {level.least, level.most} & beside]
    assert begun == ["lossless", "lossless, offloading", "rounding", "rounding, offloading", "LoRA"]

    class Misled(LinearMemory):
        def exceeds(self, knobs: Knobs) -> bool:
            return not knobs.use_peft

    roomy = LinearMemory(budget_bytes=80 * GIB)
    assert search(space, Misled(budget_bytes=80 * GIB)).estimate == search(space, roomy).estimate, "it fits after all"


SAVED = 0.02


def tight(space: Space) -> LinearMemory:
    """A card on which the job as asked fits with expandable segments only, to the byte."""
    needed = LinearMemory(budget_bytes=200 * GIB, unmapped=SAVED).estimate(space.base).growing()
    return LinearMemory(budget_bytes=needed.required_bytes, unmapped=SAVED)


ONE_POINT = space_of(per_device_train_batch_size=1, fit="lossless", gradient_checkpointing=True, **ON_THE_DEVICE)
"""A job whose every batch is pinned: its one level has one point."""


def test_they_are_turned_on_where_native_segments_do_not_fit_for_no_rehearsal_and_no_harm() -> None:
    model = tight(ONE_POINT)
    found = search(ONE_POINT, model)
    assert found.estimate.knobs == replace(ONE_POINT.base, expandable_segments=True)
    assert found.estimate.required_bytes == model.budget_bytes
    assert found.estimate.reserved == found.estimate.memory.reserved.expandable_segments
    assert model.calls == [ONE_POINT.base]
    assert found.attempts == (candidate(found.estimate),)
    (lever,) = found.levers
    assert (lever.name, lever.before, lever.after, lever.harm) == (EXPANDABLE, False, True, Harm.NONE)
    assert lever.why == (
        "with fixed-size segments it needs 19.5 GiB, the budget is 19.1 GiB: "
        "segments that grow page by page leave fewer gaps between tensors: the same training"
    )


def test_the_reason_says_so_where_it_is_the_hours_after_that_do_not_fit() -> None:
    class Fragmenting(LinearMemory):
        """Rows of every length leave 2 GiB more in fixed-size segments, in whichever order they come."""

        def over_steps(self, estimate: Estimate) -> Estimate:
            peaks = {grows: each.peak_reserved_bytes for grows, each in estimate.memory.reserved.modes.items()}
            both = MixedLengths(native=(peaks[False] + 2 * GIB,) * 3, expandable_segments=(peaks[True],) * 3)
            return replace(estimate, memory=replace(estimate.memory, mixed_lengths=both))

    needed = LinearMemory(budget_bytes=200 * GIB, unmapped=SAVED).estimate(ONE_POINT.base)
    found = search(ONE_POINT, Fragmenting(budget_bytes=needed.required_bytes + GIB, unmapped=SAVED))
    (lever,) = found.levers
    assert lever.name == EXPANDABLE
    assert lever.why.startswith("with fixed-size segments, over hours with rows of every length, it needs 21.5 GiB")
    assert found.attempts == (candidate(found.estimate),), "the table and the verdict have one figure"


def test_they_are_never_turned_on_against_the_users_words_or_vllm() -> None:
    assert EXPANDABLE not in space_of(method="grpo", use_vllm=False).pinned
    said = [{"expandable_segments": False}, {"forbid": frozenset({EXPANDABLE})}, {"method": "grpo", "use_vllm": True}]
    for words in said:
        space = space_of(per_device_train_batch_size=1, gradient_checkpointing=True, **words)
        assert not allowed(LEVERS[EXPANDABLE], space)
        model = tight(space)
        with suppress(DoesNotFitError):
            assert not search(space, model).estimate.knobs.expandable_segments, words
        assert len(model.calls) > 1  # what needs no other lever with them needs one without


def test_where_neither_kind_fits_the_one_that_needs_less_counts() -> None:
    for saved in (SAVED, -SAVED):
        model = LinearMemory(budget_bytes=3 * GIB, unmapped=saved)
        assert Memo(ONE_POINT, model)(ONE_POINT.base).knobs.expandable_segments is (saved > 0)


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


def adapted_space(tokens: int | None = None, **words: object) -> Space:
    space = make_space(TRL, job_of(**words), FACTS, longest=1024, profile=profile_of(tokens))
    return replace(space, base=replace(space.base, max_length=1024))


def test_the_rank_has_room_for_what_the_data_say() -> None:
    for tokens, rank in ((None, 16), (1_000_000, 16), (19_000_000, 64), (10**9, 256)):
        assert adapter_for(TRL, job_of("sft"), FACTS, profile_of(tokens)).lora_r == rank
    assert adapter_for(TRL, job_of("dpo"), FACTS, profile_of(10**9)).lora_r == 16


def test_lora_of_the_plan_is_on_all_layers_with_a_rate_of_its_own_and_the_users_words_stay() -> None:
    for words, targets, rate in (
        ({}, ("all-linear",), 1.5e-4),
        ({"learning_rate": 3e-5, "lora_target_modules": ["q_proj", "o_proj"]}, ("q_proj", "o_proj"), 3e-5),
        ({"use_peft": True}, None, TRL.learning_rate),
    ):
        knobs = search(adapted_space(**words), LinearMemory(budget_bytes=4 * GIB)).estimate.knobs
        assert (knobs.use_peft, knobs.lora_target_modules, knobs.learning_rate) == (True, targets, rate)


def test_the_rate_of_an_adapter_is_that_of_method_family_width_rows_and_steps() -> None:
    for method, family, width, rows, steps, rate, why in (
        ("sft", "qwen3", 4096, 128, 780, 4.7e-4, "qwen models learn best at 0.00047 with 128 rows"),
        ("sft", "qwen2", 896, 512, 780, 5e-4, "for 512 rows a step; "),
        ("sft", "llama", 4096, 64, None, 2e-4, "it is for at least 100 steps"),
        ("sft", "llama", 8192, 8, 100, 8.3e-5, "square root of the rows down to 32"),
        ("sft", "qwen2_5_vl", 2048, 32, 99, 3.7e-4, "1.5 times that in fewer than 100 steps"),
        ("gkd", "gemma3_text", 1152, 128, 780, 3e-4, "not calibrated for this family"),
        ("grpo", "qwen3", 4096, 128, 50, 1e-5, "10 times full fine-tuning's"),
        ("kto", "llama", 4096, 8, 780, 5e-6, "TRL's documentation"),
    ):
        facts, told = replace(FACTS, model_type=family, hidden_size=width), {"max_steps": steps} if steps else {}
        planned = replace(TRL, per_device_train_batch_size=rows)
        found, source = adapter_learning_rate(planned, job_of(method, **told), facts, None)
        assert (found, why in source) == (rate, True), (method, family, found, source)


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
    space, model = adapted_space(10**9), Ranked(budget_bytes=int(3.3 * GIB))
    found = search(space, model)
    assert (found.level, found.estimate.knobs.lora_r) == ("LoRA", 64)
    level = next(each for each in levels(space) if each.name == "LoRA")
    larger, same = (model.estimate(level.of_rank(rank).least) for rank in (128, 64))
    assert same.fits
    assert not larger.fits
    (lever,) = [lever for lever in found.levers if lever.name == "lora_r"]
    assert (lever.before, lever.after) == (16, 64)
    assert re.fullmatch(
        r"rank 256 needs at least \S+ GiB, the budget is \S+ GiB: the data need a larger rank, but it does not fit",
        lever.why,
    )
    assert search(adapted_space(10**9, lora_r=256), model).level != "LoRA"  # one that the user gave is kept


FUSED = ("experts.down_proj", "experts.gate_up_proj")
OF_MIXTURE = replace(FACTS, adapted=".*attn.*", experts=FUSED, active_experts=8)


class Mixture(Ranked):
    """Adapted experts are twenty times as many parameters as attention."""

    def owners(self, knobs: Knobs) -> dict[Owner, int]:
        return super().owners(replace(knobs, lora_r=knobs.lora_r * (20 if knobs.lora_target_parameters else 1)))


def test_experts_are_adapted_where_they_fit_and_attention_alone_where_they_do_not() -> None:
    space = replace(make_space(TRL, job_of(), OF_MIXTURE, longest=1024), fit="all")
    for budget_bytes, adapted, why in (
        (4 * GIB, (FUSED, 0.0, 8), "16 divided by the 8 experts of a token"),
        (int(3.0 * GIB), (None, 0.05, 16), r"with adapted experts it needs at least \S+ GiB.*all attention layers"),
    ):
        found = search(space, Mixture(budget_bytes=budget_bytes))
        knobs, whys = found.estimate.knobs, " ".join(lever.why for lever in found.levers)
        assert found.level == "LoRA"
        assert (knobs.lora_target_parameters, knobs.lora_dropout, knobs.lora_r) == adapted
        assert re.search(why, whys)
    for words in ({"lora_dropout": 0.1}, {"lora_target_modules": ["q_proj", "v_proj"]}, {"use_peft": True}):
        own = make_space(TRL, job_of(**words), OF_MIXTURE, longest=1024)
        assert own.adapter is None or own.adapter.lora_target_parameters is None, words


def test_half_precision_of_frozen_weights_that_are_saved_so_is_no_harm() -> None:
    found = search(replace(adapted_space(use_peft=True), fit="lossless"), LinearMemory(budget_bytes=4 * GIB))
    assert found.level == "lossless"
    assert [lever.harm for lever in found.levers if lever.name == "dtype"] == [Harm.NONE]
    kept = search(adapted_space(use_peft=True, dtype="float32"), LinearMemory(budget_bytes=8 * GIB))
    assert kept.estimate.knobs.dtype == "float32"


def test_a_coarser_level_is_asked_about_where_it_is_much_faster() -> None:
    model = LinearMemory(budget_bytes=40 * GIB)
    chosen, other = model.estimate(TRL), model.estimate(replace(TRL, dtype="bfloat16"))
    offered = candidate(other, beside=chosen, level="rounding")
    (question,) = questions("lossless", TRL, [replace(offered, ratio=1.3)])
    assert question.flags == "--max_slowdown 1.2 --fit rounding"
    assert not questions("lossless", TRL, [replace(offered, ratio=1.2)])


def adapted(rate: float, **changes: Any) -> Knobs:
    return replace(TRL, use_peft=True, learning_rate=rate, lora_target_modules=("all-linear",), **changes)


def test_what_hurts_by_the_users_own_words_is_advised_against() -> None:
    for words, knobs, flags in (
        ({}, replace(TRL, use_peft=True), ["--learning_rate 0.00015", "--lora_target_modules all-linear"]),
        # The rows and the rate of the commands in TRL's lora_without_regret.md, whose Python has 2e-4.
        ({"learning_rate": 2e-5}, adapted(2e-5, per_device_train_batch_size=32), ["--learning_rate 0.00015"]),
        ({"learning_rate": 1e-3}, adapted(1e-3, per_device_train_batch_size=256), ["--effective_batch_size 128"]),
        ({}, adapted(1e-4), []),
        ({}, replace(TRL, dtype="bfloat16"), ["--optim stable_adamw"]),
        ({}, replace(TRL, dtype="bfloat16", optim="stable_adamw"), []),
        ({}, replace(TRL, dtype="bfloat16", learning_rate=1e-3), []),
    ):
        assert [each.flags for each in advice.advice(job_of(**words), knobs, FACTS, None)] == flags, knobs


FLASH = "flash_attention_2"
SPREAD = DataProfile(rows_by_length=dict.fromkeys(range(1, 1001), 10))
"""Lengths as far apart as can be: half of a batch of many rows is padding."""
ONE_LONG = DataProfile(rows_by_length={500: 9995, 1000: 5})


def knobs(max_length: int | None = 1000, **changes: Any) -> Knobs:
    return replace(TRL, max_length=max_length, **changes)


def proposed(profile: DataProfile, planned: Knobs, *method: str, flash: str | None = "", **words: Any) -> list[str]:
    return [each.flags for each in proposals(profile, planned, job_of(*method, **words), flash_attention=flash)]


ONE_ROW = knobs(per_device_train_batch_size=1)
GROUPED = "--train_sampling_strategy group_by_length"
LITTLE_PADDING = DataProfile(rows_by_length={500: 1000, 530: 1000})
HARDLY_SHORTER = DataProfile(rows_by_length={900: 9995, 1000: 5})


def test_what_saves_padding_or_the_worst_batch_is_proposed() -> None:
    assert proposed(SPREAD, knobs()) == [f"--packing --attn_implementation {FLASH}", GROUPED]
    assert proposed(SPREAD, knobs(), flash=None) == [GROUPED]
    packed, _ = proposals(SPREAD, knobs(), job_of(), flash_attention="pip install it")
    assert packed.why.endswith("; first pip install it")
    assert proposed(SPREAD, knobs(), attn_implementation=FLASH) == ["--packing", GROUPED]
    assert proposed(SPREAD, knobs(packing=True)) == []
    assert proposed(SPREAD, ONE_ROW) == [], "a batch of one row has no padding"
    assert proposed(DataProfile(rows_by_length={512: 5000}), knobs()) == proposed(LITTLE_PADDING, knobs()) == []
    assert proposed(ONE_LONG, ONE_ROW) == ["--max_length p99.9"]
    assert proposed(HARDLY_SHORTER, ONE_ROW) == []
    assert proposed(DataProfile(rows_by_length={500: 9950, 1000: 50}), ONE_ROW) == ["--max_length p99"]
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
    (found,) = proposals(pairs, knobs(), job_of("reward"), flash_attention="")
    assert found.flags == "--max_length p99.9"
    assert "drops 5 of 10,000 pairs" in found.why


def test_every_flash_attention_that_trl_knows_is_known() -> None:
    trl = find_spec("trl")
    assert trl is not None
    source = Path(str(trl.origin)).with_name("trainer").joinpath("sft_trainer.py").read_text(encoding="utf-8")
    (values,) = re.findall(r"^FLASH_ATTENTION_VARIANTS = (\{.*?\})", source, re.MULTILINE | re.DOTALL)
    assert set(advice.FLASH_ATTENTION) == ast.literal_eval(values)


def test_rows_beyond_the_context_are_counted_and_pairs_dropped_whole() -> None:
    assert context_cut(ONE_LONG, 1000, "sft") is context_cut(ONE_LONG, None, "sft") is None
    assert context_cut(ONE_LONG, 600, "sft") == (
        "5 of 10,000 rows (0.05 %) are longer than the model's context of 600 tokens (the longest has 1,000): that "
        "cuts 0.04 % of all tokens"
    )
    text = context_cut(replace(ONE_LONG, drops=True), 600, "reward") or ""
    assert "5 of 10,000 pairs" in text
    assert "drops them, with 0.1 % of all tokens" in text
