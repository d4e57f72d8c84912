"""A rehearsal against the same training for real: the same allocations, in the same order, with the same bytes.

Here each trainer meets an adapter, and those that then hold other models or weights one other kind too; models and
checkpointing go round. ``scripts/parity`` runs all combinations.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_run import (
    COMPLETION,
    LENGTH,
    OF_METHOD,
    SMALL,
    VARIANTS,
    Folder,
    assert_alike,
    births,
    case,
    difference,
    first_difference,
    peaks,
    rehearsed,
    trained,
)
from tiny import FAMILIES

from autotrain_mem.rehearsal.vllm_stub import vllm_stand_in
from autotrain_mem.settings.adapter_config import canonical
from autotrain_mem.settings.optimizer_verdicts import PACKAGES, is_projecting
from autotrain_mem.types import Owner, Phase, Trace
from autotrain_mem.types.trace import CACHE_EMPTIED

pytestmark = pytest.mark.slow

HAS_PPO = importlib.util.find_spec("trl.experimental.ppo") is not None
NEEDS_PPO = pytest.mark.skipif(not HAS_PPO, reason="TRL 1.13 and later have no PPO")
Combination = tuple[str, str, str, bool]


BESIDE_LORA = {"sft": "8-bit", "reward": "full", "dpo": "full", "kto": "full", "online_dpo": "4-bit", "gkd": "full"}
"""Reference models, which an adapter makes needless, and weights that a trainer prepares by itself."""


def combinations() -> list[Combination]:
    return [
        (method, variant, FAMILIES[(row + column) % len(FAMILIES)], (row + column) % 2 == 0)
        for row, method in enumerate(OF_METHOD)
        for column, variant in enumerate(("lora", BESIDE_LORA.get(method)))
        if variant
    ]


def marks(one: Combination) -> list[pytest.MarkDecorator]:
    """On the newest TRL too: each trainer that it has with an adapter, and the reward model's without."""
    method, variant, _, _ = one
    if method == "ppo":
        return [NEEDS_PPO]
    return [pytest.mark.newest] if variant == ("full" if method == "reward" else "lora") else []


@pytest.mark.parametrize(
    ("method", "variant", "family", "checkpointing"),
    [pytest.param(*one, id="-".join(map(str, one)), marks=marks(one)) for one in combinations()],
)
def test_a_rehearsal_allocates_what_the_real_run_allocates(
    method: str, variant: str, family: str, checkpointing: bool, model_folder: Folder, tmp_path: Path
) -> None:
    one = case(method, model_folder(family), gradient_checkpointing=checkpointing, **VARIANTS[variant])
    assert_alike(one, tmp_path)


def test_the_newest_trl_is_rehearsed_with_all_its_trainers() -> None:
    assert {one[0] for one in combinations() if pytest.mark.newest in marks(one)} == set(OF_METHOD) - {"ppo"}


EVALUATED = {"eval_strategy": "steps", "per_device_eval_batch_size": 2}


def recomputed(**options: Any) -> dict[str, Any]:
    return {"gradient_checkpointing_kwargs": {"use_reentrant": False, **options}}


