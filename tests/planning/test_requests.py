"""A request becomes a job on its own card, with what configs of accelerate's, DeepSpeed's or PEFT's say; and what a
worker answered is kept as long as nothing that it depends on has changed, and no longer.
"""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, patch

import pytest
import yaml
from nouns import TRL_DEFAULTS

from autotrain_mem import api
from autotrain_mem.checks.flag_checks import Flags, quantization
from autotrain_mem.exports.tools import check
from autotrain_mem.machine.catalog import named
from autotrain_mem.machine.overhead import COMMUNICATOR_BYTES
from autotrain_mem.planning import for_processes, kept_answers, read_request, rehearsals
from autotrain_mem.planning.accelerate_config import launch_warnings, with_accelerate
from autotrain_mem.planning.kept_answers import answered, is_parsed, parsed
from autotrain_mem.planning.predictions import Predictions
from autotrain_mem.planning.read_request import with_peft_config
from autotrain_mem.planning.run_request import RunRequest, no_model
from autotrain_mem.run import early
from autotrain_mem.settings.trl_parser import TrlFlag, TrlFlags, keep_all_flags, keep_flags
from autotrain_mem.support.errors import ModelNotFoundError, UnknownGpuError, UsageError
from autotrain_mem.support.store import Store, cache_folder
from autotrain_mem.types import AutoFit, Hardware, Job, PythonCall
from autotrain_mem.types.findings import collect
from autotrain_mem.worker import pool

