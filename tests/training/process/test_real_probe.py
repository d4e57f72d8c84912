"""The probe's own side: a real trainer on its longest rows, on a simulated card, told phase by phase."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nouns import TRL_DEFAULTS
from tiny import tiny_folder

from autotrain_mem.cli.word_problems import write_rows
from autotrain_mem.machine import catalog
from autotrain_mem.rehearsal.simulated_run import simulated_device
from autotrain_mem.support import codec
from autotrain_mem.support.units import MIB
from autotrain_mem.training.process import probe as probing
from autotrain_mem.training.process.probe import probe, probe_changes
from autotrain_mem.training.task import Request
from autotrain_mem.types import Job, Phase, Probe

KNOBS = replace(
    TRL_DEFAULTS,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=3,
    max_length=128,
    gradient_checkpointing=False,
)
WORDS = [3, 5, 4, 60, 6, 2, 40, 3]
"""Of each row; two rows are far longer than the rest."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    tiny_folder(folder / "tiny", "qwen2")
    (folder / "splits").mkdir()
    texts = [{"text": "word " * count} for count in WORDS]
    pairs = [{"prompt": "word", "chosen": "word " * n, "rejected": "word " * (n // 2)} for n in WORDS]
    prompts = [{"prompt": "word " * count} for count in WORDS]
    named = {"rows": texts, "splits/train": texts, "splits/test": texts[::-1], "pairs": pairs, "prompts": prompts}
    for name, rows in named.items():
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def probed(
    place: Path, folder: Path, method: str = "sft", data: str = "rows.jsonl", gpu: str = "300MiB", **changes: Any
) -> Probe:
    knobs = changes.pop("knobs", KNOBS)
    job = Job(method=method, model=str(place / "tiny"), dataset=str(place / data), arguments=changes)
    request = Request(
        task="probe", job=job, knobs=knobs, hardware=catalog.named(gpu), simulate=True, output_dir=str(folder)
    )
    answer = probe(request, lambda event: None, simulated_device)
    assert answer["event"] == "probe"
    return codec.from_json(Probe, json.loads(json.dumps(answer["probe"])))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and tokens of every batch that a probed trainer computes a loss of."""
    seen: list[tuple[int, int]] = []
    build = probing.build

    def watched(*args: Any) -> Any:
        trainer = build(*args)
        compute = trainer.compute_loss

        def compute_loss(model: Any, inputs: Mapping[str, Any], *more: Any, **options: Any) -> Any:
            seen.append(tuple(inputs["input_ids"].shape))
            return compute(model, inputs, *more, **options)

        trainer.compute_loss = compute_loss
        return trainer

    monkeypatch.setattr(probing, "build", watched)
    return seen


def test_two_steps_are_made_on_the_longest_rows_then_an_evaluation_and_a_save(
    place: Path, tmp_path: Path, batches: list[tuple[int, int]]
) -> None:
    evaluates = {"eval_strategy": "epoch", "per_device_eval_batch_size": 2, "eval_on_start": True}
    made = probed(place, tmp_path, data="splits", **evaluates)
    assert made.fits
    assert batches == [(2, made.row_tokens)] * (4 + 2)  # two micro-batches a step, two batches of an evaluation
    step = [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP]
    assert [*made.phases] == [Phase.LOAD, *step, Phase.EVALUATE, Phase.SAVE]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert made.step_seconds is not None
    assert made.measured is not None
    assert made.measured.peak_allocated_bytes == max(peak.allocated_bytes for peak in made.phases.values())
    assert made.measured.peak_reserved_bytes == max(peak.reserved_bytes for peak in made.phases.values())
    loaded, backward = made.phases[Phase.LOAD], made.phases[Phase.BACKWARD]
    assert 0 < loaded.allocated_bytes < backward.allocated_bytes


def test_a_card_that_is_full_is_an_answer_with_the_phase_and_the_libraries_words(place: Path, tmp_path: Path) -> None:
    made = probed(place, tmp_path, gpu="24MiB")
    assert not made.fits
    assert made.refused.startswith("CUDA out of memory. Tried to allocate")
    assert made.refused_in in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP)
    assert list(made.phases)[-1] is made.refused_in
    assert made.measured is not None
    assert made.measured.peak_reserved_bytes <= 24 * MIB


def test_pairs_are_as_long_as_prompt_and_longer_side_and_no_reference_scores_them_all(
    place: Path, tmp_path: Path, batches: list[tuple[int, int]]
) -> None:
    made = probed(place, tmp_path, "dpo", "pairs.jsonl", save_strategy="no", precompute_ref_log_probs=True)
    assert made.fits
    assert batches == [(2 * 2, made.row_tokens)] * 4
    assert (tmp_path / "model.safetensors").is_file()  # what a training without checkpoints writes at its end


def test_completions_have_their_full_length(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(place))
    (place / "probe_rewards.py").write_text(
        "def length(completions, completion_ids, **_):\n    return LENGTHS.append("
        "[len(ids) for ids in completion_ids]) or [0.0] * len(completions)\nLENGTHS = []\n"
    )
    knobs = replace(KNOBS, max_length=None, num_generations=2, max_completion_length=3)
    made = probed(
        place, tmp_path, "rloo", "prompts.jsonl", knobs=knobs, reward_funcs=["probe_rewards.length"], save_strategy="no"
    )
    import probe_rewards  # type: ignore[import-not-found]

    assert probe_rewards.LENGTHS == [[3] * 6] * 2
    assert {Phase.GENERATE, Phase.SCORE} <= made.phases.keys()


def test_nothing_of_a_probe_is_seen_outside() -> None:
    loud = {"push_to_hub": True, "load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
    quiet = {"report_to": "none", "push_to_hub": False, "load_best_model_at_end": False}
    for arguments, strategies in (
        (loud, {"eval_strategy": "steps", "save_strategy": "steps"}),
        ({"save_strategy": "no"}, {"eval_strategy": "no", "save_strategy": "no"}),
    ):
        changes = probe_changes(Job(method="sft", model="m", dataset=None, arguments=arguments), KNOBS)
        assert changes.items() >= {**quiet, **strategies, "gradient_accumulation_steps": 2}.items()
