"""The table of levers, the levels of harm that a job has, and the points of each."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from synthetic_memory import EIGHT, ONLINE, PPO, TRL, space_of

from autotrain_mem.search.levels import SHORTER_ROWS, check_forbid, levels, strongest
from autotrain_mem.settings.levers import LADDER, LEVERS
from autotrain_mem.support import codec
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Knobs


def test_the_table_is_in_the_order_of_harm_and_moves_knobs_that_exist() -> None:
    assert [row.harm for row in LADDER] == sorted(row.harm for row in LADDER)
    assert all(hasattr(TRL, knob) for row in LADDER for knob in (*row.knobs, *row.also, *row.needs))
    assert all(LEVERS[name].harm <= row.harm for row in LADDER for name in row.along)
    assert all(row.at_best.kept <= row.usual.kept and row.at_best.taken >= row.usual.taken for row in LADDER)


def test_an_unknown_lever_is_answered_with_the_one_meant() -> None:
    meant = {"lorra": "lora", "bf16": "bf16_weights", "use_peft": "lora", "4bit": "4bit_base", "zzz": None}
    for name, lever in meant.items():
        with pytest.raises(UsageError, match=f"--forbid: no lever is named {name}\\n") as raised:
            check_forbid([name, "max_length"])
        did_you_mean = f"did you mean --forbid {lever} instead of {name}?\n" if lever else ""
        assert raised.value.hint == f"{did_you_mean}the levers are {', '.join(LEVERS)}"
    assert check_forbid(["lora", "lora"]) == {"lora"}


def names(**words: Any) -> list[str]:
    return [level.name for level in levels(space_of(**words))]


def climbed(**words: Any) -> dict[str, list[dict[str, object]]]:
    """What each level's settings change, lengths left out."""
    space = space_of(**words)
    assert levels(space)[0].settings[0] == space.base
    old = codec.to_json(space.base).items()
    return {
        level.name: [dict(codec.to_json(setting).items() - old) for setting in level.settings]
        for level in levels(space)
        if not level.lengths
    }


def every(**words: Any) -> list[dict[str, object]]:
    """All settings of all levels."""
    return [changed for settings in climbed(**words).values() for changed in settings]


OFFLOADED = {"activation_offloading": True, "optimizer_offload": True}
ADAPTER = {"use_peft": True, "dtype": "bfloat16", "learning_rate": 1.5e-4}
FOUR_BIT = ADAPTER | {"load_in_4bit": True, "use_bnb_nested_quant": True}

LORA = {
    "LoRA": [ADAPTER],
    "LoRA on an 8-bit base": [ADAPTER | {"load_in_8bit": True}],
    "QLoRA": [FOUR_BIT],
    "QLoRA, offloading": [FOUR_BIT | {"activation_offloading": True}],
}


def test_levels_climb_from_time_to_data() -> None:
    activations, host, eight_bit = {"activation_offloading": True}, {"optimizer_offload": True}, {"optim": "adamw_8bit"}
    bf16 = {"dtype": "bfloat16"}  # which by itself loses updates at TRL's learning rate
    summed = bf16 | {"optim": "stable_adamw"}
    expected = {
        "lossless": [{}],
        "lossless, offloading": [activations, host, OFFLOADED],
        "rounding": [eight_bit, summed],
        "rounding, offloading": [eight_bit | activations, summed | activations, bf16 | host, bf16 | OFFLOADED],
        **LORA,
    }
    assert climbed() == expected
    assert climbed(learning_rate=2e-4)["rounding"] == [bf16, eight_bit, summed, bf16 | eight_bit]
    assert names() == [*expected, "shorter rows"]
    harms = [level.harm for level in levels(space_of())]
    assert harms == sorted(harms)


PRECOMPUTED = {"precompute_ref_log_probs": True}
PAIRS: dict[str, Any] = {"method": "dpo", "defaults": replace(TRL, precompute_ref_log_probs=False)}


