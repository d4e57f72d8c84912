"""A micro-step that runs out of memory and is repeated in parts leaves the gradients of the whole micro-batch.

So it is with a model's own loss, which may be another mean than its trainer thinks, and with rows with images: they are
split with exactly each row's images, or not at all.
"""

import functools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from guarded import NO_MEANS_OVER_ROWS, Faults, Told, as_built, blocks, fail_in_backward, fail_in_forward, failing
from tiny import IMAGE_TOKEN
from tiny_trainers import rows, trainer
from tiny_vision_trainers import vision_trainer

from autotrain_mem.training.guard.attach import attach_guard
from autotrain_mem.training.guard.batch_split import Layout, Piece, image_token_of, joined
from autotrain_mem.training.guard.loss_weights import why_not_exact
from autotrain_mem.types import LearnedLimits, Phase

UNTIMED = ("step_time",)
COUNTED = ("_step", "_total_train_tokens")
RELATIVE, OF_LARGEST = 2e-4, 1e-6
"""Tolerances of fp32 sums in another order: of each number, and of the largest in its parameter's gradient, since a
small sum of large terms is as exact as the terms are. Largest numbers go from 1e-7 to 3e6; beyond the first tolerance
the worst difference was 1.4e-7 of them (November 2026)."""


@dataclass
class Outcome:
    gradients: dict[str, torch.Tensor]
    loss: float
    logged: dict[str, list[float]]
    counted: dict[str, Any]
    told: Told


def micro_steps(made: Any, count: int = 2, learned: LearnedLimits | None = None, guarded: bool = True) -> Outcome:
    """The first accumulation window, without its optimizer step."""
    told = Told()
    made.model.zero_grad()
    kept = made._metrics if hasattr(made, "_metrics") else made._stored_metrics
    kept["train"].clear()
    vars(made).update({name: 0 for name in COUNTED if hasattr(made, name)})
    made.state.num_input_tokens_seen = 0
    if guarded:
        attach_guard(made, learned=learned or LearnedLimits(), on_incident=told, on_notice=told.notices.append)
    torch.manual_seed(1)
    random.seed(1)
    made.create_optimizer_and_scheduler(1)
    batches, items = made.get_batch_samples(iter(made.get_train_dataloader()), count, torch.device("cpu"))
    made.current_gradient_accumulation_steps = count
    loss = sum(float(made.training_step(made.model, batch, items)) for batch in batches)
    return Outcome(
        {name: value.grad.clone() for name, value in made.model.named_parameters() if value.grad is not None},
        loss,
        {name: values for name, values in kept["train"].items() if name not in UNTIMED},
        {name: getattr(made, name) for name in COUNTED if hasattr(made, name)},
        told,
    )


def assert_same(one: Outcome, other: Outcome, of_all: float = 0.0) -> None:
    assert one.gradients.keys() == other.gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in other.gradients.values())
    for name, gradient in one.gradients.items():
        expected = other.gradients[name]
        absolute = max(OF_LARGEST * float(expected.abs().max()), of_all * largest)
        message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(gradient, expected, msg=message, rtol=RELATIVE, atol=absolute)
    # RLOO's terms are about 1 and cancel: what is left is rounding in float32.
    assert one.loss == pytest.approx(other.loss, rel=1e-4, abs=1e-5)
    assert one.counted == other.counted
    assert one.logged.keys() == other.logged.keys()
    for name, values in one.logged.items():
        expected = values if name in NO_MEANS_OVER_ROWS else other.logged[name]
        assert len(values) == len(other.logged[name])
        assert values == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True), name


def assert_same_when(
    made: Any, disturb: Callable[[], Any], learned: LearnedLimits | None = None, of_all: float = 0.0
) -> Told:
    expected = micro_steps(made, guarded=False)
    disturb()
    split = micro_steps(made, learned=learned)
    assert_same(split, expected, of_all)
    assert any(gradient.abs().max() > 1e-4 for gradient in expected.gradients.values())
    return split.told


