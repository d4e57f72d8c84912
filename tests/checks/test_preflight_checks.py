"""Tests what the checks before a rehearsal find; of mixtures of experts too: what PEFT refuses, and adapters that leave
the experts unchanged."""

import json
import pathlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import constants
from tiny import tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from autotrain_mem.checks import compatibility, preflight_checks, table
from autotrain_mem.checks.compatibility import flash_attention, takes_liger
from autotrain_mem.checks.model_files import ModelOnCard, download, parameters_on_disk
from autotrain_mem.checks.preflight_checks import UNFORESEEN, Setup, setup_of
from autotrain_mem.cli import word_problems
from autotrain_mem.trainers.pretrained import load_config
from autotrain_mem.types import Job, PythonCall
from autotrain_mem.types.findings import Finding, collect

Folder = Callable[[str], pathlib.Path]


@pytest.fixture
def chat(tmp_path: pathlib.Path) -> str:
    word_problems.write_rows(tmp_path / "chat.jsonl", word_problems.problems(4, seed=0))
    return str(tmp_path / "chat.jsonl")


def setup(folder: Any, method: str = "sft", card: tuple[int, int] = (8, 0), **words: Any) -> Setup:
    facts = {name: words.pop(name, False) for name in ("to_train", "on_cpu")}
    dataset = words.pop("dataset", None)
    job = Job(method=method, model=str(folder), dataset=dataset, arguments=words)
    config = load_config(str(folder))
    return setup_of(job, config, "out", compute_capability=card, reads_data=dataset is not None, **facts)


def found(folder: Any, method: str = "sft", card: tuple[int, int] = (8, 0), **words: Any) -> list[Finding]:
    return list(collect(table.PREFLIGHT, setup(folder, method, card, **words), UNFORESEEN))