FSDP2: dict[str, Any] = {
    "distributed_type": "FSDP",
    "num_processes": 8,
    "num_machines": 2,
    "mixed_precision": "bf16",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    },
}
RECOMPUTES = FSDP2 | {"fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}}
OPEN = FSDP2 | {"num_processes": -1}
HSDP = FSDP2 | {
    "parallelism_config": {"parallelism_config_dp_replicate_size": 4, "parallelism_config_dp_shard_size": 2}
}
CONFIG = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
NO_OFFLOAD = {"fsdp_offload_params": False}


def request(config: Any, *argv: str, **words: Any) -> RunRequest:
    return RunRequest(method="sft", model="tiny", argv=argv, autofit=AutoFit(accelerate_config=config, **words))


def test_a_file_says_how_processes_are_launched(tmp_path: Path) -> None:
    for config, words, gpus, pins, arguments in (
        ({"distributed_type": "NO"}, {}, 1, {}, {}),
        (FSDP2, {}, 4, NO_OFFLOAD, {"bf16": True}),
        (OPEN, {"gpus": 2}, 2, NO_OFFLOAD, {"bf16": True}),
        (HSDP, {}, 4, NO_OFFLOAD | {"dp_replicate_size": 4}, {"bf16": True}),
        (RECOMPUTES, {}, 4, NO_OFFLOAD, {"bf16": True, "gradient_checkpointing": False}),
    ):
        path = tmp_path / "fsdp.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        read = with_accelerate(request(path, **words))
        assert (read.autofit.gpus, read.pins, read.config) == (gpus, pins, arguments)
        assert read.accelerate == config | {"num_processes": gpus * (read.autofit.nodes or 1)}
        assert with_accelerate(read) == read
        assert read.job({}).accelerate == read.accelerate
        assert launch_warnings(request(path)) == ()
        assert ("SHARDED_STATE_DICT" in " ".join(launch_warnings(read))) is (config is RECOMPUTES)
    path.write_text("distributed_type: 'NO'\nnum_processes: 8\n", encoding="utf-8")
    alone = with_accelerate(request(path))
    assert (alone.autofit.gpus, len(launch_warnings(alone))) == (1, 1)


def test_flags_that_contradict_it_are_named() -> None:
    for made, words in (
        (request(FSDP2, gpus=8), "--gpus 8 num_processes 8"),
        (request(OPEN), "--gpus num_processes"),
        (request(FSDP2, nodes=1), "--nodes 1 num_machines 2"),
        (request(FSDP2, sharding="ddp"), "--sharding ddp fsdp2"),
        (request(FSDP2, fsdp_offload_params=True), "--fsdp_offload_params true"),
        (request(None, "--deepspeed", json.dumps(CONFIG), sharding="zero2"), "--sharding zero2 zero3 --deepspeed"),
        (request(RECOMPUTES, "--gradient_checkpointing"), "--gradient_checkpointing fsdp_activation_checkpointing"),
        (request(FSDP2, "--fp16"), "--fp16 bf16"),
        (request(FSDP2 | {"mixed_precision": "fp16"}, "--bf16", "true"), "--bf16 fp16"),
        (replace(with_accelerate(request(FSDP2)), autofit=AutoFit(gpus=2)), "--gpus 2 num_processes plan's"),
    ):
        with pytest.raises(UsageError) as error:
            with_accelerate(made)
        assert [word for word in words.split() if word not in str(error.value)] == [], words


def test_what_it_says_is_said_by_flags(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    for given in (str(tmp_path / "ds.json"), json.dumps(CONFIG)):
        read = with_accelerate(request(None, "--deepspeed", given, "--max_length", "64"))
        assert read.argv == ("--max_length", "64")
        assert (read.autofit.sharding, read.autofit.offload_param_device) == ("zero3", "cpu")
        assert read.config["per_device_train_batch_size"] == 4
        assert read.config["deepspeed"]["train_micro_batch_size_per_gpu"] == "auto"
        assert with_accelerate(read) == read


ALONE = {"distributed_type": "DEEPSPEED", "num_processes": 1, "deepspeed_config": {"zero_stage": 3}}


def launched(deepspeed: dict[str, Any], **given: Any) -> RunRequest:
    content = {"distributed_type": "DEEPSPEED", "num_processes": 4, "mixed_precision": "bf16"}
    return with_accelerate(request({**content, "deepspeed_config": deepspeed}, **given))


def test_a_config_of_accelerates_says_it_by_flags_too(tmp_path: Path) -> None:
    read = launched({"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "none"})
    assert (read.autofit.gpus, read.autofit.sharding) == (4, "zero3")
    assert (read.autofit.offload_optimizer_device, read.autofit.offload_param_device) == ("cpu", None)
    assert (read.accelerate, read.autofit.accelerate_config, read.config) == (None, None, {"bf16": True})
    assert with_accelerate(read) == read
    assert launched({"gradient_accumulation_steps": 4}).config["gradient_accumulation_steps"] == 4
    assert launched({"gradient_accumulation_steps": "auto"}).autofit.sharding == "zero2"
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    read = launched({"deepspeed_config_file": str(tmp_path / "ds.json")}, sharding="zero3")
    assert (read.autofit.gpus, read.autofit.sharding, read.autofit.offload_param_device) == (4, "zero3", "cpu")
    alone = with_accelerate(request(ALONE))
    assert (alone.autofit.gpus, alone.autofit.sharding) == (1, "zero3")
    with pytest.raises(UsageError, match="--sharding zero2"):
        launched({"zero_stage": 3}, sharding="zero2")


VERA = {"peft_type": "VERA", "r": 256, "inference_mode": True}


def test_a_folder_a_file_the_keys_and_json_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(VERA))
    read = [with_peft_config(request(None, peft_config=each)) for each in (tmp_path, str(file), VERA, json.dumps(VERA))]
    assert {one.autofit.peft_config for one in read} == {'{"peft_type": "VERA", "r": 256}'}
    assert read[0].autofit.pins == {"peft_config": '{"peft_type": "VERA", "r": 256}', "use_peft": True}
    assert with_peft_config(replace(read[0], argv=("--use_peft",))).autofit == read[0].autofit, "a plan hands it on"


def test_what_cannot_be_is_refused() -> None:
    for config, argv, words in (
        ("nowhere", (), "nowhere cannot be read"),
        ("{", (), "is not JSON"),
        ('{"r": 8}', (), "has no peft_type"),
        (VERA, ("--use_peft", "false"), "--use_peft false and --peft_config contradict"),
        (VERA, ("--lora_r", "4", "--use_dora"), "--lora_r, --use_dora and --peft_config both"),
        ({"peft_type": "LOKR"}, ("--load_in_4bit",), "--load_in_4bit does not work with LOKR"),
        ({"peft_type": "PREFIX_TUNING"}, ("--gradient_checkpointing",), "has no prefix"),
        ({"peft_type": "LORA", "init_lora_weights": "eva"}, (), "initialize_lora_eva_weights"),
    ):
        with pytest.raises(UsageError) as caught:
            with_peft_config(request(None, *argv, peft_config=config))
        assert words in caught.value.message
        assert caught.value.hint


def test_a_script_hears_the_same() -> None:
    loha = {"peft_config": '{"peft_type": "LOHA"}', "load_in_8bit": True, "use_peft": True}
    unknown = {"peft_config": '{"peft_type": "SHIRA"}'}
    for given, words in ((unknown, "SHIRA is not supported"), (loha, "--load_in_8bit does not work with LOHA")):
        (finding,) = collect([quantization], Flags(method="sft", given=given))
        assert words in finding.message


def test_no_tools_file_trains_another_adapter() -> None:
    shared = {"is_zero": False, "token_shards": 1}
    check("commands", "sft", peft_config="{}", **shared)
    check("trl", "sft", peft_config=None, **shared)
    with pytest.raises(UsageError, match="has no key for a config of PEFT's own"):
        check("axolotl", "sft", peft_config="{}", **shared)


ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "1,0"}
CARD = replace(named("rtx3090"), origin="detected", uuid="GPU-1")


def test_an_env_block_chooses_the_card_to_plan_for_and_to_train_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(name: str | None, *, environment: Any, **others: Any) -> Hardware:
        return CARD if environment == ENVIRONMENT else named("t4")

    monkeypatch.setattr(read_request, "choose", choose)
    workers: Any = SimpleNamespace(first=SimpleNamespace(parse=lambda *words: ({}, TRL_DEFAULTS)))
    rehearsals = api.rehearsals_for(workers, api.RunRequest(method="sft", model="tiny", environment=ENVIRONMENT), print)
    assert rehearsals.hardware is CARD
    plan: Any = SimpleNamespace(knobs=TRL_DEFAULTS)
    assert api.training_environment(rehearsals, plan, simulate=False)["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    elsewhere = replace(rehearsals, hardware=named("t4"))  # an export for a card that is not here
    assert api.training_environment(elsewhere, plan, simulate=False)["CUDA_VISIBLE_DEVICES"] == "1"


def test_defaults_are_those_of_one_of_all_processes_and_a_sharding_is_the_jobs_word() -> None:
    def parse(method: str, argv: Any, config: Any, environment: Any, names: Any, pins: Any, own: Any) -> Any:
        return dict(pins), TRL_DEFAULTS

    workers: Any = SimpleNamespace(first=SimpleNamespace(parse=parse))
    for words, processes, sharding, groups, communicators in (
        ({}, 1, None, None, 0),
        ({"gpus": 4}, 4, "ddp", None, 1),
        ({"gpus": 4, "sharding": "fsdp2"}, 4, "ddp", None, 1),
        ({"gpus": 8, "nodes": 2, "sharding": "hsdp"}, 16, "ddp", 2, 3),
    ):
        request = api.RunRequest(method="sft", model="tiny", autofit=AutoFit(gpu="a100-80gb", **words))
        rehearsals = api.rehearsals_for(workers, request, print)
        defaults = rehearsals.defaults
        assert (defaults.processes, defaults.sharding, defaults.dp_replicate_size) == (processes, sharding, groups)
        assert rehearsals.job.arguments.get("sharding") == words.get("sharding")
        assert rehearsals.job.trl_arguments == {}
        # NCCL's buffers are no part of the allocator's room, and are counted once for each group that talks.
        needed = rehearsals.outside_bytes(replace(defaults, sharding=words.get("sharding", sharding)))
        assert needed == rehearsals.hardware.non_torch_bytes + communicators * COMMUNICATOR_BYTES
        assert "sharding" in words or rehearsals.on(named("t4")).defaults == TRL_DEFAULTS


def test_a_run_whose_plan_cannot_be_followed_is_gone_on_with_and_says_so(tmp_path: Path) -> None:
    request = api.RunRequest(method="sft", argv=("--resume_from_checkpoint", "--output_dir", str(tmp_path)))
    notes: list[str] = []
    assert api.resumed(request, notes.append) is request
    assert not notes, "there is no plan"
    (tmp_path / "plan.json").write_text('{"schema": "autofit.plan/1"}')
    assert api.resumed(request, notes.append) is request
    assert "continues with a new plan" in notes[0]
    assert "autofit.plan/1" in notes[0]


LONG_AGO = 1_700_000_000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "cache")
    keep_flags(store, "sft", TrlFlags(flags=FLAGS, help=""))
    return store


def write(file: Path, text: str) -> str:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    os.utime(file, (LONG_AGO, LONG_AGO + len(text)))
    return str(file)


WISH = api.RunRequest(method="sft", model="org/tiny", argv=("--learning_rate", "1e-4", "--eval_steps=2", "--bf16"))
WRITTEN = {"resume_from_checkpoint": True, "output_dir": "run"}
AGAIN = replace(WISH, argv=(*WISH.argv, "--resume_from_checkpoint", "--output_dir=run"))
AS_PLANNED = {"learning_rate": 1e-4, "eval_steps": 2.0, "bf16": True, "output_dir": "run"}


@pytest.mark.parametrize(
    ("given", "other", "asked"),
    [
        ({}, AGAIN, 1),
        ({}, replace(AGAIN, argv=("--resume_from_checkpoint",), config=AS_PLANNED, autofit=AutoFit(gpus=1)), 1),
        ({}, replace(AGAIN, argv=(*AGAIN.argv, "--learning_rate", "2e-4")), 2),
        ({}, replace(AGAIN, config={"packing_strategy": "bfd"}), 2),
        ({}, replace(AGAIN, autofit=AutoFit(gpu="l4")), 2),
        ({}, replace(AGAIN, environment={"HF_HOME": "elsewhere"}), 2),
        ({"hub_token": "hf_secret"}, AGAIN, 2),
    ],
)
def test_the_same_values_are_parsed_once_also_for_a_resume_and_a_token_is_never_kept(
    given: dict[str, Any], other: api.RunRequest, asked: int, store: Store, tmp_path: Path
) -> None:
    workers = Mock()
    workers.first.parse.side_effect = [(given, TRL_DEFAULTS), (given | WRITTEN, TRL_DEFAULTS)]
    assert not is_parsed(store, WISH)
    assert parsed(store, workers, WISH) == (given, TRL_DEFAULTS)
    assert parsed(store, workers, other) == (given | WRITTEN, TRL_DEFAULTS)
    assert workers.first.parse.call_count == asked
    assert not [file for file in (tmp_path / "cache").glob("*") if b"hf_secret" in file.read_bytes()]


def test_what_runs_the_users_code_is_asked_each_time(store: Store) -> None:
    workers = Mock()
    workers.first.parse.return_value = {}, TRL_DEFAULTS
    for name in ("reward_funcs", "trust_remote_code"):
        request = replace(WISH, config={name: "true"})
        parsed(store, workers, request)
        assert not is_parsed(store, request), name
        assert asked_twice(store, Job(method="grpo", model="m", dataset=None, arguments={name: "true"})) == 2, name


def asked_twice(store: Store, job: Job, between: Callable[[], object] = lambda: None) -> int:
    ask = Mock(return_value="answer")
    for _ in range(2):
        assert answered(store, job, "data", {}, str, ask, reads_data=True) == "answer"
        between()
    return ask.call_count


def test_an_answer_counts_as_long_as_no_file_changes_and_no_new_commit_is_there(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    data, model = tmp_path / "rows.jsonl", tmp_path / "model"
    local = Job(method="sft", model=str(model), dataset=write(data, "a"))
    write(model / "config.json", "{}")
    assert asked_twice(store, local) == 1
    resumed = {"output_dir": str(tmp_path), "resume_from_checkpoint": str(tmp_path / "checkpoint-4")}
    assert asked_twice(store, replace(local, arguments=resumed, unrecorded=("TOKEN",))) == 0
    assert asked_twice(store, replace(local, fit="lossless")) == 1
    write(data, "ab")
    assert asked_twice(store, local, lambda: write(data, "abc")) == 2
    data.touch()  # it may be written again within the resolution of its date
    assert asked_twice(store, local) == 2
    hub = Job(method="sft", model="org/tiny", dataset=write(data, "a"))
    ref = tmp_path / "hub" / "models--org--tiny" / "refs"
    ref.mkdir(parents=True)
    assert asked_twice(store, hub, lambda: write(ref / "main", "commit")) == 2
    assert asked_twice(store, hub) == 0


def test_an_answer_about_a_hub_id_counts_for_an_hour(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Job(method="sft", model="org/tiny", dataset="org/data")
    now = [2.0e9]
    monkeypatch.setattr(kept_answers.time, "time", lambda: now[0])
    assert asked_twice(store, hub) == 1
    now[0] += kept_answers.HUB_SECONDS
    assert asked_twice(store, hub) == 1


KINDS = dict.fromkeys(("output_dir", "resume_from_checkpoint", "reward_funcs", "trust_remote_code"), "str")
KINDS |= dict.fromkeys(("learning_rate", "warmup_steps"), "float") | {"bf16": "string_to_bool"}
KINDS |= {"eval_steps": "_accept_none.<locals>.parse"}
FLAGS = (
    *(TrlFlag(names=(f"--{name}",), dest=name, nargs=None, kind=kind, choices=None) for name, kind in KINDS.items()),
    TrlFlag(names=("--packing_strategy",), dest="packing_strategy", nargs=None, kind="str", choices=("bfd", "wrapped")),
    TrlFlag(names=("--no_bf16",), dest="bf16", nargs=0, kind="", choices=None),
)
BETA = TrlFlag(names=("--beta",), dest="beta", nargs=None, kind="float", choices=None)


def test_a_typo_is_told_by_kept_flags_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFIT_CACHE", str(tmp_path))
    tables = {"sft": TrlFlags(flags=FLAGS, help=""), "dpo": TrlFlags(flags=(*FLAGS, BETA), help="")}
    early.refuse_flags(replace(WISH, argv=("--learnig_rate", "1")))  # nothing was kept: a worker reads them
    keep_all_flags(Store(cache_folder()), tables)
    for argv, config, message in (
        (("--learnig_rate", "1"), {}, "did you mean --learning_rate"),
        (("--learning_rate", "abc"), {}, "invalid float value: 'abc'"),
        (("--packing_strategy", "bfdd"), {}, "Did you mean bfd"),
        (("--beta", "0.1"), {}, "a flag of dpo"),
        ((), {"learning_ratt": 1}, "did you mean learning_rate"),
        (("--use-flash-attention-2",), {}, "--attn_implementation flash_attention_2"),
        (("--num_machines=2", "--past_index", "1"), {}, "--nodes N\n--past_index: removed in transformers 5"),
        ((), {"learning_rate": "abc"}, "invalid float value: 'abc'"),
        (("--bf16", "perhaps", "--learning_rate=1"), {}, ""),
        (("--bf16",), {"warmup_ratio": 0.03}, ""),
        (("--warmup_ratio", "3"), {}, "3 is not a share; --warmup_steps 3 counts steps"),
        (("--warmup_ratio=0.1",), {"warmup_steps": 5}, ""),
        (("--warmup_ratio=0.1", "--warmup_steps=5"), {}, "Remove --warmup_ratio."),
        (("--no_bf16",), {"learning_rate": 1e-4}, ""),
    ):
        request = replace(WISH, argv=argv, config=config)
        with pytest.raises(UsageError) if message else nullcontext() as caught:
            early.refuse_flags(request)
        assert caught is None or message in f"{caught.value.message} {caught.value.hint}", (argv, config)


def test_what_needs_no_trl_is_refused_before_a_worker_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(count: int | None) -> None:
        raise AssertionError("a worker")

    monkeypatch.setattr(pool, "Workers", made)
    monkeypatch.setattr(for_processes, "find_spec", lambda name: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for autofit, model, refused, said in (
        (AutoFit(gpu="rtx309"), "tiny", UnknownGpuError, "rtx309"),
        (AutoFit(gpu="a100-80gb", gpus=4, sp_size=3), "tiny", UsageError, "does not divide 4 GPUs"),
        (AutoFit(gpu="a100-80gb", gpus=2, sharding="zero2"), "tiny", UsageError, "which is not installed"),
        (AutoFit(gpu="a100-80gb"), "somebody/no-such-model", ModelNotFoundError, "HF_HUB_OFFLINE forbids"),
    ):
        request = replace(WISH, autofit=autofit, model=model)
        with pytest.raises(refused, match=said), early.opened(request, to_train=False):
            pass
        with pytest.raises(AssertionError, match="a worker"), early.opened(request, to_train=False, is_late=True):
            pass


def test_a_typo_of_model_is_named_where_the_flags_of_trl_are_not_known_yet() -> None:
    assert no_model(["sft", "--model_revision", "--modle=tiny"]).message.endswith("Did you mean --model by --modle?")
    assert no_model(["--max_length", "8"]).message == "No model is given."


@pytest.mark.parametrize(("streams", "missing"), [("script", []), ("command", ["--max_steps N"])])
def test_a_stream_needs_a_limit_of_its_rows_and_of_the_command_its_number_of_steps(
    streams: str, missing: list[str]
) -> None:
    call = PythonCall(path="call", holds_model=False, holds_rows=False, digest="")
    given: dict[str, Any] = {"dataset_streaming": True} if streams == "command" else {}
    job = Job(method="sft", model="m", dataset=None, arguments=given, python_call=call if streams == "script" else None)
    with pytest.raises(UsageError) as error:
        rehearsals.stream_lengths(job)
    named = [flag for flag in ("--max_length N", "--max_steps N") if flag in error.value.hint]
    assert named == ["--max_length N", *missing]
    limited = replace(job, arguments={**given, "max_length": 64, **({"max_steps": 3} if missing else {})})
    assert "64 tokens" in rehearsals.stream_lengths(limited).why_not


@pytest.mark.parametrize(
    ("workers", "depths", "are_started", "begun"),
    [(2, None, True, 2), (1, None, True, 0), (2, "few layers", True, 0), (2, None, False, 0)],
)
def test_idle_workers_begin_what_may_be_asked_for_if_few_layers_do_not_suffice(
    workers: int, depths: str | None, are_started: bool, begun: int
) -> None:
    subject = MagicMock(**{"hardware.capability": (8, 0), "facts.depths_for.return_value": depths})
    subject.workers.are_started = are_started
    begin, done = subject.workers.begin, subject.workers.begin.return_value.done
    subject.workers.__len__.return_value, done.return_value = workers, False
    subject.workers.result.side_effect = InterruptedError
    points = [replace(TRL_DEFAULTS, per_device_train_batch_size=rows) for rows in range(1, 4)]
    predictions = Predictions(subject)
    with patch.object(Predictions, "_known", return_value=None):
        predictions.foresee(points, whole=False)
        assert begin.call_count == begun
        with pytest.raises(InterruptedError):
            predictions.rehearse(points[:1], whole=True)
        done.return_value = True
        subject.workers.result.call_args.args[1]()
    assert begin.call_count == begun + 1