NF4 = {"use_peft": True, "load_in_4bit": True, "dtype": "bfloat16"}
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "packed-bfd": ("sft", {"packing_strategy": "bfd"}, {"packing": True}),
    "packed-wrapped": ("sft", {"packing_strategy": "wrapped"}, {"packing": True}),
    "dropout": ("sft", {"lora_dropout": 0.1, "lora_target_modules": "all-linear"}, {"use_peft": True}),
    "bf16-weights": ("sft", {}, {"dtype": "bfloat16"}),
    "no-mixed-precision": ("sft", {"bf16": False}, {}),
    "whole-logits": ("sft", {"loss_type": "nll"}, {}),
    "eager": ("sft", {"attn_implementation": "eager"}, {}),
    "4-bit-nested": ("sft", {"use_bnb_nested_quant": True}, {**NF4, "dtype": "float32"}),
    "4-bit-storage": ("sft", {"bnb_4bit_quant_storage": "bfloat16"}, {**NF4, "gradient_checkpointing": False}),
    "fp4": ("sft", {"bnb_4bit_quant_type": "fp4", "bf16": False}, NF4),
    "8-bit-optimizer": ("sft", {}, {"use_peft": True, "load_in_8bit": True, "optim": "adamw_8bit"}),
    "every-second-layer": ("sft", recomputed(every_n_layers=2), {"use_peft": True}),
    "kept-on-the-host": ("sft", recomputed(offload=True), {"use_peft": True}),
    "one-row": ("sft", {}, {"per_device_train_batch_size": 1}),
    "dpo-precomputed": ("dpo", {"precompute_ref_log_probs": True}, {}),
    "kto-precomputed": ("kto", {"precompute_ref_log_probs": True}, {}),
    "kto-one-row": ("kto", {"loss_type": "apo_zero_unpaired"}, {"per_device_train_batch_size": 1}),
    "grpo-reference": ("grpo", {"beta": 0.1}, {}),
    "grpo-adapter-off-twice": ("grpo", {"beta": 0.1, "num_iterations": 2}, {"use_peft": True}),
    "rloo-many-micro-steps": ("rloo", {}, {"gradient_accumulation_steps": 4, "num_generations": 4}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_further_settings_are_rehearsed_as_they_run(name: str, model_folder: Folder, tmp_path: Path) -> None:
    method, arguments, knobs = SETTINGS[name]
    assert_alike(case(method, model_folder("qwen2"), arguments, **knobs), tmp_path)


FLASH = "flash_attention_2"
ATTENTION: dict[str, tuple[tuple[int, int], str | None, dict[str, Any]]] = {
    # card, attention by name, and what is chosen beside: one row has no padding
    "t4-kept": ((7, 5), None, {"gradient_checkpointing": False}),
    "h100-kept": ((9, 0), None, {"gradient_checkpointing": False}),
    "flash": ((9, 0), FLASH, {}),
    "flash-one-row": ((9, 0), FLASH, {"gradient_checkpointing": False, "per_device_train_batch_size": 1}),
    "flash-on-the-hub": ((9, 0), "kernels-community/flash-attn2", {"gradient_checkpointing": False}),
    "flash-3-one-row": ((9, 0), "flash_attention_3", {"per_device_train_batch_size": 1}),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_rehearsed_as_it_runs_on_each_card_and_by_each_name(
    name: str, model_folder: Folder, tmp_path: Path
) -> None:
    card, implementation, knobs = ATTENTION[name]
    one = case("sft", model_folder("llama"), {"attn_implementation": implementation}, **knobs)
    assert_alike(one, tmp_path, compute_capability=card)


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_an_evaluation_is_rehearsed_with_its_own_peak(method: str, model_folder: Folder, tmp_path: Path) -> None:
    """What an evaluation generates belongs to it; the two generations are those of the two steps."""
    one = case(method, model_folder("qwen2"), EVALUATED, use_peft=method == "grpo")
    fake, real, _ = assert_alike(one, tmp_path)
    assert peaks(fake)["evaluate"] == peaks(real)["evaluate"] > 0
    for trace in (fake, real):
        begun = [phase for _, phase in trace.phase_starts]
        assert begun.count(Phase.GENERATE) == (2 if method == "grpo" else 0)


def test_a_mixture_of_experts_is_rehearsed_as_it_samples_and_trains(model_folder: Folder, tmp_path: Path) -> None:
    assert_alike(case("grpo", model_folder("mixtral"), use_peft=True), tmp_path)


def test_a_reward_model_reads_prompt_and_completion(model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder("qwen2")
    one = case("grpo", folder, {"reward_model_name_or_path": str(folder)}, use_peft=True)
    fake, _, _ = assert_alike(one, tmp_path)
    names = {block.module for block in fake.blocks if block.owner is Owner.WEIGHTS}
    assert "reward_model.score.weight" in names
    rows, hidden, longest = 4, 64, LENGTH - 1  # a short prompt with the full completion, or the other way round
    read = {size for phase, _, size, module in births(fake) if module == "reward_model.model.embed_tokens"}
    assert rows * longest * hidden * 4 in read


def test_an_emptied_cache_is_in_the_trace_before_the_backward_pass(model_folder: Folder, tmp_path: Path) -> None:
    """transformers empties in each micro-step of every n-th step (``torch_empty_cache_steps``); its evaluation is kept
    from it."""
    evaluates = {**EVALUATED, "eval_accumulation_steps": 1}
    one = case("sft", model_folder("qwen2"), {"torch_empty_cache_steps": 1, **evaluates})
    fake, (real, _) = rehearsed(one), trained(one, tmp_path)
    # Peaks are 8 bytes apart: on a CPU the losses that go to numpy stay where they are.
    assert not first_difference(fake, real, (Phase.SAVE,))
    emptied = [[phase for phase, event in phases(trace) if event == CACHE_EMPTIED] for trace in (fake, real)]
    assert emptied[0] == emptied[1]
    assert emptied[0].count(Phase.FORWARD) == 4
    assert not {Phase.BACKWARD, Phase.EVALUATE} & {*emptied[0]}


def phases(trace: Trace) -> Iterator[tuple[Phase, int]]:
    """Every event, with its phase."""
    starts, phase = dict(trace.phase_starts), Phase.LOAD
    for index, event in enumerate(trace.events):
        phase = starts.get(index, phase)
        yield phase, event


def test_sampled_completions_carry_a_mask_even_of_a_single_prompt(model_folder: Folder, tmp_path: Path) -> None:
    """As nearly every real batch does: completions end at different tokens."""
    one = case("grpo", model_folder("qwen2"), per_device_train_batch_size=4, num_generations=8, use_peft=True)
    trace, _, _ = assert_alike(one, tmp_path)
    forward = [size for phase, _, size, _ in births(trace) if phase == Phase.FORWARD.value]
    assert forward.count(4 * LENGTH * LENGTH) >= 4, "a boolean mask for each row of each of four micro-batches"


TARGETS = {"optim_target_modules": ["q_proj", "down_proj"]}
INSTALLED = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package)]


@pytest.mark.parametrize("name", ["adafactor", "ademamix_8bit", *INSTALLED])
def test_an_optimizer_is_rehearsed_to_the_byte(name: str, model_folder: Folder, tmp_path: Path) -> None:
    one = case("sft", model_folder("llama"), TARGETS if is_projecting(name) else {}, optim=name)
    fake, (real, _) = rehearsed(one), trained(one, tmp_path)
    if name == "apollo_adamw":  # a value decides between a number and a tensor of one element
        assert peaks(fake) == peaks(real)
    else:
        assert not difference(one, fake, real)


LAYERS = ["q_proj", "v_proj", "down_proj"]
LORA = {"peft_type": "LORA", "r": 8, "target_modules": LAYERS}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DoRA": ({**LORA, "use_dora": True}, {}),
    "DoRA on 4 bits": ({**LORA, "use_dora": True}, {"load_in_4bit": True, "gradient_checkpointing": False}),
    "PiSSA": ({**LORA, "init_lora_weights": "pissa"}, {"gradient_checkpointing": False}),
    "AdaLoRA": ({"peft_type": "ADALORA", "target_modules": LAYERS, "total_step": 9, "tinit": 1, "tfinal": 1}, {}),
    "IA3": ({"peft_type": "IA3", "target_modules": LAYERS, "feedforward_modules": ["down_proj"]}, {}),
    "VeRA": ({"peft_type": "VERA", "r": 8, "target_modules": ["q_proj", "o_proj"]}, {"gradient_checkpointing": False}),
    "LoKr": ({"peft_type": "LOKR", "r": 8, "target_modules": LAYERS}, {}),
    "OFT on 4 bits": ({"peft_type": "OFT", "oft_block_size": 16, "target_modules": LAYERS}, {"load_in_4bit": True}),
    "BOFT": ({"peft_type": "BOFT", "boft_block_size": 4, "target_modules": ["q_proj"]}, {}),
    "prompt tuning": ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 7}, {}),
    "prefix tuning": ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 7}, {"gradient_checkpointing": False}),
}
"""Kind -> its config, and what else is chosen."""