Case = tuple[str, dict[str, Any], dict[str, Any]]

CASES: dict[str, Case] = {
    "sft": ("sft", {}, {}),
    "sft-not-counted": ("sft", {}, {"model_accepts_loss_kwargs": False}),
    "sft-nll": ("sft", {"loss_type": "nll"}, {}),
    "sft-dft": ("sft", {"loss_type": "dft"}, {}),
    "sft-smoothed": ("sft", {"loss_type": "nll", "label_smoothing_factor": 0.1}, {}),
    "reward": ("reward", {"center_rewards_coefficient": 0.1}, {}),
    **{
        f"dpo-{kind}": ("dpo", {}, {"loss_types": [kind], "loss_weights": [1.0]})
        for kind in ("sigmoid", "ipo", "nca_pair", "bco_pair", "apo_zero", "sft")
    },
    "dpo-several": ("dpo", {"use_weighting": True}, {"loss_types": ["sigmoid", "ipo"], "loss_weights": [0.7, 0.3]}),
    **{
        f"grpo-{kind}": ("grpo", {"beta": 0.1}, {"loss_type": kind})
        for kind in ("grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo", "vespo")
    },
    "grpo-luspo": ("grpo", {"beta": 0.1}, {"loss_type": "luspo", "importance_sampling_level": "sequence"}),
    "rloo": ("rloo", {}, {}),
    "distillation": ("distillation", {}, {}),
    "cpo-simpo": ("cpo", {}, {}),
    "online_dpo": ("online_dpo", {}, {}),
    "online_dpo-ipo": ("online_dpo", {"loss_type": "ipo", "max_length": 20}, {}),
    "gkd-data": ("gkd", {"lmbda": 0.0}, {}),
    "gkd-data-not-counted": ("gkd", {"lmbda": 0.0, "beta": 1.0}, {"model_accepts_loss_kwargs": False}),
}
SIZES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def build(method: str, model: Path, folder: Path, **changes: Any) -> Any:
    made = trainer(method, model, folder, **(SIZES | changes))
    if method in ("grpo", "rloo", "distillation", "online_dpo"):
        generate = made._generate_and_score_completions
        made._generate_and_score_completions = lambda inputs: of_several_lengths(generate(inputs))
    return made


def of_several_lengths(batch: dict[str, Any]) -> dict[str, Any]:
    """A model that knows nothing ends no completion early."""
    mask = batch["completion_mask"]
    for row in range(len(mask)):
        mask[row, 1 + row % mask.shape[1] :] = 0
    batch["num_items_in_batch"] = mask.sum()
    return batch


built = functools.cache(build)
SetUp = Callable[[str], AbstractContextManager[Any]]


@pytest.fixture
def set_up(qwen: Path) -> SetUp:
    """A trainer as it was built, however it was changed in between; the next case may be of the same one."""

    def restored(case: str) -> AbstractContextManager[Any]:
        method, settings, attributes = CASES[case]
        return as_built(built(method, qwen, qwen.parent / "trained", **settings), **attributes)

    return restored


@pytest.mark.newest
@pytest.mark.parametrize("case", CASES)
def test_gradients_loss_and_what_is_logged_are_the_whole_micro_batchs(case: str, set_up: SetUp) -> None:
    """The first micro-batch fails in the forward, the second one in the backward with some gradients added."""
    with set_up(case) as made:
        told = assert_same_when(made, lambda: (fail_in_forward(made, at=[0]), fail_in_backward(made, at=[2], layer=1)))
    assert [incident.phase for incident in told.incidents] == [Phase.FORWARD, Phase.BACKWARD]
    weighs_tokens = case in ("sft-not-counted", "dpo-sft", "grpo-bnpo", "gkd-data-not-counted")
    assert ["the loss is a mean over the tokens" in notice for notice in told.notices] == [True] * weighs_tokens
    assert all(remedy.startswith("split into ") for remedy in told.remedies)