def test_a_good_job_has_no_findings_and_unforeseen_exceptions_are_ignored(
    qwen: pathlib.Path, chat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [found(qwen, method) for method in ("sft", "reward", "grpo")] == [[], [], []]
    broken = Mock(side_effect=ZeroDivisionError("a model's own code"))
    monkeypatch.setattr(preflight_checks, "load_tokenizer", broken)
    (finding,) = found(qwen, dataset=chat, use_peft=True, lora_target_modules=["nope", "never"])
    assert "nope never match no module" in finding.message


ELSEWHERE = "some-org/some-data"


def test_a_plan_needs_no_data_if_the_hub_does_not_answer_and_the_length_is_given(qwen: pathlib.Path) -> None:
    for method, prompt_length, words, planned_for in (
        ("sft", None, {"max_length": 64}, "rows that fill max_length, 64"),
        ("grpo", 64, {}, "prompts of 64 tokens"),
        ("grpo", None, {}, ""),
        ("sft", None, {}, ""),
        ("sft", None, {"max_length": "auto"}, ""),
        ("sft", None, {"max_length": 64, "to_train": True}, ""),
        ("sft", None, {"max_length": 64, "dataset": "./nowhere"}, ""),
    ):
        one = setup(qwen, method, **{"dataset": ELSEWHERE, **words})
        (finding,) = collect(table.PREFLIGHT, replace(one, job=replace(one.job, prompt_length=prompt_length)))
        assert (finding.kind, finding.error) == ("warning" if planned_for else "error", "DatasetNotFoundError")
        assert planned_for in finding.message, words


FLASH, FROM_HUB = "flash_attention_2", "kernels-community/flash-attn2"


def test_what_a_card_or_installation_lacks_is_then_found(qwen: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_checks, "missing_to_compile", lambda environment: ["ninja", "c++"])
    monkeypatch.setattr(compatibility.importlib.util, "find_spec", lambda name: None)
    for words, says, harmless in (
        ({"bf16": True, "card": (7, 5)}, "warning: --bf16 is emulated", [{"card": (8, 0)}, {"bf16": None}]),
        ({"tf32": True, "card": (7, 5)}, "error: --tf32 needs", [{"card": (8, 0)}, {"on_cpu": True}]),
        (
            {"attn_implementation": FLASH, "to_train": True},
            "pip install flash-attn",
            [{"to_train": False}, {"on_cpu": True}, {"attn_implementation": "sdpa"}],
        ),
        ({"attn_implementation": FROM_HUB, "to_train": True}, "pip install kernels", [{"to_train": False}]),
        (
            {"sharding": "zero3", "offload_optimizer_device": "cpu", "to_train": True},
            "PATH lacks ninja and c++",
            [{"to_train": False}, {"on_cpu": True}, {"offload_optimizer_device": None}],
        ),
    ):
        (finding,) = found(qwen, **words)
        assert says in f"{finding.kind}: {finding}", words
        for change in harmless:
            assert not found(qwen, **words | change)


def test_flash_attention_and_ligers_kernels_are_chosen_where_all_allow_it(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(card: tuple[int, int], family: str = "qwen2", **words: Any) -> tuple[str | None, bool]:
        one = setup(model_folder(family), card=card, **words)
        return flash_attention(one.job, one.config, card), takes_liger(one.job, one.config, card)

    monkeypatch.setattr(compatibility.importlib.util, "find_spec", lambda name: None)
    assert asked((8, 0)) == ("pip install flash-attn --no-build-isolation", False)
    monkeypatch.setattr(compatibility.importlib.util, "find_spec", lambda name: name)
    assert asked((8, 0)) == asked((8, 0), loss_type="nll") == ("", True)
    assert asked((7, 5)) == asked((8, 0), use_cpu=True) == (None, False)
    assert asked((8, 0), bf16=False) == (None, True)
    assert asked((8, 0), "mixtral") == asked((8, 0), method="dpo") == asked((8, 0), loss_type="dft") == ("", False)
    assert asked((8, 0), lora_target_modules=["lm_head"]) == ("", False)
    pairs = setup(model_folder("qwen2"), "dpo", use_liger_kernel=True)
    ((message, _),) = compatibility.liger(ModelOnCard(job=pairs.job, config=pairs.config, compute_capability=(8, 0)))
    assert "the loss of dpo with liger-kernel's own" in message
    assert "trl 1.16" in message


def test_targets_are_matched_as_peft_matches_them_and_depend_on_architecture_and_method(model_folder: Folder) -> None:
    for targets, kinds in (
        (["all-linear"], []),
        (["q_proj", "v_proj"], []),
        ([".*q_proj"], []),
        (["q_proj"], ["error"]),  # a single name is a regular expression for a whole name
        (["q_proj", "nope"], ["warning"]),
        (["self_attn", "mlp"], ["error"]),  # no layers of their own
    ):
        findings = found(model_folder("qwen2"), use_peft=True, lora_target_modules=targets)
        assert [finding.kind for finding in findings] == kinds, targets
        assert all("o_proj" in finding.cure and "lm_head" not in finding.cure for finding in findings)
    (finding,) = found(model_folder("gpt2"), use_peft=True, lora_target_modules=["q_proj", "v_proj"])
    assert "c_attn, c_proj and c_fc" in finding.cure
    assert not found(model_folder("qwen2"), "reward", use_peft=True, lora_target_modules=["score", "q_proj"])
    fused_experts = ["gate_proj", "up_proj"]
    assert not found(model_folder("qwen3_moe"), use_peft=True, lora_target_modules=fused_experts, lora_dropout=0.0)


def judged(
    monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, tokenizer: Any, lacking: int = 0, **words: Any
) -> list[Finding]:
    """The embeddings have no rows for the last ``lacking`` tokens."""
    monkeypatch.setattr(preflight_checks, "load_tokenizer", lambda *_, **__: tokenizer)
    one = setup(folder, words.pop("method", "sft"), **words)
    rows = len(tokenizer) - lacking
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=rows))
    return list(collect(table.PREFLIGHT, replace(one, config=config), UNFORESEEN))


def test_tokens_without_an_embedding_count_if_in_batches(qwen: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = qwen
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["plain"])
    tokenizer.add_tokens(["<turn>"], special_tokens=True)
    for lacking, template, kind in (
        (0, "", None),
        (1, "", None),  # a special token that no text has, as Gemma 3's
        (1, "{{ '<turn>' }}", "error"),  # every conversation has it
        (2, "", "warning"),  # a text may have it
        (3, "", "error"),  # an ordinary word
    ):
        tokenizer.chat_template = template or None
        findings = judged(monkeypatch, folder, tokenizer, lacking)
        assert [finding.kind for finding in findings] == ([] if kind is None else [kind])
        assert all(f"resize_token_embeddings({len(tokenizer)})" in finding.cure for finding in findings)
        # A template of another tokenizer makes room for its tokens, one of one's own does not.
        assert not judged(monkeypatch, folder, tokenizer, lacking, chat_template_path="Qwen/Qwen3-0.6B"), lacking
        if lacking == 3:
            assert judged(monkeypatch, folder, tokenizer, lacking, chat_template_path="own.jinja")


