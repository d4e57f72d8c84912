"""Invalid requests are rejected before a worker is asked or anything is planned."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotrain_mem import api
from autotrain_mem.machine import choose
from autotrain_mem.methods.parameter_count import parameters
from autotrain_mem.parallel.place import Place
from autotrain_mem.planning.output_dir import check_weights
from autotrain_mem.run.early import refuse
from autotrain_mem.support import errors, sources
from autotrain_mem.training.checkpoints import write_manifest
from autotrain_mem.types import AutoFit, Job
from tests import fake_worker
from tests.fake_worker import FakeWorker
from tests.planning.test_compare_gpus import LARGE
from tests.planning.test_follow_plan import made_on


def test_a_model_that_reads_images_is_refused_where_nothing_can_read_them_and_one_without_weights_to_train_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    model.mkdir()
    (model / "tokenizer.json").touch()
    rows.write_text("{}\n")
    request = api.RunRequest(method="sft", model=str(model), dataset=str(rows), autofit=AutoFit(gpu="t4"))
    (model / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    refuse(request, to_train=False)
    (model / "config.json").write_text(json.dumps({"model_type": "gemma3", "vision_config": {}}))
    with pytest.raises(errors.MissingExtraError, match="Pillow"):
        refuse(request, to_train=False)
    refuse(request, to_train=False, reads_data=False)
    (model / "training_args.bin").touch()
    with pytest.raises(errors.ModelNotFoundError, match="holds no weights"):
        check_weights(model)
    (model / "pytorch_model.bin").touch()
    check_weights(model)


def test_a_folder_with_a_file_of_the_users_own_is_refused_also_where_a_plan_is_followed(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    job = Job(method="sft", model="here/m", dataset=None, arguments={"max_length": 64, "output_dir": str(tmp_path)})
    plan = api.plan(fake_worker.rehearsals(FakeWorker(), job, LARGE))
    request = api.RunRequest(method="sft", autofit=AutoFit(plan=plan))
    refuse(request, to_train=False)
    with pytest.raises(errors.OutputFolderError, match=r"\(README\.md\)"):
        refuse(request, to_train=True)
    refuse(replace(request, argv=("--output_dir", str(tmp_path / "new"))), to_train=True)
    follower = Place(rank=1, machines=2, address="", port=0)  # only the first machine uses the folder
    refuse(replace(request, place=follower), to_train=True)


def checkpoint(folder: Path, step: int, *names: str) -> None:
    for name in ("trainer_state.json", "scheduler.pt", *names, "rng_state_0.pth", "rng_state_1.pth"):
        file = folder / f"checkpoint-{step}" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"global_step": 3}' if name == "trainer_state.json" else "")
    (folder / f"checkpoint-{step}/autofit.checkpoint.json").write_text('{"run": "", "files": {}}')


def request(folder: Path, autofit: AutoFit, value: Any = True, **more: Any) -> api.RunRequest:
    config = {"output_dir": str(folder), "resume_from_checkpoint": value}
    return api.RunRequest(method="sft", config=config, autofit=autofit, **{"simulate": True, **more})


ZERO = "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt"


def test_ranks_that_cannot_read_it_are_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3, ZERO)
    refuse(request(tmp_path, AutoFit()), to_train=True)  # without a plan the sharding is not known yet
    with pytest.raises(errors.OutputFolderError, match="DeepSpeed resumes it only with that stage"):
        refuse(request(tmp_path, AutoFit(gpus=2, sharding="fsdp2")), to_train=True)
    made_on(2).save(tmp_path / "plan.json")
    with pytest.raises(errors.OutputFolderError, match="it is a DeepSpeed ZeRO-3 checkpoint of 2 ranks") as refused:
        refuse(request(tmp_path, AutoFit(gpus=4, sharding="fsdp2")), to_train=True)
    assert "--gpus 2 --sharding zero3" in refused.value.hint
    with pytest.raises(errors.OutputFolderError, match="ZeRO-3"):
        refuse(request(tmp_path, AutoFit(sharding="fsdp2"), str(tmp_path / "checkpoint-3")), to_train=True)
    refuse(request(tmp_path, AutoFit(sharding="zero3")), to_train=True)


def test_another_seed_is_refused_before_anything_is_planned_unless_the_epoch_begins_anew(tmp_path: Path) -> None:
    for step, seed in ((3, "7"), (6, "42")):
        checkpoint(tmp_path, step, "optimizer.pt")
        write_manifest(tmp_path / f"checkpoint-{step}", {}, "", {"--seed": seed, "--dataset": "of 13 rows"})
    with pytest.raises(
        errors.OutputFolderError, match=r"checkpoint-6 was trained .*: --seed 42 in the checkpoint, 7 now"
    ):
        refuse(request(tmp_path, AutoFit(), argv=("--seed", "7")), to_train=True)
    refuse(request(tmp_path, AutoFit(), argv=("--seed=42", "--data_seed", "1")), to_train=True)
    refuse(request(tmp_path, AutoFit(), argv=("--seed", "7", "--ignore_data_skip")), to_train=True)


def test_one_checkpoint_that_can_be_read_is_enough_but_a_simulated_run_needs_its_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_on(2).save(tmp_path / "plan.json")
    checkpoint(tmp_path, 3, "optimizer.pt")
    monkeypatch.setattr(choose, "detect", lambda *_: ())
    with pytest.raises(errors.NoGpuError, match=r"used the simulated card .* No NVIDIA GPU was found") as refused:
        refuse(request(tmp_path, AutoFit(), simulate=False), to_train=True)
    assert refused.value.hint.startswith("Add --simulate")
    checkpoint(tmp_path, 6, ZERO)
    refuse(request(tmp_path, AutoFit(gpus=4, sharding="ddp")), to_train=True)
    checkpoint(tmp_path, 9, "pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata")
    refuse(request(tmp_path, AutoFit(gpus=4, sharding="fsdp2")), to_train=True)


def test_gpus_that_do_not_divide_the_batch_are_refused_with_those_that_do(tmp_path: Path) -> None:
    plan = made_on(2)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(errors.UsageError, match="3 GPUs do not divide the run's effective batch of 16 rows") as refused:
        refuse(request(tmp_path, AutoFit(gpus=3)), to_train=True)
    assert "--gpus 2 or 4" in refused.value.hint
    with pytest.raises(errors.UsageError, match="3 GPUs"):
        refuse(replace(request(tmp_path / "elsewhere", AutoFit(gpus=3)), plan=plan), to_train=True)


NUMBERS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "intermediate_size")


def config(kind: str, vocabulary: int, *numbers: int) -> dict[str, Any]:
    return {"model_type": kind, "vocab_size": vocabulary, **dict(zip(NUMBERS, numbers, strict=True))}


TIED = {"tie_word_embeddings": True}
QWEN = config("qwen2", 151_936, 896, 14, 2, 24, 4864) | TIED
LLAMA = config("llama", 128_256, 4096, 32, 8, 32, 14_336)
QWEN3 = config("qwen3", 151_936, 1024, 16, 8, 28, 3072) | TIED | {"head_dim": 128}


def test_parameters_are_counted_for_known_decoders_only() -> None:
    for config, count in (
        (QWEN, 494_032_768),  # according to the models' cards and safetensors
        (LLAMA, 8_030_261_248),
        (QWEN3, 596_049_920),
        (LLAMA | {"model_type": "mixtral"}, None),
        (LLAMA | {"attention_bias": True}, None),
        (LLAMA | {"hidden_size": None}, None),
        ({"model_type": "llama"}, None),
    ):
        assert parameters(config) == count, config