def test_it_goes_down_to_one_row_and_then_keeps_activations_on_the_host(set_up: SetUp) -> None:
    """Four rows, two, one, and that one again; each time with some more gradients added."""
    with set_up("sft") as made:
        told = assert_same_when(made, lambda: fail_in_backward(made, at=[0, 1, 2], layer=0))
    assert [remedy.split(" rows")[0] for remedy in told.remedies] == [
        "split into 2 + 2",
        "split into 1 + 1",
        "repeated with activations offloaded to the host",
    ]
    assert [told.learned[at].activations_on_host for at in (0, -1)] == [False, True]


def test_a_step_that_draws_who_answers_is_not_split_and_goes_the_same_way_again(qwen: Path, tmp_path: Path) -> None:
    """The first draw is the student's, 0.13, and the next ones are not: 0.85 and 0.76."""
    made = build("gkd", qwen, tmp_path, lmbda=0.5)
    generated: list[int] = []
    generate = made.model.generate

    def counted(**options: Any) -> Any:
        generated.append(len(options["input_ids"]))
        return generate(**options)

    made.model.generate = counted
    told = assert_same_when(made, lambda: fail_in_forward(made, at=[0]))
    assert told.remedies == ["repeated with activations offloaded to the host"]
    assert generated == [4, 4, 4], "once unguarded, and twice guarded"
    assert ["is drawn for each micro-batch" in notice for notice in told.notices] == [True]


@pytest.mark.parametrize("alpha", [None, 5.0])
def test_noise_of_a_parts_embedding_is_as_large_as_the_wholes_and_is_told(alpha: float | None, set_up: SetUp) -> None:
    """NEFTune's bound goes by the columns, so that parts keep those of padding; else they leave them out."""
    widths: list[int] = []
    with set_up("sft") as made:
        made.neftune_noise_alpha = alpha
        hook = made.model.get_input_embeddings().register_forward_hook(lambda *args: widths.append(args[2].shape[1]))
        told = assert_same_when(made, lambda: (widths.clear(), fail_in_forward(made, at=[0])))
        hook.remove()
    whole, *parts, _ = widths
    assert [width == whole for width in parts] == [True, alpha is not None]
    assert [notice[:7] for notice in told.notices] == ["NEFTune"] * (alpha is not None)


def test_an_error_after_the_last_gradient_adds_none_twice(set_up: SetUp) -> None:
    with set_up("sft") as made, pytest.MonkeyPatch.context() as patch:
        backward, faults = made.accelerator.backward, Faults([0])
        late = lambda *args, **kwargs: (backward(*args, **kwargs), faults())  # noqa: E731
        told = assert_same_when(made, lambda: patch.setattr(made.accelerator, "backward", late))
    assert told.incidents[0].phase is Phase.BACKWARD


def test_adapters_that_dpo_switches_off_and_on_get_each_gradient_once(qwen: Path, tmp_path: Path) -> None:
    """PEFT makes all of an adapter's weights trainable when it is switched on again."""
    from peft import LoraConfig

    lora = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    outcomes = []
    for at in ([], [0, 3]):
        torch.manual_seed(0)
        made = build("dpo", qwen, tmp_path, build={"peft_config": lora}, gradient_checkpointing=True)
        fail_in_backward(made, at=at, layer=1)
        outcomes.append(micro_steps(made))
    assert_same(outcomes[1], outcomes[0])
    assert len(outcomes[1].told.incidents) == 2
    assert all(weight.requires_grad == ("lora_" in name) for name, weight in made.model.named_parameters())


