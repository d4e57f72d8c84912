"""A rehearsal against the same training for real: the same allocations, in the same order, with the same bytes.

Here each trainer meets an adapter, and those that then hold other models or weights one other kind too; models and
checkpointing go round; then settings, whichever way GKD's steps go, and whatever judges online DPO.
``scripts/parity`` runs all combinations.
"""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import real_run
import torch
from real_run import LENGTH, VARIANTS, Folder, assert_alike, births, case, difference, peak, peaks, rehearsed, trained
from tiny import FAMILIES, pack_in_mxfp4, tiny_folder

from autotrain_mem.rehearsal import rehearse
from autotrain_mem.rehearsal import routing as experts
from autotrain_mem.rehearsal.known_values import real_tensors
from autotrain_mem.rehearsal.vllm_stub import vllm_stand_in
from autotrain_mem.settings.adapter_config import canonical
from autotrain_mem.settings.optimizer_verdicts import PACKAGES, is_projecting
from autotrain_mem.types import CACHE_EMPTIED, Owner, Phase, Routing, Trace

pytestmark = pytest.mark.slow

HAS_PPO = importlib.util.find_spec("trl.experimental.ppo") is not None
Combination = tuple[str, str, str, bool]

BESIDE_LORA = {"reward": "full", "dpo": "full", "kto": "full", "online_dpo": "4-bit"}
"""Reference models, which an adapter makes needless, and weights that a trainer prepares by itself."""


def combinations() -> list[Combination]:
    return [
        (method, variant, FAMILIES[(row + column) % len(FAMILIES)], (row + column) % 2 == 0)
        for row, method in enumerate(real_run.OF_METHOD)
        for column, variant in enumerate(("lora", BESIDE_LORA.get(method)))
        if variant
    ]


def marks(one: Combination) -> list[pytest.MarkDecorator]:
    """On the newest TRL too: each trainer that it has with an adapter, and the reward model's without."""
    method, variant, _, _ = one
    if method == "ppo":
        return [pytest.mark.skipif(not HAS_PPO, reason="TRL 1.13 and later have no PPO")]
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
    assert {one[0] for one in combinations() if pytest.mark.newest in marks(one)} == set(real_run.OF_METHOD) - {"ppo"}


EVALUATED = {"eval_strategy": "steps", "per_device_eval_batch_size": 2}


def recomputed(**options: Any) -> dict[str, Any]:
    return {"gradient_checkpointing_kwargs": {"use_reentrant": False, **options}}


DROPOUT = {"lora_dropout": 0.1, "lora_target_modules": "all-linear"}
NESTED = {"use_bnb_nested_quant": True, "bnb_4bit_quant_storage": "bfloat16"}
NF4 = {**VARIANTS["4-bit"], "dtype": "bfloat16"}
FLASH = "flash_attention_2"
EXPERTS = {"lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "lora_dropout": 0.0}
T4, H100 = (7, 5), (9, 0)
WHOLE = {"gradient_checkpointing": False}
ONE_ROW = {"per_device_train_batch_size": 1}
Setting = tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]


def setting(
    method: str, arguments: dict[str, Any] | None = None, family: str = "qwen2", card: Any = None, **knobs: Any
) -> Setting:
    return method, family, arguments or {}, {"compute_capability": card} if card else {}, knobs


def attention(name: str | None, card: tuple[int, int], **knobs: Any) -> Setting:
    return setting("sft", {"attn_implementation": name}, "llama", card, **knobs)


def mixture(family: str, arguments: dict[str, Any] | None = None, **knobs: Any) -> Setting:
    """TRL adds the loss of the routers by itself; PEFT's copy of all experts of a layer is among the births."""
    return setting("sft", arguments, family, H100, **knobs)


