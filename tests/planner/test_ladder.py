from dataclasses import replace

import pytest
from synthetic_memory import TRL, space_of

from autotrain_mem.errors import UsageError
from autotrain_mem.planner.ladder import LADDER, LEVERS, Rung, check_forbid, rungs
from autotrain_mem.spec import Harm, Knobs
from autotrain_mem.spec.job import METHODS

QUANTIZED = {"use_peft": True, "load_in_4bit": True}
ONLINE = replace(TRL, max_length=None, max_completion_length=64, num_generations=8)
PPO = replace(TRL, max_length=None, response_length=53, local_rollout_forward_batch_size=64)


def harms(**words: object) -> list[Harm]:
    return [rung.harm for rung in rungs(space_of(**words))]  # type: ignore[arg-type]


def rung_of(harm: Harm, **words: object) -> Rung:
    return next(rung for rung in rungs(space_of(**words)) if rung.harm is harm)  # type: ignore[arg-type]


def moved(rung: Rung, base: Knobs) -> dict[str, object]:
    """What the strongest setting of a rung changes."""
    new, old = rung.strongest.to_json(), base.to_json()
    return {name: value for name, value in new.items() if value != old.get(name)}


def climbed(**words: object) -> list[dict[str, object]]:
    """The rungs after the first, lengths left out."""
    space = space_of(**words)  # type: ignore[arg-type]
    first, *rest = rungs(space)
    assert first.settings == (space.base,)
    return [moved(rung, space.base) for rung in rest if not rung.lengths]


OFFLOADED = {"activation_offloading": True, "optimizer_offload": True}
ADAPTER = {"use_peft": True, "dtype": "bfloat16"}
FOUR_BIT = ADAPTER | {"load_in_4bit": True, "use_bnb_nested_quant": True}


def test_table_is_in_the_order_of_harm() -> None:
    assert [row.harm for row in LADDER] == sorted(row.harm for row in LADDER)


def test_table_moves_only_knobs_that_exist() -> None:
    assert all(hasattr(TRL, knob) for row in LADDER for knob in (*row.knobs, *row.also, *row.needs))


def test_levers_pulled_along_do_no_more_harm_than_the_one_that_pulls() -> None:
    assert all(LEVERS[name].harm <= row.harm for row in LADDER for name in row.along)


def test_ladder_climbs_from_time_to_data() -> None:
    assert climbed() == [
        OFFLOADED,
        {"dtype": "bfloat16", "optim": "adamw_8bit"},
        {"dtype": "bfloat16", **OFFLOADED},
        ADAPTER,
        ADAPTER | {"load_in_8bit": True},
        FOUR_BIT,
        FOUR_BIT | {"activation_offloading": True},
    ]
    assert harms() == sorted(harms())
    assert harms()[-1] is Harm.DATA


def test_lossless_stops_before_rounding() -> None:
    assert climbed(fit="lossless") == [OFFLOADED]
    assert set(harms(fit="lossless")) == {Harm.TIME}


def test_rounding_stops_before_lora() -> None:
    assert max(harms(fit="rounding")) is Harm.ROUNDING


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_methods_that_sample_offload_no_activations_and_cut_no_rows(method: str) -> None:
    rounded, adapter = {"dtype": "bfloat16", "optim": "adamw_8bit"}, ADAPTER
    assert climbed(method=method, defaults=ONLINE) == [
        {"optimizer_offload": True},
        rounded,
        {"dtype": "bfloat16", "optimizer_offload": True},
        adapter,
        adapter | {"load_in_8bit": True},
        FOUR_BIT,
    ]
    assert max(harms(method=method, defaults=ONLINE)) is Harm.WHAT_IS_TRAINED


def test_ppo_offloads_nothing() -> None:
    made = climbed(method="ppo", defaults=PPO)
    assert made[0] == {"dtype": "bfloat16", "optim": "adamw_8bit"}
    assert not [rung for rung in made if "activation_offloading" in rung or "optimizer_offload" in rung]


@pytest.mark.parametrize("method", METHODS)
def test_a_lever_is_pulled_only_where_its_method_has_it(method: str) -> None:
    defaults = {"ppo": PPO, "grpo": ONLINE, "rloo": ONLINE}.get(method, TRL)
    for changed in climbed(method=method, defaults=defaults):
        pulled = [row for row in LADDER if row.knobs[0] in changed]
        assert pulled
        assert all(method in row.methods for row in pulled)


def test_a_forbidden_lora_strikes_the_quantized_bases_too() -> None:
    assert not [rung for rung in climbed(forbid=frozenset({"lora"})) if "use_peft" in rung or "load_in_4bit" in rung]