def test_a_second_model_that_only_scores_is_given_up_before_memory_of_the_host_is_used() -> None:
    found = climbed(**PAIRS)
    assert list(found)[:3] == ["lossless", "lossless, precomputed reference", "lossless, offloading"]
    gone = {name: [PRECOMPUTED.items() <= each.items() for each in settings] for name, settings in found.items()}
    assert [name for name, each in gone.items() if not all(each)] == ["lossless", *LORA]
    assert not any(flag for name in LORA for flag in gone[name])
    assert levels(space_of(**PAIRS, use_peft=False))[-1].settings[-1].precompute_ref_log_probs
    for words in (
        *({name: True} for name in ("sync_ref_model", "dataset_streaming", "bf16_full_eval", "use_peft")),
        {"attn_implementation": "flash_attention_2"},  # the scores are computed in the weights' dtype
        {"forbid": frozenset({"precompute_ref_log_probs"})},
        {"precompute_ref_log_probs": False},
    ):
        assert not any(PRECOMPUTED.items() <= each.items() for each in every(**PAIRS, **words)), words
    assert every(**PAIRS, attn_implementation="flash_attention_2", dtype="bfloat16")[1] == PRECOMPUTED
    shared = PAIRS | {"defaults": replace(PAIRS["defaults"], processes=8, sharding="ddp")}
    assert {way.sharding for line in levels(space_of(**shared))[1].lines for way in line} == {"ddp"}
    assert any(way.sharding == "fsdp2" for line in levels(space_of(**shared))[2].lines for way in line)