def test_a_loss_over_the_whole_batch_is_repeated_whole_and_then_given_up(set_up: SetUp) -> None:
    with set_up("dpo-sigmoid") as made:
        made.loss_types = ["aot"]
        expected = micro_steps(made, guarded=False)
        fail_in_backward(made, at=[0, 2, 3], layer=0)
        with pytest.raises(torch.OutOfMemoryError, match="loss_type aot compares each pair") as caught:
            micro_steps(made)
        assert str(caught.value).startswith("CUDA out of memory. Tried to allocate 1.00 GiB.\n")
    with set_up("dpo-sigmoid") as made:
        made.loss_types = ["aot"]
        fail_in_backward(made, at=[1], layer=0)
        once = micro_steps(made)
        assert_same(once, expected)
    assert "divided into micro-batches: loss_type aot compares each pair" in once.told.notices[0]
    assert once.told.remedies == ["repeated with activations offloaded to the host"]
    with set_up("sft") as made:  # with several processes nothing is repeated
        fail_in_forward(made, at=[0])
        attach_guard(made, learned=LearnedLimits(), on_incident=Told()).context.why_not = "2 processes train together"
        with pytest.raises(torch.OutOfMemoryError, match="2 processes train together"):
            made.train()


def piece(lengths: list[int], layout: Layout, **more: Any) -> Piece:
    mask = torch.tensor([[1] * length + [0] * (max(lengths) - length) for length in lengths])
    ids = torch.arange(len(lengths)).unsqueeze(1) * mask
    return Piece(inputs={"input_ids": ids, "attention_mask": mask, **more}, layout=layout)


def test_a_pair_stays_together_with_its_numbers_and_what_is_not_laid_out_by_rows_is_not_cut() -> None:
    whole = piece([2, 3, 4, 5, 6, 7], Layout.PAIRS, margin=torch.tensor([1.0, 2.0, 3.0]), temperature=torch.tensor(0.5))
    parts = whole.cut(2)
    assert whole.units == 3
    assert [part.inputs["input_ids"][:, 0].tolist() for part in parts] == [[0, 1, 3, 4], [2, 5]]
    assert [part.inputs["margin"].tolist() for part in parts] == [[1.0, 2.0], [3.0]]
    assert parts[1].inputs["temperature"] == 0.5
    laid_out: list[dict[str, Any]] = [{}, {"pixel_values": torch.zeros(2, 3)}, {"table": torch.zeros(5, 3)}]
    assert [piece([2, 3], Layout.ROWS, **more).units for more in laid_out] == [2, 1, 1]
    assert joined([torch.tensor(1.0), torch.tensor(2.0)], Layout.ROWS, (0.25, 0.75)) == 1.75
    with pytest.raises(TypeError, match="of type str"):
        joined(["one", "two"], Layout.ROWS, (0.5, 0.5))


Model = Callable[[str], Path]
Reduce = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

OWN: dict[str, Reduce | None] = {
    "bart": None,  # its forward takes num_items_in_batch, and a mean over all of its labels, which are not shifted
    "tokens": lambda losses, mask: losses.sum() / mask.sum(),
    "rows": lambda losses, mask: (losses.sum(1) / mask.sum(1).clamp(min=1)).sum() / mask.any(1).sum(),
    "neither": lambda losses, mask: losses.sum() / 9,
}


def takes_its_own_mean(model: Any, reduce: Reduce) -> None:
    """As code from the hub may: its forward accepts whatever it is given, and ignores most of it."""
    forward = model.forward

    def forward_with_loss(input_ids: Any, attention_mask: Any = None, labels: Any = None, **_: Any) -> Any:
        outputs = forward(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        targets = labels[:, 1:]
        losses = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), targets, reduction="none")
        outputs["loss"] = reduce(losses, targets != -100)
        return outputs

    model.forward = forward_with_loss


@functools.cache
def with_own_loss(kind: str, model: Path, rows: int, number: int) -> Any:
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": number, "loss_type": "nll"}
    made = trainer("sft", model, model.parent / "trained", **SIZES | sizes)
    if reduce := OWN[kind]:
        takes_its_own_mean(made.model, reduce)
    return made