SETTINGS: dict[str, Setting] = {
    "packed-bfd-bf16-weights": setting("sft", {"packing_strategy": "bfd"}, packing=True, dtype="bfloat16"),
    "packed-wrapped-no-mixed-precision": setting("sft", {"packing_strategy": "wrapped", "bf16": False}, packing=True),
    "whole-logits-eager": setting("sft", {"loss_type": "nll", "attn_implementation": "eager"}),
    "4-bit-nested-storage": setting("sft", NESTED, **NF4, **WHOLE),
    "fp4": setting("sft", {"bnb_4bit_quant_type": "fp4", "bf16": False}, **NF4),
    "8-bit-optimizer": setting("sft", **VARIANTS["8-bit"], **WHOLE, optim="adamw_8bit"),
    "dropout-every-second-layer": setting("sft", {**DROPOUT, **recomputed(every_n_layers=2)}, use_peft=True),
    "kept-on-the-host-one-row": setting("sft", recomputed(offload=True), **ONE_ROW, use_peft=True),
    "activations-offloaded": setting("sft", activation_offloading=True, **WHOLE),
    "activations-of-checkpoints-offloaded": setting("sft", activation_offloading=True, use_peft=True),
    "optimizer-offloaded": setting("sft", optimizer_offload=True, optim="adamw_torch"),
    "optimizer-offloaded-from-bfloat16": setting("sft", optimizer_offload=True, dtype="bfloat16"),
    "kahan-sum": setting("sft", optim="stable_adamw", dtype="bfloat16"),
    "kahan-sum-of-an-adapter": setting("sft", **VARIANTS["lora"], optim="stable_adamw"),
    "optimizer-that-starts-with-state-offloaded": setting("sft", optimizer_offload=True, optim="adagrad"),
    "evaluated": setting("sft", EVALUATED),
    "dpo-precomputed": setting("dpo", {"precompute_ref_log_probs": True}),
    "kto-precomputed": setting("kto", {"precompute_ref_log_probs": True}),
    "kto-one-row": setting("kto", {"loss_type": "apo_zero_unpaired"}, **ONE_ROW),
    "grpo-reference": setting("grpo", {"beta": 0.1}),
    "rloo-many-micro-steps": setting("rloo", gradient_accumulation_steps=4, num_generations=4),
    "t4-kept": attention(None, T4, **WHOLE),
    "h100-kept": attention(None, H100, **WHOLE),
    "flash": attention(FLASH, H100),
    "flash-one-row-without-padding": attention(FLASH, H100, **WHOLE, **ONE_ROW),
    "flash-on-the-hub": attention("kernels-community/flash-attn2", H100, **WHOLE),
    "flash-3-one-row": attention("flash_attention_3", H100, **ONE_ROW),
    "oss-attention": mixture("gpt_oss", **WHOLE, dtype="bfloat16", use_peft=True),
    "oss-experts": mixture("gpt_oss", EXPERTS, dtype="bfloat16", use_peft=True),
    "oss-experts-float32": mixture("gpt_oss", EXPERTS, **WHOLE, use_peft=True),
    "qwen-experts-float32": mixture("qwen3_moe", EXPERTS, use_peft=True),
    "mixtral-full": mixture("mixtral", dtype="bfloat16"),
    "mixtral-full-float32": mixture("mixtral", **WHOLE),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_further_settings_are_rehearsed_as_they_run(name: str, model_folder: Folder, tmp_path: Path) -> None:
    method, family, arguments, card, knobs = SETTINGS[name]
    assert_alike(case(method, model_folder(family), arguments, **knobs), tmp_path, **card)


def test_a_mixture_samples_trains_and_is_evaluated_and_a_reward_model_reads_prompt_and_completion(
    model_folder: Folder, tmp_path: Path
) -> None:
    """What an evaluation generates belongs to it; the two generations are those of the two steps."""
    arguments = {"reward_model_name_or_path": str(model_folder("qwen2")), **EVALUATED}
    one = case("grpo", model_folder("mixtral"), arguments, use_peft=True)
    fake, real, _ = assert_alike(one, tmp_path)
    assert peaks(fake)["evaluate"] == peaks(real)["evaluate"] > 0
    for trace in (fake, real):
        assert [phase for _, phase in trace.phase_starts].count(Phase.GENERATE) == 2
    names = {block.module for block in fake.blocks if block.owner is Owner.WEIGHTS}
    assert "reward_model.score.weight" in names
    rows, hidden, longest = 4, 64, LENGTH - 1  # a short prompt with the full completion, or the other way round
    read = {size for phase, _, size, _, module in births(fake) if module == "reward_model.model.embed_tokens"}
    assert rows * longest * hidden * 4 in read


def emptied_in(trace: Trace) -> list[Phase]:
    """The phase of every time that the cache was emptied."""
    at = [index for index, event in enumerate(trace.events) if event == CACHE_EMPTIED]
    return [[phase for start, phase in trace.phase_starts if start <= index][-1] for index in at]


def test_an_emptied_cache_is_in_the_trace_before_the_backward_pass(qwen: Path, tmp_path: Path) -> None:
    """transformers empties in each micro-step of every n-th step (``torch_empty_cache_steps``); its evaluation is kept
    from it."""
    evaluates = {**EVALUATED, "eval_accumulation_steps": 1}
    one = case("sft", qwen, {"torch_empty_cache_steps": 1, **evaluates})
    fake, (real, _) = rehearsed(one), trained(one, tmp_path)
    # Peaks are 8 bytes apart: on a CPU the losses that go to numpy stay where they are.
    assert not real_run.first_difference(fake, real, (Phase.SAVE,))
    emptied = [emptied_in(trace) for trace in (fake, real)]
    assert emptied[0] == emptied[1]
    assert emptied[0].count(Phase.FORWARD) == 4
    assert not {Phase.BACKWARD, Phase.EVALUATE} & {*emptied[0]}
    assert peaks(fake)["evaluate"] > 0


def test_sampled_completions_carry_a_mask_even_of_a_single_prompt(qwen: Path, tmp_path: Path) -> None:
    """As nearly every real batch does: completions end at different tokens. The adapter is off twice, to compare."""
    of_one_prompt = {"per_device_train_batch_size": 4, "num_generations": 8}
    one = case("grpo", qwen, {"beta": 0.1, "num_iterations": 2}, **of_one_prompt, use_peft=True)
    trace, _, _ = assert_alike(one, tmp_path)
    forward = [size for phase, _, size, *_ in births(trace) if phase == Phase.FORWARD.value]
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


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_rehearsed_to_the_byte(kind: str, model_folder: Folder, tmp_path: Path) -> None:
    content, knobs = KINDS[kind]
    one = case("sft", model_folder("llama"), use_peft=True, peft_config=canonical(content), **knobs)
    _, _, trainer = assert_alike(one, tmp_path)
    assert trainer.model.peft_config["default"].peft_type.value == content["peft_type"]


ROWS = real_run.SMALL.effective_batch_size
KV_HEADS, HEAD_SIZE, MODEL_LAYERS = 2, 16, 2


@pytest.mark.parametrize(("method", "mode"), [("grpo", "colocate"), ("rloo", "server")])
def test_what_vllm_generated_is_trained_on_alike(method: str, mode: str, qwen: Path, tmp_path: Path) -> None:
    one = case(method, qwen, {"use_vllm": True, "vllm_mode": mode}, use_peft=True)
    fake = rehearsed(one)
    with vllm_stand_in():
        real, _ = trained(one, tmp_path / "real")
    assert not difference(one, fake, real)
    assert {"generate", "score", "forward", "backward", "optimizer_step"} <= set(peaks(real))


def test_a_step_with_a_reference_scores_generates_and_trains_in_this_order(qwen: Path) -> None:
    """The KV cache at the last step holds, per layer, keys and values of all tokens but the one that is being made."""
    full = rehearsed(case("grpo", qwen, {"beta": 0.1}))
    names = [block.module for block in full.blocks if block.owner is Owner.WEIGHTS]
    assert {"model.norm.weight", "ref_model.model.norm.weight"} <= {*names}
    scoring = {block.module for phase, _, block in full.walk() if phase is Phase.SCORE}
    assert "ref_model.model.layers.1.mlp.down_proj" in scoring
    sizes = [block.size_bytes for block in full.blocks if block.owner is Owner.KV_CACHE]
    largest = ROWS * KV_HEADS * HEAD_SIZE * 4 * (LENGTH - 1)
    generations = 2
    assert real_run.COMPLETION > 2, "a last step that is not the first"
    assert max(sizes) == largest
    assert sizes.count(largest) == generations * MODEL_LAYERS * 2
    caching = {phase for phase, sign, block in full.walk() if sign > 0 and block.owner is Owner.KV_CACHE}
    assert caching == {Phase.GENERATE}
    order = [phase.value for _, phase in full.phase_starts]
    micro_step = ["forward", "backward", "optimizer_step"]
    assert order == ["load", *(["score", "generate", "score", *micro_step, *micro_step] * 2), "save"]


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "student": ({"lmbda": 1.0}, {}),
    "teacher": ({"lmbda": 0.0, "seq_kd": True}, {"use_peft": True}),
    "data": ({"lmbda": 0.0, "beta": 1.0, "eval_strategy": "steps"}, {}),
    "one_micro_step": ({}, {"gradient_accumulation_steps": 1}),
}