def test_ligers_kernels_are_tried_with_each_setting_after_all_without_them() -> None:
    space = space_of()
    fused = replace(space, base=replace(space.base, use_liger_kernel=False))
    for plain, level in zip(levels(space), levels(fused), strict=True):
        both = tuple(replace(each, use_liger_kernel=on) for on in (False, True) for each in plain.settings)
        assert level.settings == both[len(both) // 2 if level.lengths else 0 :]
    pairs = levels(replace(fused, method="dpo"))
    assert not any(setting.use_liger_kernel for level in pairs for setting in level.settings)


def test_some_words_rule_levers_out_and_leave_others() -> None:
    for words, never, still in (
        ({"method": "ppo", "defaults": PPO}, {"activation_offloading", "optimizer_offload"}, {"dtype", "optim"}),
        ({"method": "grpo", "defaults": ONLINE}, {"activation_offloading"}, {"dtype", "optimizer_offload"}),
        ({"optimizer_offload": True}, {"optim"}, {"dtype"}),
        ({"forbid": frozenset({"lora"})}, {"use_peft", "load_in_4bit", "load_in_8bit"}, {"optim"}),
        ({"forbid": frozenset({"lora"}), "use_peft": True, "fit": "all"}, set(), {"load_in_4bit", "load_in_8bit"}),
        ({"dtype": "float32"}, {"dtype"}, {"use_peft", "optim"}),
        ({"forbid": frozenset({"bf16_weights"})}, {"dtype"}, {"use_peft", "optim"}),
        ({"use_peft": False}, {"load_in_4bit", "load_in_8bit"}, {"optim"}),
        ({"use_peft": True, "load_in_4bit": True}, {"load_in_8bit"}, {"dtype"}),
        ({"use_bnb_nested_quant": False}, {"use_bnb_nested_quant"}, {"load_in_4bit"}),
        ({"forbid": frozenset({"nested_quant"})}, {"use_bnb_nested_quant"}, {"load_in_4bit"}),
        *(({"optim": optim}, {"optimizer_offload", "optim"}, {"dtype"}) for optim in ("adamw_8bit", "adafactor")),
        ({"defaults": replace(TRL, optim="sgd")}, {"optim"}, {"optimizer_offload"}),
    ):
        changed = {name for setting in every(**words) for name in setting}
        assert not changed & never, words
        assert still <= changed, words


def test_whoever_asks_for_some_of_a_plans_settings_can_get_the_others() -> None:
    """A 70B model on a card of 48 GB needs scales in 8 bits and offloaded activations, whoever asked for its 4 bits."""
    for defaults in (TRL, EIGHT):

        def reached(defaults: Knobs = defaults, **asked: Any) -> list[dict[str, Any]]:
            space = replace(space_of(defaults=defaults, **asked), checkpoint_dtype="bfloat16")
            old, points = codec.to_json(defaults).items(), [each for level in levels(space) for each in level.settings]
            changed = (dict(codec.to_json(point).items() - old) for point in points)
            return [{name: each[name] for name in each if name not in ("learning_rate", "lora_r")} for each in changed]

        for point in reached():
            for size in range(1, len(point)):
                for asked in map(dict, combinations(point.items(), size)):
                    quantizes = asked.get("load_in_4bit") or asked.get("load_in_8bit")
                    if asked.get("use_peft") or not quantizes:  # weights in few bits are not trained
                        assert point in reached(**asked), (asked, point)


FIRST = ("lossless", "lossless, offloading", "rounding", "rounding, offloading")


def test_limits_pins_and_methods_end_the_levels() -> None:
    for words, expected in (
        ({"fit": "lossless"}, ["lossless", "lossless, offloading"]),
        ({"fit": "rounding"}, [*FIRST]),
        ({"use_peft": False}, [*FIRST, SHORTER_ROWS]),
        ({"forbid": frozenset({"lora"})}, [*FIRST, SHORTER_ROWS]),
        ({"forbid": frozenset({"4bit_base"})}, [*FIRST, *list(LORA)[:2], f"{list(LORA)[1]}, offloading", SHORTER_ROWS]),
        # What the user asked for is no harm: whatever comes before LoRA loses what the job loses anyway.
        ({"dtype": "bfloat16"}, [*FIRST, *LORA, SHORTER_ROWS]),
        # Nothing is lost by a larger step, by an optimizer that sums up what is lost, or by float32.
        ({"learning_rate": 1e-4}, [*FIRST, *LORA, SHORTER_ROWS]),
        ({"optim": "stable_adamw"}, [*FIRST, *LORA, SHORTER_ROWS]),
        ({"dtype": "float32"}, [*FIRST, *LORA, SHORTER_ROWS]),
        ({"method": "grpo", "defaults": ONLINE}, [*FIRST, *list(LORA)[:3]]),  # no prompt is cut
        (
            {"dtype": "float32", "optim": "adamw_torch", "use_peft": False, "max_length": 512}
            | {"activation_offloading": False, "optimizer_offload": True},
            ["lossless"],
        ),
    ):
        assert names(**words) == expected, words


def test_fp16_keeps_the_dtype_of_what_is_trained_and_a_quantized_checkpoint_its_bits() -> None:
    """The scaler takes no gradients in half precision; a frozen base has none."""
    changed = [setting for setting in every(fp16=True) if "dtype" in setting]
    assert changed
    assert all(setting["use_peft"] and setting["dtype"] == "float16" for setting in changed)
    for known in (False, True):
        settings = [level.settings[-1] for level in levels(replace(space_of(use_peft=True), is_quantized=known))]
        assert any(setting.base_bits for setting in settings) is not known


def test_lengths_that_cut_a_row_and_drop_not_every_pair_are_tried_coarser_from_256_tokens() -> None:
    assert levels(space_of(longest=400))[-1].lengths == (*range(64, 256, 16), 256, 320, 384)
    assert SHORTER_ROWS not in names(longest=64)
    assert SHORTER_ROWS in names(longest=65)
    floored = levels(replace(space_of(method="reward", longest=512), least_length=300))[-1].lengths
    assert floored == (320, 384, 448)


def test_lengths_are_tried_with_the_levers_that_leave_least_even_where_a_gentler_level_came_last() -> None:
    *climbed, cut = levels(space_of())
    assert strongest(climbed).name == "QLoRA, offloading"
    assert cut.settings[-1] == replace(strongest(climbed).settings[-1], lora_r=8)
    *_, below, cut = levels(space_of(use_peft=False, dtype="float32", longest=512))
    assert below.settings[-1].optim == "adamw_8bit"
    assert cut.settings[-1].optimizer_offload


def test_every_setting_is_tried_at_all_batches_and_checkpointing_that_the_job_allows() -> None:
    for words, checkpointing, rows in (
        ({"effective_batch_size": 12}, {False, True}, [1, 2, 3, 4, 6, 12]),
        ({"effective_batch_size": 12, "forbid": frozenset({"micro_batch"})}, {False, True}, [6, 12]),
        ({"forbid": frozenset({"gradient_checkpointing"})}, {False}, [1, 2, 4, 8]),
        ({"gradient_checkpointing": True}, {True}, [1, 2, 4, 8]),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, {False, True}, [4]),
    ):
        space = space_of(**words)
        for level in levels(space):
            found = level.lines
            assert len(found) == len(level.settings) * len(checkpointing), words
            assert {knobs.gradient_checkpointing for line in found for knobs in line} == checkpointing, words
            assert all([knobs.per_device_train_batch_size for knobs in line] == rows for line in found), words
            assert {knobs.effective_batch_size for line in found for knobs in line} == {space.effective_batch_size}