def test_a_forbidden_lora_that_the_user_asked_for_leaves_the_quantized_bases() -> None:
    words = {"forbid": frozenset({"lora"}), "use_peft": True, "fit": "all"}
    assert [rung for rung in climbed(**words) if rung.get("load_in_4bit")]
    assert [rung for rung in climbed(**words) if rung.get("load_in_8bit")]


def test_a_full_fine_tuning_that_was_asked_for_is_never_quantized() -> None:
    assert not [rung for rung in climbed(use_peft=False) if "load_in_4bit" in rung or "load_in_8bit" in rung]


def test_a_4bit_base_that_was_asked_for_is_never_given_8_bits() -> None:
    assert not [rung for rung in climbed(**QUANTIZED) if "load_in_8bit" in rung]


def test_an_8bit_base_that_was_asked_for_is_never_given_4_bits() -> None:
    assert not [rung for rung in climbed(use_peft=True, load_in_8bit=True) if "load_in_4bit" in rung]


def test_double_quantization_that_was_refused_stays_off_under_4_bits() -> None:
    four_bit = [rung for rung in climbed(use_bnb_nested_quant=False) if "load_in_4bit" in rung]
    assert four_bit
    assert not [rung for rung in four_bit if "use_bnb_nested_quant" in rung]


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_8bit", "adafactor", "lion_8bit"])
def test_an_optimizer_that_cannot_run_on_the_host_is_not_offloaded(optim: str) -> None:
    assert not [rung for rung in climbed(optim=optim) if "optimizer_offload" in rung]


def test_an_8bit_optimizer_is_not_offloaded_and_an_offloaded_one_not_rounded() -> None:
    every = [knobs for rung in rungs(space_of()) for knobs in rung.settings]
    assert not [knobs for knobs in every if knobs.optimizer_offload and knobs.optim == "adamw_8bit"]


def test_no_setting_is_on_two_rungs() -> None:
    every = [knobs for rung in rungs(space_of()) if not rung.lengths for knobs in rung.settings]
    assert len(every) == len(set(every))


def test_fp16_keeps_the_dtype_of_the_weights() -> None:
    assert not [rung for rung in climbed(fp16=True) if "dtype" in rung]
    assert [rung for rung in climbed(fp16=False) if "dtype" in rung]


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
    space = space_of(defaults=TRL.from_json(TRL.to_json() | {"optim": "sgd"}))
    assert {knobs.optim for rung in rungs(space) for knobs in rung.settings} == {"sgd"}


def test_data_rung_pulls_everything_below_it() -> None:
    *_, below, cut = rungs(space_of())
    assert cut.lengths
    assert cut.strongest == below.strongest


def test_lengths_are_coarser_from_256_tokens() -> None:
    lengths = rung_of(Harm.DATA, longest=400).lengths
    assert lengths == (*range(64, 256, 16), 256, 320, 384)


def test_lengths_that_would_cut_no_row_are_not_tried() -> None:
    assert harms(longest=64)[-1] is Harm.WHAT_IS_TRAINED


def test_pinned_knobs_take_their_levers_off_the_ladder() -> None:
    pinned = {"dtype": "float32", "optim": "adamw_torch", "use_peft": False, "max_length": 512}
    offloading = {"activation_offloading": False, "optimizer_offload": True}
    assert harms(**pinned, **offloading) == [Harm.TIME]


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


def test_a_checkpoint_that_is_quantized_is_not_quantized_again() -> None:
    space = space_of(use_peft=True)
    plain, quantized = (rungs(replace(space, is_quantized=known)) for known in (False, True))
    assert any(rung.strongest.load_in_4bit for rung in plain)
    assert not any(rung.strongest.load_in_4bit or rung.strongest.load_in_8bit for rung in quantized)


def test_no_length_is_tried_that_would_drop_every_pair_of_a_reward_job() -> None:
    space = space_of(method="reward", longest=512)
    lengths = {floor: rungs(replace(space, shortest=floor))[-1].lengths for floor in (None, 300)}
    assert min(lengths[None]) < 300 <= min(lengths[300])
    assert set(lengths[300]) < set(lengths[None])


def test_lengths_are_tried_with_the_levers_that_leave_least_even_where_a_gentler_rung_came_last() -> None:
    space = space_of(use_peft=False, dtype="float32", longest=512)
    assert rungs(space)[-2].strongest.optim == "adamw_8bit"
    assert rungs(space)[-1].strongest.optimizer_offload
