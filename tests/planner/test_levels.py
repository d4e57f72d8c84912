from dataclasses import replace
from typing import Any

import pytest
from synthetic_memory import ONLINE, PPO, TRL, space_of

from autotrain_mem.methods.table import METHODS
from autotrain_mem.planner.levels import LEVELS, SHORTER_ROWS, Level, levels
from autotrain_mem.planner.levers import LADDER
from autotrain_mem.spec import Knobs, codec

QUANTIZED = {"use_peft": True, "load_in_4bit": True}


def names(**words: object) -> list[str]:
    return [level.name for level in levels(space_of(**words))]  # type: ignore[arg-type]


def level_of(name: str, **words: object) -> Level:
    return next(level for level in levels(space_of(**words)) if level.name == name)  # type: ignore[arg-type]


def moved(new: Knobs, base: Knobs) -> dict[str, object]:
    """What a setting changes."""
    old = codec.to_json(base)
    return {name: value for name, value in codec.to_json(new).items() if value != old.get(name)}


def climbed(**words: object) -> dict[str, list[dict[str, object]]]:
    """What each level's settings change, lengths left out."""
    space = space_of(**words)  # type: ignore[arg-type]
    first, *_ = levels(space)
    assert first.gentlest == space.base
    return {
        level.name: [moved(setting, space.base) for setting in level.settings]
        for level in levels(space)
        if not level.lengths
    }


def every(**words: object) -> list[dict[str, object]]:
    """All settings of all levels."""
    return [changed for settings in climbed(**words).values() for changed in settings]


OFFLOADED = {"activation_offloading": True, "optimizer_offload": True}
ADAPTER = {"use_peft": True, "dtype": "bfloat16"}
FOUR_BIT = ADAPTER | {"load_in_4bit": True, "use_bnb_nested_quant": True}


def test_levels_climb_from_time_to_data() -> None:
    activations, host = {"activation_offloading": True}, {"optimizer_offload": True}
    bf16, eight_bit = {"dtype": "bfloat16"}, {"optim": "adamw_8bit"}
    assert climbed() == {
        "lossless": [{}],
        "lossless, offloading": [activations, host, OFFLOADED],
        "rounding": [bf16, eight_bit, bf16 | eight_bit],
        "rounding, offloading": [
            *(bf16 | activations, eight_bit | activations, bf16 | eight_bit | activations),
            *(bf16 | host, bf16 | OFFLOADED),
        ],
        "LoRA": [ADAPTER],
        "LoRA on an 8-bit base": [ADAPTER | {"load_in_8bit": True}],
        "LoRA on a 4-bit base": [FOUR_BIT],
        "LoRA on a 4-bit base, offloading": [FOUR_BIT | activations],
    }
    assert names()[-1] == "shorter rows"
    harms = [level.harm for level in levels(space_of())]
    assert harms == sorted(harms)


@pytest.mark.parametrize(
    ("words", "never", "still"),
    [
        ({"method": "ppo", "defaults": PPO}, {"activation_offloading", "optimizer_offload"}, {"dtype", "optim"}),
        ({"optimizer_offload": True}, {"optim"}, {"dtype"}),
        ({"forbid": frozenset({"lora"})}, {"use_peft", "load_in_4bit", "load_in_8bit"}, {"optim"}),
        ({"forbid": frozenset({"lora"}), "use_peft": True, "fit": "all"}, set(), {"load_in_4bit", "load_in_8bit"}),
        ({"use_peft": False}, {"load_in_4bit", "load_in_8bit"}, {"optim"}),
        (QUANTIZED, {"load_in_8bit"}, {"dtype"}),
        ({"use_peft": True, "load_in_8bit": True}, {"load_in_4bit"}, {"dtype"}),
        ({"use_bnb_nested_quant": False}, {"use_bnb_nested_quant"}, {"load_in_4bit"}),
        *(({"optim": optim}, {"optimizer_offload"}, {"dtype"}) for optim in ("adamw_8bit", "adafactor", "lion_8bit")),
    ],
)
def test_some_words_rule_levers_out_and_leave_others(words: dict[str, Any], never: set[str], still: set[str]) -> None:
    changed = {name for setting in every(**words) for name in setting}
    assert not changed & never
    assert still <= changed


def test_a_limit_of_harm_ends_the_levels() -> None:
    assert names(fit="lossless") == ["lossless", "lossless, offloading"]
    assert names(fit="rounding") == ["lossless", "lossless, offloading", "rounding", "rounding, offloading"]


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_methods_that_sample_offload_no_activations_and_cut_no_rows(method: str) -> None:
    settings = every(method=method, defaults=ONLINE)
    assert {"dtype": "bfloat16", "optimizer_offload": True} in settings
    assert not [changed for changed in settings if "activation_offloading" in changed]
    assert names(method=method, defaults=ONLINE) == [step.name for step in LEVELS][:-1]