@pytest.mark.parametrize("name", [pytest.param("student", marks=pytest.mark.newest), *list(WAYS)[1:]])
def test_every_way_allocates_what_was_rehearsed(name: str, qwen: Path, tmp_path: Path) -> None:
    arguments, knobs = WAYS[name]
    one = case("gkd", qwen, arguments, **{"gradient_checkpointing": False, **knobs})
    fake, *_ = assert_alike(one, tmp_path)
    generates = name != "data"
    assert (Phase.GENERATE in peaks(fake)) == generates
    assert Phase.FORWARD in peaks(fake)


def test_an_answer_behind_a_long_prompt_takes_more_than_the_row_and_one_behind_a_short_prompt_does_not(
    qwen: Path,
) -> None:
    """The row has 40 tokens; 12 behind a prompt of 39 are 51, and behind one of 10 they are 22."""
    model = qwen

    def of_tokens(prompt: int | None, **arguments: Any) -> int:
        one = case("gkd", model, arguments, gradient_checkpointing=False, max_new_tokens=12)
        largest = peaks(rehearsed(replace(one, job=replace(one.job, prompt_length=prompt))))
        return largest[Phase.FORWARD] - largest[Phase.OPTIMIZER_STEP]

    data = of_tokens(None, lmbda=0.0)
    assert of_tokens(None) == pytest.approx(data * 51 / 40, rel=0.02)
    assert of_tokens(10) == pytest.approx(data, rel=0.02)
    assert of_tokens(10, lmbda=1.0) == pytest.approx(data * 22 / 40, rel=0.02)