def test_a_tokenizer_must_pad_and_not_by_a_rewards_end(qwen: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    end, tokenizer.eos_token, tokenizer.pad_token = tokenizer.eos_token, None, None

    def findings(method: str, **words: Any) -> list[Finding]:
        return judged(monkeypatch, qwen, tokenizer, method=method, **words)

    for method in ("sft", "grpo"):
        (finding,) = findings(method)
        assert (finding.error, "--pad_token" in finding.cure) == ("TokenizerError", method == "sft")
    tokenizer.eos_token = end  # trainers pad with it
    assert findings("sft") == findings("grpo") == []
    tokenizer.pad_token = end
    assert findings("sft") == findings("reward", pad_token="<|pad|>") == []
    assert [finding.kind for finding in findings("reward")] == ["warning"]


def test_conversations_need_a_chat_template(qwen: pathlib.Path, chat: str, tmp_path: pathlib.Path) -> None:
    bare = shutil.copytree(qwen, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    (finding,) = found(bare, dataset=chat)
    assert "--chat_template_path" in finding.cure
    assert not found(bare, dataset=chat, chat_template_path="own.jinja")
    texts = tmp_path / "text.jsonl"
    texts.write_text('{"text": "hello there"}\n')
    assert not found(bare, dataset=str(texts))


def test_parameters_follow_from_files(qwen: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = qwen
    config = load_config(str(folder))
    size_bytes = (folder / "model.safetensors").stat().st_size
    assert parameters_on_disk(str(folder), config) == size_bytes // config.dtype.itemsize
    for elsewhere in (str(tmp_path), "no-such-org/no-such-model", "no/such/id at all"):
        assert parameters_on_disk(elsewhere, config) is None


def said(folder: pathlib.Path, method: str = "sft", call: PythonCall | None = None, **given: Any) -> list[str]:
    """The warnings of flags without effect."""
    one = setup(folder, method, **given)
    return [*map(str, collect((preflight_checks.idle,), replace(one, job=replace(one.job, python_call=call))))]


@pytest.mark.newest
def test_a_flag_without_effect_is_named_with_its_method_or_its_switch(qwen: pathlib.Path) -> None:
    folder = qwen
    for method, given, words, cured in (
        ("dpo", {"label_smoothing_factor": 0.1}, "no effect with dpo: ", {"method": "sft"}),
        ("grpo", {"train_sampling_strategy": "group_by_length"}, "no effect with grpo: ", {"method": "sft"}),
        ("sft", {"bf16_full_eval": True}, "no effect with sft: ", None),
        ("grpo", {"max_tool_calling_iterations": 3}, "no effect with grpo: ", None),
        ("grpo", {"vllm_mode": "server"}, "--use_vllm is not given", {"use_vllm": True}),
        ("dpo", {"ref_model_sync_steps": 64}, "--sync_ref_model is not given", {"sync_ref_model": True}),
        ("sft", {"eval_steps": 10}, "--eval_strategy is not given", {"eval_strategy": "steps"}),
        ("sft", {"packing_strategy": "wrapped"}, "--packing is not given", {"packing": True}),
    ):
        (warning,) = said(folder, method, **given)
        assert warning.startswith(f"--{next(iter(given))} ")
        assert words in warning
        assert cured is None or said(folder, **{"method": method, **given, **cured}) == [], given


@pytest.mark.newest
def test_defaults_and_what_scripts_read_are_no_warnings_one_reason_is_one_and_so_is_no_verdict(
    qwen: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = qwen
    assert said(folder, "dpo", label_smoothing_factor=0.0, do_predict=False, per_device_train_batch_size=8) == []
    (warning,) = said(folder, do_eval=True, do_predict=True)
    assert warning.startswith("--do_eval, --do_predict have no effect with sft: ")
    assert len(said(folder, prediction_loss_only=True)) == 1
    call = PythonCall(path="nowhere", holds_model=False, holds_rows=False, digest="")
    assert said(folder, prediction_loss_only=True, call=call) == []
    monkeypatch.setattr(preflight_checks, "group_of", lambda method, name: None)
    (warning,) = said(folder, neftune_noise_alpha=5.0)
    assert warning.startswith("--neftune_noise_alpha: newer than this autofit")


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ALL = ["all-linear"]


def test_experts_that_lora_cannot_or_does_not_adapt_are_reported(model_folder: Folder) -> None:
    for family, arguments, kind, words in (
        ("qwen2", {}, None, ""),
        ("mixtral", {}, "warning", "--lora_target_parameters experts.down_proj experts.gate_up_proj --lora_dropout 0"),
        ("gpt_oss", {"lora_target_modules": ALL}, "warning", "does not adapt the experts"),
        ("gpt_oss", {"lora_target_parameters": EXPERTS}, "error", "--lora_dropout 0.05 cannot be applied"),
        ("gpt_oss", {"lora_target_parameters": EXPERTS, "use_peft": False}, "error", "Give --lora_dropout 0, or"),
        ("gpt_oss", {"lora_target_parameters": EXPERTS, "lora_dropout": 0.0}, None, ""),
        ("gpt_oss", {"lora_target_parameters": ["experts.w1", EXPERTS[0]]}, "error", "experts.w1 matches no parameter"),
        ("qwen3_moe", {"lora_target_modules": ALL, "lora_dropout": 0.0}, None, ""),
        ("qwen3_moe", {"lora_target_modules": ["gate_proj", "down_proj"]}, "error", "without also targeting up_proj"),
    ):
        findings = found(model_folder(family), **{"use_peft": True, **arguments})
        assert [finding.kind for finding in findings] == ([] if kind is None else [kind])
        assert all(words in f"{finding.message} {finding.cure}" for finding in findings), arguments


def test_trls_router_loss_needs_num_experts_and_fails_where_gkd_generates_with_a_cache(
    model_folder: Folder, tmp_path: pathlib.Path
) -> None:
    config = {"model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"], "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    without: dict[str, Any] = {"router_aux_loss_coef": 0.0}
    for arguments, count in (({}, 1), (without, 0), ({"loss_type": "nll"}, 0)):
        errors = [finding.cure for finding in found(tmp_path, **arguments) if finding.kind == "error"]
        assert len([cure for cure in errors if "--router_aux_loss_coef 0" in cure]) == count, arguments
    for arguments, count in (({}, 1), ({"gradient_checkpointing": True}, 0), (without, 0), ({"lmbda": 0.0}, 0)):
        findings = found(model_folder("qwen3_moe"), "gkd", **arguments)
        assert [finding.kind for finding in findings if "GKD generates" in finding.message] == ["error"] * count


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"use_peft": True}, "does not adapt the experts"), ({}, ""), ({"load_in_4bit": True}, "quantized already")],
)
def test_a_checkpoint_in_mxfp4_is_trained_and_not_quantized_again(
    arguments: dict[str, Any], words: str, model_folder: Folder, tmp_path: pathlib.Path
) -> None:
    config = json.loads((model_folder("gpt_oss") / "config.json").read_text())
    packed = {**config, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(packed))
    job = Job(method="sft", model=str(tmp_path), dataset=None, arguments=arguments)
    subject = ModelOnCard(job=job, config=load_config(str(tmp_path)), compute_capability=(8, 0))
    refused = [one.message for one in collect(table.MODEL, subject, UNFORESEEN)]
    texts = refused or [finding.message for finding in found(tmp_path, **arguments)]
    assert [words in text for text in texts] == ([True] if words else [])


