"""Copies of a model with fewer layers record what the whole model's rehearsal does, also with images.

``scripts/parity`` compares all image families with every trainer that reads images.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from real_run import Case, Folder, assert_alike, case, rehearsal_of, rehearsed, rehearsed_by, sft_trainer, with_lora
from story import story
from tiny import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from autotrain_mem.estimator.depth.extrapolate import expand
from autotrain_mem.estimator.memory import LANGUAGE, PROJECTOR, VISION, parts_of
from autotrain_mem.rehearsal import fake_run
from autotrain_mem.rehearsal.rehearse import rehearse
from autotrain_mem.rehearsal.truncated_depth import model_pattern, pattern_of, shorten, shorten_model, with_layers
from autotrain_mem.rehearsal.windows import at_once, trial
from autotrain_mem.support.errors import RehearsalError, UnsupportedModelError, UsageError
from autotrain_mem.trainers.pickle_without_tensors import pack, unpack
from autotrain_mem.types import EngineMark, Job, Owner, Phase, Trace, Work
from autotrain_mem.types.model import FEW_LOSS_CHUNKS, LAYERS_HELD_BACK, MORE_LOSS_CHUNKS, Depths, LayerPattern
from autotrain_mem.worker.server import describe

DEPTH = 10
JOB = Job(method="sft", model="a model", dataset=None)


def deep_config(family: str, **changes: Any) -> Any:
    """A tiny model's config, with more layers."""
    config = tiny_config(family)
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = DEPTH
    if kinds:
        config.layer_types = [kinds[layer % len(kinds)] for layer in range(DEPTH)]
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deep")
    config = deep_config("qwen2")
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(path)
    return path


def assert_same(told: Trace | None, whole: Trace) -> None:
    assert told is not None
    assert story(told) == story(whole)
    assert told.operators == whole.operators
    assert told.marks == whole.marks


def assert_told(one: Case, depths: Depths) -> None:
    short, long = (rehearsed(one, layers=layers) for layers in (depths.short, depths.long))
    whole = rehearsed(one, layers=None if depths.whole == DEPTH else depths.whole)
    assert_same(expand(short, long, depths), whole)
    assert any(isinstance(mark, EngineMark) for _, mark in whole.marks) is ("use_vllm" in one.job.arguments)


ONE_STEP = {"gradient_accumulation_steps": 1}
TOLD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "4-bit": ("sft", {}, {"use_peft": True, "load_in_4bit": True, "gradient_checkpointing": False}),
    "offloaded": ("sft", {}, {"activation_offloading": True, "optimizer_offload": True, **ONE_STEP}),
    "bfloat16": ("dpo", {}, {"dtype": "bfloat16", **ONE_STEP}),
    "lora": ("grpo", {}, {"use_peft": True, "dtype": "bfloat16", **ONE_STEP}),
    "when an engine is awake": ("grpo", {"use_vllm": True, "vllm_enable_sleep_mode": True}, ONE_STEP),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLD)
def test_few_layers_tell_every_event_of_a_whole_rehearsal(name: str, deep_folder: Path) -> None:
    method, arguments, knobs = TOLD[name]
    one = case(method, deep_folder, arguments, **knobs)
    held_back = LAYERS_HELD_BACK if one.knobs.activation_offloading else 0
    assert_told(one, Depths(short=held_back + 1, long=held_back + 3, whole=DEPTH if held_back else 5))


@pytest.mark.slow
def test_few_layers_of_a_mixture_tell_the_loss_of_all_routers(tmp_path: Path) -> None:
    config = deep_config("qwen3_moe")
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    one = case("sft", tmp_path, gradient_checkpointing=False, **ONE_STEP)
    pattern = LayerPattern(layers=DEPTH, period=1, least=2)
    assert pattern_of(one.job, config) == pattern
    depths = pattern.depths()
    assert depths is not None
    assert_told(one, depths)