@pytest.mark.newest
def test_a_reward_model_scores_beside_what_the_policy_keeps_for_backward(qwen: Path, tmp_path: Path) -> None:
    folder = qwen
    arguments = {"reward_model_path": str(folder), "missing_eos_penalty": 1.0}
    fake, _, made = assert_alike(case("online_dpo", folder, arguments, gradient_checkpointing=False), tmp_path)
    assert made.ref_model is not None
    weights = [block.module.partition(".")[0] for _, _, block in fake.walk() if block.owner is Owner.WEIGHTS]
    assert {"reward_model", "ref_model"} <= {*weights}
    largest = peaks(fake)
    assert max(largest, key=lambda phase: largest[phase]) == Phase.SCORE


def test_what_exceeds_max_length_is_sampled_whole_and_cut_before_the_loss(qwen: Path, tmp_path: Path) -> None:
    one, whole_one = (case("online_dpo", qwen, max_length=length) for length in (LENGTH // 2, LENGTH))
    fake, _, _ = assert_alike(one, tmp_path)
    whole = rehearsed(whole_one)
    assert peaks(fake)[Phase.GENERATE] == peaks(whole)[Phase.GENERATE]
    assert peaks(fake)[Phase.BACKWARD] < peaks(whole)[Phase.BACKWARD]


def test_mxfp4_is_dequantized_as_it_loads(tmp_path: Path) -> None:
    folder = pack_in_mxfp4(tiny_folder(tmp_path / "oss", "gpt_oss"))
    fake, real, trainer = assert_alike(case("sft", folder, use_peft=True, dtype="bfloat16"), tmp_path)
    weight = 2 * 4 * 64 * (2 * 192)
    assert peaks(fake)["load"] == peaks(real)["load"]
    born = [(owner, size) for phase, owner, size, *_ in births(fake) if phase == "load"]
    assert born.count((Owner.WEIGHTS.value, weight)) == 2, "gate and up of two layers"
    assert born.count((Owner.OTHER.value, weight)) == 2 * 3, "before it is transposed, and indices of both its halves"
    assert trainer.model.get_submodule("base_model.model.model.layers.0.mlp.experts").gate_up_proj.abs().sum() > 0


@pytest.mark.parametrize(("family", "routing"), [("qwen3_moe", Routing.ONE), ("gpt_oss", Routing.EVEN)])
def test_a_loop_over_experts_is_rehearsed_for_either_routing(
    family: str, routing: Routing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tiny_folder(tmp_path / family, family), experts_implementation="eager")
    one = case("sft", folder, gradient_checkpointing=routing is Routing.ONE, dtype="bfloat16")
    fake = rehearse.rehearse(one.job, one.knobs, one.length, str(tmp_path), routing=routing)
    monkeypatch.setattr(experts, "assign", put)
    with experts.routed(routing):
        real, _ = trained(one, tmp_path / "real")
    assert not difference(one, fake, real)
    assert fake.routing is routing


def put(choice: torch.Tensor, chosen: torch.Tensor) -> None:
    with real_tensors():
        choice.data.copy_(chosen)  # autograd has it, and counts what is written otherwise


def written(folder: Path, **more: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    return folder


def test_of_a_loop_over_experts_the_worst_is_told_and_of_a_grouped_product_that_it_has_none(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both: list[Trace] = []
    once = rehearse.rehearse

    def kept(*given: Any, **options: Any) -> Trace:
        both.append(once(*given, **options))
        return both[-1]

    monkeypatch.setattr(rehearse, "rehearse", kept)
    one = case("sft", written(tiny_folder(tmp_path / "eager", "qwen3_moe"), experts_implementation="eager"))
    worst = rehearsed(one)
    assert [trace.routing for trace in both] == [Routing.ONE, Routing.EVEN]
    assert peak(worst) == max(map(peak, both))
    assert rehearsed(case("sft", model_folder("qwen3_moe"), dtype="bfloat16")).routing is Routing.ANY