# What is still to be downloaded: by the hub's own figures, or by the config where it does not answer.

CONFIG = Qwen2Config(**tiny_config("qwen2").to_dict() | {"tie_word_embeddings": True, "dtype": "bfloat16"})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The files of a model on a hub that answers, with their sizes."""
    files: dict[str, int] = {}

    def model_info(self: Any, model: str, **options: Any) -> Any:
        assert options["files_metadata"]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in files.items()])

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    return files


def size_of(model: str) -> int:
    found = download(model, CONFIG)
    assert found is not None
    assert found.folder == constants.HF_HUB_CACHE
    return found.size_bytes


def test_the_hub_has_the_sizes_and_only_safetensors_are_downloaded(hub: dict[str, int]) -> None:
    hub |= {"config.json": 7, "pytorch_model.bin": 90}
    assert size_of("org/name") == 90
    hub |= {f"model-0000{number}-of-00002.safetensors": 30 + number for number in (1, 2)}
    hub["original/x.safetensors"] = 90
    assert size_of("org/name") == 31 + 32


def test_without_an_answer_the_size_follows_from_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(CONFIG).parameters())
    assert size_of("org/name") == 2 * weights


def test_weights_on_disk_are_kept(hub: dict[str, int], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub["model.safetensors"] = 90
    assert download(str(tmp_path), CONFIG) is None
    index, shard = tmp_path / "index.json", tmp_path / "a.safetensors"
    index.write_text(json.dumps({"metadata": {"total_size": 90}, "weight_map": {"x": "a.safetensors"}}))
    cached: dict[str, str] = {"model.safetensors.index.json": str(index)}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda model, name, revision: cached.get(name))
    assert size_of("org/name") == 90, "an index alone is no model"
    cached["a.safetensors"] = str(shard)
    assert download("org/name", CONFIG) is None
    assert parameters_on_disk("org/name", SimpleNamespace(dtype=None)) == 90 // 4