@pytest.mark.slow
def test_few_layers_with_few_chunks_of_the_loss_tell_a_whole_rehearsal(deep_folder: Path) -> None:
    length, rows = 400, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    one = case("sft", deep_folder, **rows, max_length=length, gradient_checkpointing=False)

    def rehearsed(layers: int, chunks: int | None) -> Trace:
        return rehearsal_of(one.job, one.knobs, length, layers=layers, chunks=chunks)

    short, long = rehearsed(1, FEW_LOSS_CHUNKS), rehearsed(3, MORE_LOSS_CHUNKS)
    assert short.loss_chunks == (13,)  # of 256 tokens, of 8 x 399

    def of_passes(trace: Trace) -> set[Work]:
        """Work of the forward and the backward pass; an update's is a list that grows with the layers."""
        return {work for work in trace.work.work if work.phase in (Phase.FORWARD, Phase.BACKWARD)}

    told, whole = expand(short, long, Depths(short=1, long=3, whole=5)), rehearsed(5, None)
    assert_same(told, whole)
    assert told is not None
    assert of_passes(told) == of_passes(whole)


@pytest.mark.slow
def test_a_loss_of_few_chunks_is_left_whole(deep_folder: Path) -> None:
    one = case("sft", deep_folder)
    few, whole = (rehearsed(one, layers=1, chunks=chunks) for chunks in (FEW_LOSS_CHUNKS, None))
    assert few.loss_chunks == ()
    assert story(few) == story(whole)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_the_model_has_as_many_layers_as_asked_for_wherever_its_config_is_read(family: str, tmp_path: Path) -> None:
    config = deep_config(family)
    config.save_pretrained(tmp_path)
    with with_layers([str(tmp_path)], 3):
        assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == 3
        assert type(config).from_pretrained(tmp_path).num_hidden_layers == 3
    with with_layers(["another model"], 3):
        assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == DEPTH


def test_the_period_is_that_of_the_kinds_of_layers() -> None:
    for family, changes, period in (
        ("qwen2", {}, 1),
        ("gpt2", {}, 1),
        ("llama", {}, 1),
        ("gemma3", {}, 2),
        ("qwen3_moe", {}, 1),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, None),  # the first layers are dense
        ("qwen2", {"auto_map": {"AutoConfig": "code.Config"}}, None),  # it brings its own code
    ):
        least = 2 if "moe" in family else 1  # whose routers have a loss over all layers
        expected = None if period is None else LayerPattern(layers=DEPTH, period=period, least=least)
        assert pattern_of(JOB, deep_config(family, **changes)) == expected, family
        if family == "gemma3":
            recomputed = replace(JOB, arguments={"gradient_checkpointing_kwargs": '{"every_n_layers": 5}'})
            assert pattern_of(recomputed, deep_config(family)) == LayerPattern(layers=DEPTH, period=10)


@pytest.mark.parametrize(("family", "name"), [("qwen2_5_vl", "depth"), ("smolvlm", "num_hidden_layers")])
def test_the_layers_of_a_vision_tower_are_counted(family: str, name: str, vision_folder: Folder) -> None:
    config = AutoConfig.from_pretrained(vision_folder(family))
    setattr(config.vision_config, name, 7)
    pattern = pattern_of(JOB, config)
    assert pattern is not None
    assert pattern.tower == 7


def test_models_of_one_step_have_a_pattern_where_they_share_it(tmp_path: Path) -> None:
    alike, deeper = tmp_path / "alike", tmp_path / "deeper"
    deep_config("qwen2").save_pretrained(alike)
    more = {"num_hidden_layers": DEPTH + 1, "layer_types": ["full_attention"] * (DEPTH + 1)}
    deep_config("qwen2", **more).save_pretrained(deeper)
    patterns = [
        pattern_of(replace(JOB, method="ppo", arguments={"reward_model_path": str(path)}), deep_config("qwen2"))
        for path in (alike, deeper, tmp_path / "nothing")
    ]
    assert patterns == [LayerPattern(layers=DEPTH, period=1), None, None]


def deep_model(family: str) -> Any:
    return AutoModelForCausalLM.from_config(deep_config(family))