def steps(kind: str, folder_of: Model, rows: int, number: int, disturb: Any = None, **options: Any) -> Outcome:
    """The same eight rows, in so many micro-batches."""
    with as_built(with_own_loss(kind, folder_of("qwen2" if OWN[kind] else kind), rows, number)) as made:
        if disturb:
            disturb(made)
        outcome = micro_steps(made, count=number, **options)
    for name in [name for name in outcome.gradients if name.endswith("k_proj.bias")]:
        del outcome.gradients[name]  # zero but for rounding: what is added to all keys leaves attention as it is
    return outcome


@pytest.mark.parametrize("kind", ["tokens", "rows"])
def test_a_models_own_mean_gives_one_gradient_in_parts_and_micro_batches(kind: str, model_folder: Model) -> None:
    whole = steps(kind, model_folder, 8, 1, guarded=False)
    split = steps(kind, model_folder, 8, 1, lambda made: fail_in_backward(made, at=[0, 1], layer=1))
    assert len(split.told.incidents) == 2
    divided = steps(kind, model_folder, 2, 4, lambda made: fail_in_forward(made, at=[0]))
    assert len(divided.told.incidents) == 1
    for other in (split, divided):
        for name in ("logged", "counted"):  # of several micro-batches there are several numbers
            setattr(other, name, getattr(whole, name))
        assert_same(other, whole)


@pytest.mark.parametrize("kind", ["neither", "bart"])
def test_an_unknown_loss_is_not_split_and_weighs_each_micro_batch_alike(kind: str, model_folder: Model) -> None:
    whole = steps(kind, model_folder, 8, 1, guarded=False)
    repeated = steps(kind, model_folder, 8, 1, lambda made: fail_in_backward(made, at=[0], layer=1))
    assert repeated.told.remedies == ["repeated with activations offloaded to the host"]
    assert_same(repeated, whole)
    assert not repeated.told.notices
    added_up, meant = steps(kind, model_folder, 2, 4, guarded=False), steps(kind, model_folder, 2, 4)
    assert meant.loss == pytest.approx(added_up.loss / 4)
    assert ["testing did not show" in notice for notice in meant.told.notices] == [True]


def test_the_trial_says_which_mean_it_is_and_leaves_no_trace(gpt2: Path, tmp_path: Path) -> None:
    """GPT-2 drops out, and heeds the count: with accumulation it is tried in the first micro-step."""
    outcomes = []
    for guarded in (False, True):
        made = trainer("sft", gpt2, tmp_path, loss_type="nll", **SIZES)
        made.model.transformer.drop.eval()  # a part that does not train stays one
        calls: list[int] = []
        made.model.register_forward_pre_hook(lambda module, _, calls=calls: calls.append(module.training))
        outcomes.append(micro_steps(made, guarded=guarded))
    assert calls == [False, False, True, True]
    assert_same(outcomes[1], outcomes[0])
    assert all(torch.equal(value, outcomes[0].gradients[name]) for name, value in outcomes[1].gradients.items())


def test_an_evaluation_in_parts_gives_the_loss_of_a_mean_of_the_models_own(qwen: Path, tmp_path: Path) -> None:
    """The trial takes six forward passes; where there is no room even for it, nothing is split yet."""
    losses, remedies = [], []
    for at in ([], [0, 7], [0, 1]):
        sizes = {"per_device_eval_batch_size": 4, "loss_type": "nll"}
        made, told = trainer("sft", qwen, tmp_path, eval_dataset=rows("sft"), **sizes), Told()
        takes_its_own_mean(made.model, lambda losses, mask: losses.sum() / mask.sum())
        attach_guard(made, learned=LearnedLimits(), on_incident=told)
        faults = Faults(at)
        blocks(made)[1].register_forward_pre_hook(lambda *_, faults=faults: faults())
        losses.append(made.evaluate()["eval_loss"])
        remedies.append([remedy.split(" rows")[0] for remedy in told.remedies])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert remedies == [[], ["split into 2 + 2", "split into 1 + 1"], ["repeated after the cache was emptied"]]