LEAST = ("fsdp2", "hsdp", "fsdp2-no-reshard", "ddp")
PLAIN = [("ddp", None), ("fsdp2-no-reshard", None), ("fsdp2", None)]


def test_each_setting_is_shared_in_the_ways_that_go_with_it_and_the_least_demanding_has_the_smallest_shards() -> None:
    for name, words, expected in (
        ("lossless", {}, PLAIN),
        ("lossless", {"nodes": 2}, [*PLAIN, ("hsdp", 2)]),
        ("lossless", {"forbid": frozenset({"sharding"})}, PLAIN[:1]),
        ("lossless", {"sharding": "hsdp", "nodes": 4}, [("hsdp", 4)]),
        ("lossless", {"use_vllm": True}, PLAIN),
        ("lossless", {"optim": "paged_adamw_32bit"}, PLAIN[:1]),
        ("lossless", {"method": "ppo", "defaults": replace(PPO, processes=8, sharding="ddp")}, PLAIN[:1]),
        # What is trained is float32 under FSDP, and bitsandbytes' optimizer takes whole parameters.
        ("rounding", {"learning_rate": 1e-4}, PLAIN[:1] * 4),
        ("LoRA", {}, PLAIN),
        ("LoRA on an 8-bit base", {}, PLAIN[:1]),
        ("QLoRA", {}, PLAIN),
        ("QLoRA, offloading", {}, [PLAIN[0], PLAIN[2]]),
    ):
        nodes = words.pop("nodes", 1)
        space = replace(space_of(**{"defaults": EIGHT, **words}), nodes=nodes)
        level = next(level for level in levels(space) if level.name == name)
        first = [line[0] for line in level.lines if line[0].gradient_checkpointing]
        assert level.least.sharding == min((knobs.sharding for knobs in first), key=LEAST.index)
        assert [(knobs.sharding, knobs.dp_replicate_size) for knobs in first] == expected, (name, words)


def test_shards_are_offloaded_where_there_are_some_and_whole_parameters_where_there_are_none() -> None:
    space = space_of(defaults=EIGHT)
    level = next(level for level in levels(space) if level.name == "lossless, offloading")
    names = ("activation_offloading", "optimizer_offload", "fsdp_offload_params")
    offloaded = [(line[0].sharding, *(getattr(line[0], name) for name in names)) for line in level.lines]
    whole = [("ddp", *pulled) for pulled in ((True, False, False), (False, True, False), (True, True, False))]
    assert list(dict.fromkeys(offloaded)) == [*whole, ("fsdp2", False, False, True)]
    assert level.least.fsdp_offload_params
    cut = levels(space_of(defaults=EIGHT, forbid=frozenset({"lora"}), longest=2048))[-1]
    assert cut.settings[-1].fsdp_offload_params
    assert not any(line[0].fsdp_offload_params for line in levels(space_of())[1].lines)
