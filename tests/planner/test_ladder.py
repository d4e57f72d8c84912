import pytest
from synthetic_memory import TRL

from autotrain_mem.errors import UsageError
from autotrain_mem.planner.ladder import check_forbid
from autotrain_mem.planner.levers import LADDER, LEVERS


def test_table_is_in_the_order_of_harm() -> None:
    assert [row.harm for row in LADDER] == sorted(row.harm for row in LADDER)


def test_table_moves_only_knobs_that_exist() -> None:
    assert all(hasattr(TRL, knob) for row in LADDER for knob in (*row.knobs, *row.also, *row.needs))


def test_levers_pulled_along_do_no_more_harm_than_the_one_that_pulls() -> None:
    assert all(LEVERS[name].harm <= row.harm for row in LADDER for name in row.along)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lorra", "lora"),
        ("bf16", "bf16_weights"),
        ("use_peft", "lora"),
        ("dtype", "bf16_weights"),
        ("4bit", "4bit_base"),
        ("load_in_8bit", "8bit_base"),
    ],
)
def test_unknown_lever_is_answered_with_the_one_meant(name: str, meant: str) -> None:
    with pytest.raises(UsageError) as raised:
        check_forbid([name, "max_length"])
    assert raised.value.message == f"--forbid knows no lever named {name}"
    assert raised.value.hint == (
        f"did you mean --forbid {meant} instead of {name}?\nthe levers are "
        "expandable_segments, eval_batch, micro_batch, rollout_batch, gradient_checkpointing, activation_offloading, "
        "optimizer_offload, bf16_weights, 8bit_optimizer, lora, 8bit_base, 4bit_base, max_length"
    )


def test_lever_like_no_other_is_answered_with_the_list() -> None:
    with pytest.raises(UsageError) as raised:
        check_forbid(["zzz"])
    assert raised.value.hint.startswith("the levers are expandable_segments, eval_batch")


def test_known_levers_may_be_forbidden() -> None:
    assert check_forbid(["lora", "lora"]) == {"lora"}