def fake(name: str, family: str, **attributes: Any) -> Any:
    kind = type(name, (), {"compute_loss": lambda *_: None, "_compute_loss": lambda *_: None})
    for method in (kind.compute_loss, kind._compute_loss):  # type: ignore[attr-defined]
        method.__module__ = f"trl.trainer.{family}_trainer"
    made = kind()
    vars(made).update({"model": SimpleNamespace(config=SimpleNamespace()), **attributes})
    return made


def test_each_loss_that_is_no_sum_over_rows_is_named_unless_all_are_means_over_tokens() -> None:
    grpo = {"loss_type": "grpo", "top_entropy_quantile": 1.0}
    named = {
        "loss_type aot_unpaired compares": fake("DPOTrainer", "dpo", loss_types=["sigmoid", "aot_unpaired"]),
        "loss_type sft is a mean over tokens": fake("DPOTrainer", "dpo", loss_types=["sigmoid", "sft"]),
        "top_entropy_quantile": fake("GRPOTrainer", "grpo", **(grpo | {"top_entropy_quantile": 0.5})),
        "adaptive entropy bonus": fake("GRPOTrainer", "grpo", **grpo, use_adaptive_entropy=True),
        "entropy bonus is a mean over tokens": fake("GRPOTrainer", "grpo", **grpo, _entropy_bonus_enabled=True),
        "loss_type novel": fake("GRPOTrainer", "grpo", loss_type="novel"),
        "router's auxiliary loss": fake("SFTTrainer", "sft", aux_loss_enabled=True),
        "compute_loss_func is not TRL's": fake("SFTTrainer", "sft", compute_loss_func=lambda *_: None),
        "SFTTrainer.compute_loss is not TRL's": fake("SFTTrainer", "mine"),
        "KL divergence is estimated over the rows": fake("KTOTrainer", "kto", calculate_KL=True),
        "compare the desirable rows": fake("KTOTrainer", "kto", calculate_KL=False),
        "unknown how BCOTrainer combines rows": fake("BCOTrainer", "bco"),
    }
    for words, made in named.items():
        assert words in str(why_not_exact(made))
    made = fake("GRPOTrainer", "grpo", loss_type="bnpo", top_entropy_quantile=1.0, _entropy_bonus_enabled=True)
    assert why_not_exact(made) is None
    assert why_not_exact(fake("DPOTrainer", "dpo", loss_types=["sft"])) is None


OF_ALL = 1e-7
"""Of the largest number in all gradients: those of a key's bias are nothing but what sums leave."""


@functools.cache
def with_images(method: str, model: Path) -> Any:
    return vision_trainer(method, model, model.parent / "out")