class Own(torch.nn.Module):
    """A module of the user's own, around another."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def owned_mlps(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp = Own(layer.mlp)
    return model


PATTERNS: dict[str, tuple[Callable[[], Any], int]] = {
    "gemma3": (lambda: deep_model("gemma3"), 2),
    "lora": (lambda: with_lora(deep_model("qwen2")), 1),
    "a module of the user's own in every layer": (lambda: owned_mlps(deep_model("qwen2")), 1),
}


@pytest.mark.parametrize("kind", PATTERNS)
def test_a_model_object_has_the_pattern_of_its_layers(kind: str) -> None:
    made, period = PATTERNS[kind]
    assert model_pattern(unpack(pack(made()))) == LayerPattern(layers=DEPTH, period=period)


def changed(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes a model to whose layers something was done."""

    def made(model: Any) -> Any:
        change(model.model.layers)
        return model

    return made


WHOLE: dict[str, Callable[[Any], Any]] = {
    "the first layer is frozen": changed(lambda layers: layers[0].requires_grad_(False)),
    "one layer has a module of the user's own": changed(lambda layers: setattr(layers[4], "mlp", Own(layers[4].mlp))),
    "one layer has a hook": changed(lambda layers: layers[4].register_forward_hook(lambda *_: None)),
    "a rank of its own in one layer": lambda model: with_lora(model, rank_pattern={"layers.4.mlp.up_proj": 16}),
    "layers share weights": changed(lambda layers: [setattr(layer, "mlp", layers[0].mlp) for layer in layers[1:]]),
    "code of the user's own is around the layers": Own,
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_model_object_whose_layers_differ_is_rehearsed_whole(kind: str) -> None:
    assert model_pattern(WHOLE[kind](deep_model("qwen2"))) is None


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma3"])
def test_a_shortened_model_object_is_the_one_that_its_shortened_config_makes(family: str) -> None:
    model = unpack(pack(with_lora(deep_model(family))))
    shorten_model(model, 4)
    config = deep_config(family)
    shorten(config, 4)
    assert family != "gemma3" or config.layer_types == ["sliding_attention", "full_attention"] * 2
    built = with_lora(AutoModelForCausalLM.from_config(config))
    assert {name: value.shape for name, value in model.named_parameters()} == {
        name: value.shape for name, value in built.named_parameters()
    }
    base = model.get_base_model()
    assert base.config.to_diff_dict() == built.get_base_model().config.to_diff_dict()
    numbers = [module.layer_idx for module in model.modules() if hasattr(module, "layer_idx")]
    assert numbers == [module.layer_idx for module in built.modules() if hasattr(module, "layer_idx")]


@pytest.mark.slow
def test_few_layers_of_a_model_object_tell_every_event_of_its_whole_rehearsal(tmp_path: Path) -> None:
    packed = pack(with_lora(owned_mlps(deep_model("qwen2"))))

    def rehearsed(layers: int) -> Trace:
        def build() -> Any:
            model = unpack(packed)
            shorten_model(model, layers)
            return sft_trainer(model, tmp_path)

        return rehearsed_by(build)

    depths = Depths(short=1, long=3, whole=5)
    assert_same(expand(rehearsed(depths.short), rehearsed(depths.long), depths), rehearsed(depths.whole))


IMAGES = ("128x96", "64x80")


def pictured(method: str, folder: Path, images: tuple[str, ...] = IMAGES, **knobs: Any) -> Any:
    lengths = {"max_length": 120} if method in ("sft", "dpo") else {}
    one = case(method, folder, **lengths, **knobs)
    return replace(one, job=replace(one.job, images=images), tokens=120)


KEPT = (Owner.WEIGHTS, Owner.GRADIENTS, Owner.OPTIMIZER_STATE)
PICTURED = [
    ("sft", "qwen2_5_vl", {"use_peft": True, **ONE_STEP}),
    ("dpo", "gemma3", {"gradient_checkpointing": False, **ONE_STEP}),
    ("grpo", "smolvlm", {}),
    ("sft", "llava", ONE_STEP),
]


@pytest.mark.parametrize(("method", "family", "knobs"), PICTURED)
def test_a_rehearsal_with_images_is_the_training(
    method: str, family: str, knobs: dict[str, Any], vision_folder: Folder, tmp_path: Path
) -> None:
    fake, _, _ = assert_alike(pictured(method, vision_folder(family), **knobs), tmp_path)
    assert {part for part, _ in parts_of(fake.blocks)} >= {VISION, PROJECTOR, LANGUAGE}


def test_several_processes_with_a_part_that_no_loss_depends_on_are_refused(vision_folder: Folder) -> None:
    """Gemma's tower is made with a head here that nobody asks; with a gradient for all of it two processes do."""
    with pytest.raises(RehearsalError, match="the loss does not depend on them"):
        rehearsed(pictured("sft", vision_folder("gemma3"), processes=2, sharding="ddp"))
    one = pictured("sft", vision_folder("qwen2_5_vl"), processes=2, sharding="ddp", **ONE_STEP)
    assert rehearsed(one).trained.parameters == describe(one.job, (8, 0)).parameters


def test_larger_images_take_more_unless_they_are_made_smaller(vision_folder: Folder) -> None:
    folder = vision_folder("qwen2_5_vl")
    large = pictured("sft", folder, ("224x168",), **ONE_STEP)
    whole, smaller = (rehearsed(replace(large, knobs=replace(large.knobs, max_pixels=n))) for n in (None, 56 * 56))
    pixels = [
        max(block.size_bytes for block in trace.blocks if "patch_embed" in block.module and block.owner not in KEPT)
        for trace in (whole, smaller)
    ]
    assert pixels[1] < pixels[0] / 4


def test_images_that_leave_no_room_for_a_word_are_refused(vision_folder: Folder) -> None:
    with pytest.raises(UsageError, match="images alone take"):
        rehearsed(pictured("sft", vision_folder("qwen2_5_vl"), ("560x560",)))
    with pytest.raises(UsageError, match="changes nothing"):
        rehearsed(pictured("sft", vision_folder("gemma3"), max_pixels=1000))


def test_a_model_whose_images_are_not_rehearsed_is_named(qwen: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be rehearsed for qwen2 models"):
        rehearsed(pictured("sft", qwen))


def traced(one: Any, folder: Path, *, whole: bool = False) -> Trace:
    one_by_one = patch.object(fake_run, "windows_at_once", lambda *_: nullcontext()) if whole else nullcontext()
    with one_by_one:
        return rehearse(one.job, one.knobs, one.length, str(folder))


def windowed(folder: Path, **knobs: Any) -> Any:
    """Three windows by three of 56 pixels, of which the lowest are cut."""
    return pictured("sft", folder, ("168x140",), **ONE_STEP, **knobs)


def assert_told_at_once(trace: Trace, whole: Trace) -> None:
    assert_same(trace, whole)
    assert {*trace.work.work} == {*whole.work.work}


REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}


@pytest.mark.parametrize(
    "knobs", [{}, {"gradient_checkpointing": False, "dtype": "bfloat16"}, {"arguments": REENTRANT, "use_peft": True}]
)
def test_windows_at_once_are_windows_one_by_one(knobs: dict[str, Any], vision_folder: Folder, tmp_path: Path) -> None:
    one = windowed(vision_folder("qwen2_5_vl"), **knobs)
    scripts: list[at_once.Script] = []
    learn = at_once._Calls._learned

    def learned(*args: Any) -> at_once.Script:
        scripts.append(learn(*args))
        return scripts[-1]

    with patch.object(at_once._Calls, "_learned", learned):
        trace = traced(one, tmp_path)
    assert scripts
    assert_told_at_once(trace, traced(one, tmp_path, whole=True))


def test_what_a_trial_does_not_tell_is_run_one_by_one(vision_folder: Folder, tmp_path: Path) -> None:
    one = windowed(vision_folder("qwen2_5_vl"))
    with patch.object(trial.Trial, "story", lambda self: self):
        trace = traced(one, tmp_path)
    assert_told_at_once(trace, traced(one, tmp_path, whole=True))
