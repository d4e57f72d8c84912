import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_memory import LinearMemory, search, space_of

from autotrain_mem.settings.levers import LEVERS
from autotrain_mem.support.errors import DoesNotFitError
from autotrain_mem.support.units import GIB, format_bytes
from autotrain_mem.types import Estimate, Knobs

ON_THE_DEVICE: dict[str, object] = {"activation_offloading": False, "optimizer_offload": False}
FULL: dict[str, object] = {"use_peft": False, "dtype": "float32", "optim": "adamw_torch"}
FULL |= {"max_length": 1024, "gradient_checkpointing": False}


def refused(model: LinearMemory, **words: object) -> DoesNotFitError:
    with pytest.raises(DoesNotFitError) as raised:
        search(space_of(**words), model)  # type: ignore[arg-type]
    return raised.value


def error_of(budget_gib: float, **words: object) -> DoesNotFitError:
    return refused(LinearMemory(budget_bytes=int(budget_gib * GIB), frees_gradients=False), **words)


GOLDEN = """\
toy-1B with full fine-tuning does not fit toy12.
  needs   8.41 GiB in the backward pass (weights 1.86 GiB, gradients 1.86 GiB, optimizer state 1.86 GiB, \
activations 781.2 MiB, temporary 1.53 GiB, cached 242.0 MiB, outside torch 300.0 MiB),
          at the least demanding settings allowed: 8 x 1 rows, max_length 1024, with gradient checkpointing, \
bfloat16, adamw_8bit
  budget  3.00 GiB (4.00 GiB total, 256.0 MiB used by others, 768.0 MiB headroom)
nearest that fits: --effective_batch_size 8 --use_peft --dtype bfloat16, \
without --per_device_train_batch_size and --gradient_accumulation_steps  (2.56 GiB)"""


def test_error_does_the_next_sum_for_the_user_and_its_parts_add_up() -> None:
    batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    error = error_of(3, fit="rounding", **batch, **ON_THE_DEVICE)
    assert f"{error.message}\n{error.hint}" == GOLDEN
    parts = {name: float(size) for name, size in re.findall(r"(\w+) (\d+\.\d+) GiB[,)]", GOLDEN)}
    mebibytes = [float(size) for size in re.findall(r"\w+ (\d+\.\d+) MiB(?=[,)])", GOLDEN.split("budget")[0])]
    assert sum(parts.values()) + sum(mebibytes) / 1024 == pytest.approx(8.41, abs=0.02)  # each is rounded


KEPT = frozenset({"gradient_checkpointing", "8bit_base", "4bit_base", "activation_offloading"})
NO_BITS: dict[str, object] = {"load_in_8bit": False, "load_in_4bit": False}
ADAPTER: dict[str, object] = {"use_peft": True, "dtype": "bfloat16", "max_length": 1024} | NO_BITS | ON_THE_DEVICE


def test_the_hint_names_the_exact_flags() -> None:
    for budget_gib, words, hint in (
        # Limits give way in the order of harm.
        (2.7, FULL | ON_THE_DEVICE, "--gradient_checkpointing true --use_peft --dtype bfloat16  ("),
        (*(2.7, {"forbid": KEPT, "max_length": 1024}), "--gradient_checkpointing true --use_peft"),
        (10, {"fit": "lossless"} | ON_THE_DEVICE, "--optimizer_offload  ("),
        (5, {"fit": "lossless", "learning_rate": 1e-4}, "--optimizer_offload --dtype bfloat16  ("),
        (8, {"fit": "lossless"}, "--use_peft --dtype bfloat16  ("),  # at this rate updates would be lost
        (1.5, {"fit": "lossless"}, "--use_peft --load_in_4bit --use_bnb_nested_quant --dtype bfloat16  ("),
        # Pins that need not give way are kept.
        (11, {"fit": "lossless", "per_device_train_batch_size": 8} | ON_THE_DEVICE, "--optimizer_offload  (10.3 GiB)"),
        (
            *(
                2.7,
                {"optim": "adamw_torch", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2} | ADAPTER,
            ),
            "--effective_batch_size 16, without --per_device_train_batch_size and --gradient_accumulation_steps  "
            "(2.56 GiB)",
        ),
        # A forbidden micro-batch is answered with the exact split.
        (
            *(2.7, {"forbid": frozenset({"micro_batch"})} | ADAPTER),
            "--per_device_train_batch_size 1 --gradient_accumulation_steps 8  (2.56 GiB)",
        ),
    ):
        assert error_of(budget_gib, **words).hint.startswith(f"nearest that fits: {hint}")
    assert error_of(0.5).hint == "nothing that can be changed makes it fit here"