def adapted(folder: Path | str, content: dict[str, Any], **knobs: Any) -> Any:
    return case("sft", folder, use_peft=True, peft_config=canonical(content), **knobs)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_rehearsed_to_the_byte(kind: str, model_folder: Folder, tmp_path: Path) -> None:
    content, knobs = KINDS[kind]
    _, _, trainer = assert_alike(adapted(model_folder("llama"), content, **knobs), tmp_path)
    assert trainer.model.peft_config["default"].peft_type.value == content["peft_type"]


ROWS = SMALL.effective_batch_size
KV_HEADS, HEAD_SIZE, MODEL_LAYERS = 2, 16, 2


@pytest.mark.parametrize(("method", "mode"), [("grpo", "colocate"), ("rloo", "server")])
def test_what_vllm_generated_is_scored_and_trained_on_alike(
    method: str, mode: str, model_folder: Folder, tmp_path: Path
) -> None:
    one = case(method, model_folder("qwen2"), {"use_vllm": True, "vllm_mode": mode}, use_peft=True)
    fake = rehearsed(one)
    with vllm_stand_in():
        real, _ = trained(one, tmp_path / "real")
    assert not difference(one, fake, real)
    assert {"generate", "score", "forward", "backward", "optimizer_step"} <= set(peaks(real))


@pytest.fixture(scope="module")
def full(model_folder: Folder) -> Trace:
    """A rehearsal with a reference model."""
    return rehearsed(case("grpo", model_folder("qwen2"), {"beta": 0.1}))


def test_the_reference_is_weights_with_names_of_its_own_and_scores(full: Trace) -> None:
    names = [block.module for block in full.blocks if block.owner is Owner.WEIGHTS]
    assert {"model.norm.weight", "ref_model.model.norm.weight"} <= {*names}
    scoring = {block.module for phase, _, block in full.walk() if phase is Phase.SCORE}
    assert "ref_model.model.layers.1.mlp.down_proj" in scoring


def test_the_kv_cache_is_told_from_what_else_generates(full: Trace) -> None:
    """At the last step it holds, per layer, keys and values of all tokens but the one that is being made."""
    sizes = [block.size_bytes for block in full.blocks if block.owner is Owner.KV_CACHE]
    largest = ROWS * KV_HEADS * HEAD_SIZE * 4 * (LENGTH - 1)
    generations = 2
    assert COMPLETION > 2, "a last step that is not the first"
    assert max(sizes) == largest
    assert sizes.count(largest) == generations * MODEL_LAYERS * 2
    assert {phase for phase, sign, block in full.walk() if sign > 0 and block.owner is Owner.KV_CACHE} == {
        Phase.GENERATE
    }


def test_phases_come_in_the_order_of_a_step(full: Trace) -> None:
    order = [phase.value for _, phase in full.phase_starts]
    micro_step = ["forward", "backward", "optimizer_step"]
    assert order == ["load", *(["score", "generate", "score", *micro_step, *micro_step] * 2), "save"]
