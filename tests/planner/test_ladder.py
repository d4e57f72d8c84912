from dataclasses import replace

import pytest
from synthetic_memory import TRL, space_of

from autotrain_mem.errors import UsageError
from autotrain_mem.planner.ladder import LADDER, Rung, check_forbid, rungs
from autotrain_mem.spec import Harm


def harms(**words: object) -> list[Harm]:
    return [rung.harm for rung in rungs(space_of(**words))]  # type: ignore[arg-type]


def rung_of(harm: Harm, **words: object) -> Rung:
    return next(rung for rung in rungs(space_of(**words)) if rung.harm is harm)  # type: ignore[arg-type]


def test_table_is_in_the_order_of_harm() -> None:
    assert [row.harm for row in LADDER] == sorted(row.harm for row in LADDER)


def test_table_moves_only_knobs_that_exist() -> None:
    assert all(hasattr(TRL, knob) for row in LADDER for knob in row.knobs)


def test_levers_pulled_along_do_less_harm_than_the_one_that_pulls() -> None:
    harm = {row.name: row.harm for row in LADDER}
    assert all(harm[name] < row.harm for row in LADDER for name in row.along)


def test_ladder_climbs_from_time_to_data() -> None:
    assert harms() == [Harm.TIME, Harm.ROUNDING, Harm.WHAT_IS_TRAINED, Harm.DATA]


def test_lossless_stops_before_rounding() -> None:
    assert harms(fit="lossless") == [Harm.TIME]


def test_rounding_stops_before_lora() -> None:
    assert harms(fit="rounding") == [Harm.TIME, Harm.ROUNDING]


def test_rung_holds_every_set_of_its_levers_strongest_first() -> None:
    settings = [(knobs.dtype, knobs.optim) for knobs in rung_of(Harm.ROUNDING).settings]
    assert settings == [
        ("bfloat16", "adamw_8bit"),
        ("bfloat16", "adamw_torch_fused"),
        ("float32", "adamw_8bit"),
    ]


def test_lora_takes_bf16_weights_along_and_undoes_the_8bit_optimizer() -> None:
    lora = rung_of(Harm.WHAT_IS_TRAINED).strongest
    assert (lora.use_peft, lora.dtype, lora.optim) == (True, "bfloat16", "adamw_torch_fused")


@pytest.mark.parametrize("words", [{"dtype": "float32"}, {"forbid": frozenset({"bf16_weights"})}], ids=str)
def test_lora_leaves_a_dtype_that_is_pinned_or_forbidden(words: dict[str, object]) -> None:
    assert rung_of(Harm.WHAT_IS_TRAINED, **words).strongest.dtype == "float32"


def test_8bit_optimizer_replaces_no_other_optimizer_than_adamw_torch() -> None:
    settings = rungs(space_of(defaults=TRL.from_json(TRL.to_json() | {"optim": "sgd"})))[1].settings
    assert {knobs.optim for knobs in settings} == {"sgd"}


def test_data_rung_pulls_everything_below_it() -> None:
    assert rung_of(Harm.DATA).strongest == rung_of(Harm.WHAT_IS_TRAINED).strongest


def test_lengths_are_coarser_from_256_tokens() -> None:
    lengths = rung_of(Harm.DATA, longest=400).lengths
    assert lengths == (*range(64, 256, 16), 256, 320, 384)


def test_lengths_that_would_cut_no_row_are_not_tried() -> None:
    assert harms(longest=64)[-1] is Harm.WHAT_IS_TRAINED


def test_pinned_knobs_take_their_levers_off_the_ladder() -> None:
    pinned = {"dtype": "float32", "optim": "adamw_torch", "use_peft": False, "max_length": 512}
    assert harms(**pinned) == [Harm.TIME]


def test_other_methods_know_none_of_the_levers_yet() -> None:
    assert [rung.harm for rung in rungs(replace(space_of(), method="grpo"))] == [Harm.TIME]


@pytest.mark.parametrize(
    ("name", "meant"), [("lorra", "lora"), ("bf16", "bf16_weights"), ("use_peft", "lora"), ("dtype", "bf16_weights")]
)
def test_unknown_lever_is_answered_with_the_one_meant(name: str, meant: str) -> None:
    with pytest.raises(UsageError) as raised:
        check_forbid([name, "max_length"])
    assert raised.value.message == f"--forbid knows no lever named {name}"
    assert raised.value.hint == (
        f"did you mean --forbid {meant} instead of {name}?\nthe levers are "
        "micro_batch, gradient_checkpointing, bf16_weights, 8bit_optimizer, lora, max_length"
    )


def test_lever_like_no_other_is_answered_with_the_list() -> None:
    with pytest.raises(UsageError) as raised:
        check_forbid(["zzz"])
    assert raised.value.hint.startswith("the levers are micro_batch")


def test_known_levers_may_be_forbidden() -> None:
    assert check_forbid(["lora", "lora"]) == {"lora"}