@pytest.mark.parametrize("case", ["qwen2_5_vl dpo", "gemma3 dpo", "smolvlm dpo", "smolvlm grpo", "llava sft"])
def test_gradients_of_parts_are_the_whole_micro_batchs(case: str, vision_folder: Model) -> None:
    """The first micro-batch fails twice in the forward, and goes through row by row, some of which have no image.

    Pairs, whose halves share their images, with every layout of images; every kind of method at least once.
    """
    family, method = case.split()
    with as_built(with_images(method, vision_folder(family))) as made:
        told = assert_same_when(made, lambda: fail_in_forward(made, at=[0, 1], layer=-1), of_all=OF_ALL)
    assert [remedy.split(" rows")[0].split(" pairs")[0] for remedy in told.remedies] == [
        "split into 2 + 2",
        "split into 1 + 1",
    ]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_prompts_are_answered_and_completions_judged_in_parts_as_all_at_once(family: str, vision_folder: Model) -> None:
    """Greedily, so that parts draw nothing; the fourth part of each has prompts without an image.

    They have not as many images as there are rows: TRL would take SmolVLM's pixels, a row each, for an image each
    (``trl/trainer/rloo_trainer.py: _get_per_token_logps_and_entropies``).
    """
    with as_built(with_images("rloo", vision_folder(family))) as made:
        made.generation_config.do_sample = False
        inputs = [made.train_dataset[row] for row in (4, 2, 3, 0) for _ in range(2)]
        expected = made._generate_and_score_completions([dict(each) for each in inputs])
        told = Told()
        attach_guard(made, learned=LearnedLimits(generate_rows=2, score_rows=2), on_incident=told)
        in_parts = made._generate_and_score_completions([dict(each) for each in inputs])
    assert torch.equal(in_parts["completion_ids"], expected["completion_ids"])
    names = {name for name, value in expected.items() if isinstance(value, torch.Tensor)}
    assert any("logps" in name for name in names)
    for name in names:
        torch.testing.assert_close(in_parts[name], expected[name], rtol=1e-4, atol=1e-5)


def batch(tokens: list[int], **images: Any) -> Piece:
    """Rows of 12 with so many image tokens each, a token between every two stretches of four."""
    ids = torch.full((len(tokens), 20), 5)
    for row, number in enumerate(tokens):
        for at in range(number):
            ids[row, at + at // 4] = IMAGE_TOKEN
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images}
    return Piece(inputs=inputs, layout=Layout.ROWS, image_token=IMAGE_TOKEN)


def numbered(*shape: int) -> torch.Tensor:
    """Entries of which each is its own number, counted from 1."""
    return torch.arange(1.0, shape[0] + 1).view(-1, *[1] * (len(shape) - 1)).expand(shape)


GRID = torch.tensor([[1, 4, 4], [1, 2, 8], [1, 4, 8]])
PATCHES = {"pixel_values": numbered(64, 6), "image_grid_thw": GRID}
EACH = {"pixel_values": numbered(3, 3, 8, 8)}

REFUSED = {
    "images are not rows": ([8, 4, 0], {**PATCHES, "image_grid_thw": GRID[:2]}, "do not match"),
    "an image would be of two rows": ([4, 6, 6], PATCHES, "do not match"),
    "TRL counted otherwise": ([8, 0, 8], {**PATCHES, "num_images": [1, 1, 1]}, "do not match"),
    "tokens of less than an image": ([6, 6, 0], EACH, "do not match"),
    "an image without tokens": ([0, 0, 0], EACH, "do not match"),
    "other numbers of tiles": ([8, 4, 0], {"pixel_values": numbered(3, 2, 3, 4, 4)}, "do not match"),
    "a name not known": ([8, 0, 4], {**EACH, "aspect_ratio_ids": torch.ones(3, 1)}, "if a batch has aspect_ratio"),
    "flat pixels": ([8, 0, 4], {"pixel_values": numbered(3, 7)}, "2 dimensions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_certain_is_not_cut(case: str) -> None:
    tokens, images, why = REFUSED[case]
    whole = batch(tokens, **images)
    assert why in str(whole.why_not)
    assert (whole.units, whole.members) == (1, 3)
    if case == "flat pixels":
        whole = replace(whole, image_token=image_token_of(torch.nn.Linear(1, 1)))
        assert "names no image token" in str(whole.why_not)


def test_why_images_cannot_be_told_apart_is_said_when_memory_runs_out(vision_folder: Model) -> None:
    with as_built(with_images("sft", vision_folder("gemma3"))) as made:
        made.data_collator = lambda rows, own=made.data_collator: {**own(rows), "image_aspect": torch.ones(len(rows))}
        made.compute_loss = failing(made.compute_loss, Faults([0, 1]))
        with pytest.raises(torch.OutOfMemoryError, match="to rows if a batch has image_aspect"):
            micro_steps(made)