def test_the_nearest_that_is_suggested_was_rehearsed_on_the_whole_model() -> None:
    model = LinearMemory(budget_bytes=int(10.32 * GIB), copied_layers=3, amiss=0.02, frees_gradients=False)
    error = refused(model, fit="lossless", per_device_train_batch_size=8, **ON_THE_DEVICE)
    assert model.expanded(model.whole_calls[0]).fits
    assert not model.estimate(model.whole_calls[0]).fits
    assert model.estimate(model.whole_calls[-1]).fits
    assert f"({format_bytes(model.estimate(model.whole_calls[-1]).required_bytes)})" in error.hint


def suggested(error: DoesNotFitError, words: dict[str, object]) -> dict[str, object]:
    """The job's words after the user followed the hint, read as a command line would."""
    flags, _, without = error.hint.removeprefix("nearest that fits: ").split("  (")[0].partition(", without ")
    followed = {name: value for name, value in words.items() if f"--{name}" not in without.split()}
    for name, value in re.findall(r"--(\w+)(?: (?!--)(\S+))?", flags):
        followed[name] = {"": True, "true": True, "false": False}.get(value, int(value) if value.isdigit() else value)
    return followed


EVALUATED: dict[str, object] = {"eval_strategy": "steps", "per_device_eval_batch_size": 8}
PINS = FULL | ON_THE_DEVICE | NO_BITS | EVALUATED


@given(
    st.integers(GIB // 2, 24 * GIB),
    st.dictionaries(
        st.sampled_from(("per_device_train_batch_size", "gradient_accumulation_steps", "effective_batch_size")),
        st.sampled_from((8,)),
    ),
    st.sets(st.sampled_from(sorted(PINS)), min_size=1, max_size=8),
    st.frozensets(st.sampled_from(sorted(LEVERS)), max_size=2),
    st.sampled_from(("all", "rounding", "lossless")),
)
@settings(max_examples=40, deadline=None)
def test_following_the_hint_leads_to_a_plan_that_fits(
    budget: int, batch: dict[str, int], pins: set[str], forbid: frozenset[str], fit: str
) -> None:
    words: dict[str, object] = {**batch, **{name: PINS[name] for name in pins}, "forbid": forbid, "fit": fit}
    if len(batch) == 3:
        del words["effective_batch_size"]
    model = LinearMemory(budget_bytes=budget, evaluated_bytes=400_000)
    try:
        search(space_of(**words), model)  # type: ignore[arg-type]
    except DoesNotFitError as error:
        assert len(model.calls) <= 24
        if error.hint.startswith("nearest"):
            followed = search(space_of(**suggested(error, words)), model)  # type: ignore[arg-type]
            assert followed.estimate.fits
            assert followed.estimate.knobs.effective_batch_size == space_of(**words).effective_batch_size  # type: ignore[arg-type]


def test_an_error_names_vllms_share_and_counts_what_the_method_trains_on_and_says_what_is_offloaded() -> None:
    class BesideVllm(LinearMemory):
        def estimate(self, knobs: Knobs) -> Estimate:
            return replace(super().estimate(knobs), vllm_share_bytes=7 * GIB)

    words = {"method": "dpo", "activation_offloading": True, "fit": "lossless"}
    message = refused(BesideVllm(budget_bytes=GIB // 2), **words).message
    assert "outside torch 300.0 MiB, vLLM's share 7.00 GiB)" in message
    assert "1 x 8 pairs, max_length 1024" in message
    assert "with gradient checkpointing, activations offloaded" in message
    # Float32 weights alone are beyond the card, so that no search would offload their optimizer.
    assert "activations offloaded, optimizer offloaded, float32" in error_of(1, fit="lossless", use_peft=False).message


def test_a_shorter_length_drops_pairs_of_a_reward_model_where_others_truncate() -> None:
    words = {"use_peft": True, "dtype": "bfloat16"} | NO_BITS | ON_THE_DEVICE
    why = {}
    for method in ("sft", "reward"):
        found = search(space_of(method=method, **words), LinearMemory(budget_bytes=int(2.45 * GIB)))  # type: ignore[arg-type]
        why[method] = next(lever.why for lever in found.levers if lever.name == "max_length")
    assert why["sft"].endswith("rows are truncated to fewer tokens")
    assert why["reward"].endswith("pairs with a side of more tokens are dropped")


def test_a_suggestion_comes_to_an_end_where_the_whole_model_is_never_rehearsed() -> None:
    """As when cards are compared."""

    class CopiesAlone(LinearMemory):
        def rehearse(self, points: Sequence[Knobs], *, whole: bool) -> list[Estimate]:
            return super().rehearse(points, whole=False)

    error = refused(CopiesAlone(budget_bytes=4 * GIB, copied_layers=3), fit="lossless")
    assert "nearest that fits: --use_peft" in error.hint