@pytest.mark.parametrize("method", METHODS)
def test_a_lever_is_pulled_only_where_its_method_has_it(method: str) -> None:
    defaults = {"ppo": PPO, "grpo": ONLINE, "rloo": ONLINE}.get(method, TRL)
    for changed in every(method=method, defaults=defaults)[1:]:
        pulled = [row for row in LADDER if row.knobs[0] in changed]
        assert pulled
        assert all(method in row.methods for row in pulled)


def test_no_setting_is_on_two_levels_and_none_has_an_8bit_optimizer_on_the_host() -> None:
    settings = [knobs for level in levels(space_of()) if not level.lengths for knobs in level.settings]
    assert len(settings) == len(set(settings))
    assert not [knobs for knobs in settings if knobs.optimizer_offload and knobs.optim == "adamw_8bit"]


def test_fp16_keeps_the_dtype_of_what_is_trained() -> None:
    """The scaler takes no gradients in half precision; a frozen base has none."""
    changed = [setting for setting in every(fp16=True) if "dtype" in setting]
    assert all(setting["use_peft"] and setting["dtype"] == "float16" for setting in changed)
    assert [
        setting for setting in every(fp16=False) if setting.get("dtype") == "bfloat16" and "use_peft" not in setting
    ]


def test_the_gentlest_setting_comes_first_and_the_strongest_last() -> None:
    rounding = level_of("rounding")
    assert (rounding.gentlest.dtype, rounding.gentlest.optim) == ("bfloat16", "adamw_torch_fused")
    assert moved(rounding.strongest, TRL) == {"dtype": "bfloat16", "optim": "adamw_8bit"}
    assert moved(level_of("rounding, offloading").strongest, TRL) == {"dtype": "bfloat16"} | OFFLOADED


def test_lora_takes_bf16_weights_along_and_undoes_the_8bit_optimizer() -> None:
    lora = level_of("LoRA").gentlest
    assert (lora.use_peft, lora.dtype, lora.optim) == (True, "bfloat16", "adamw_torch_fused")


@pytest.mark.parametrize("words", [{"dtype": "float32"}, {"forbid": frozenset({"bf16_weights"})}], ids=str)
def test_lora_leaves_a_dtype_that_is_pinned_or_forbidden(words: dict[str, object]) -> None:
    assert {setting.dtype for setting in level_of("LoRA", **words).settings} == {"float32"}


def test_8bit_optimizer_replaces_no_other_optimizer_than_adamw_torch() -> None:
    space = space_of(defaults=replace(TRL, optim="sgd"))
    assert {knobs.optim for level in levels(space) for knobs in level.settings} == {"sgd"}


def test_rows_are_cut_with_everything_pulled_that_leaves_least() -> None:
    *_, below, cut = levels(space_of())
    assert cut.lengths
    assert cut.strongest == below.strongest


def test_lengths_are_coarser_from_256_tokens() -> None:
    lengths = level_of("shorter rows", longest=400).lengths
    assert lengths == (*range(64, 256, 16), 256, 320, 384)


def test_lengths_that_would_cut_no_row_are_not_tried() -> None:
    assert SHORTER_ROWS not in names(longest=64)
    assert SHORTER_ROWS in names(longest=65)


def test_pinned_knobs_take_their_levers_off_the_ladder() -> None:
    pinned = {"dtype": "float32", "optim": "adamw_torch", "use_peft": False, "max_length": 512}
    offloading = {"activation_offloading": False, "optimizer_offload": True}
    assert names(**pinned, **offloading) == ["lossless"]


def test_a_checkpoint_that_is_quantized_is_not_quantized_again() -> None:
    space = space_of(use_peft=True)
    plain, quantized = (levels(replace(space, is_quantized=known)) for known in (False, True))
    assert any(level.strongest.load_in_4bit for level in plain)
    assert not any(level.strongest.load_in_4bit or level.strongest.load_in_8bit for level in quantized)


def test_no_length_is_tried_that_would_drop_every_pair_of_a_reward_job() -> None:
    space = space_of(method="reward", longest=512)
    lengths = {floor: levels(replace(space, shortest=floor))[-1].lengths for floor in (None, 300)}
    assert min(lengths[None]) < 300 <= min(lengths[300])
    assert set(lengths[300]) < set(lengths[None])


def test_lengths_are_tried_with_the_levers_that_leave_least_even_where_a_gentler_level_came_last() -> None:
    space = space_of(use_peft=False, dtype="float32", longest=512)
    assert levels(space)[-2].strongest.optim == "adamw_8bit"
    assert levels(space)[-1].strongest.optimizer_offload
