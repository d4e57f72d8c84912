"""Real trainers save, lose a checkpoint, and resume: the losses are those of an undisturbed run, also from shards."""

import copy
import errno
import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import tiny_trainers
import torch
import torch.distributed.checkpoint as dcp
from datasets import Dataset, concatenate_datasets
from nouns import TRL_DEFAULTS
from peft import LoraConfig
from safetensors.torch import load_file
from tiny import tiny_folder
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing import assert_close
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import TrainerCallback

from autotrain_mem.report.run_history import event_line
from autotrain_mem.support.errors import OutputFolderError, TrainingError
from autotrain_mem.training import checkpoints
from autotrain_mem.training.process import checkpointing, resharding, train
from autotrain_mem.training.process.finite_values import FiniteValues
from autotrain_mem.training.process.train import ResumedRun
from autotrain_mem.training.process.world import World

STEPS = 7
"""Of 13 rows by 4: into the second pass over the data."""
ORDER = {"--seed": "42", "--dataset": "of 13 rows (0ff)"}
LORA = {"build": {"peft_config": LoraConfig(r=4, lora_dropout=0.1)}}
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": STEPS, "per_device_train_batch_size": 4}


class SaveShards(TrainerCallback):  # type: ignore[misc]
    """Writes beside each checkpoint what FSDP's ranks would."""

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        whole = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        shards = whole.with_name(f"shards-{state.global_step}")
        shutil.copytree(whole, shards, ignore=shutil.ignore_patterns("*.safetensors", "optimizer.pt"))
        weights = load_file(next(whole.glob("*model.safetensors")))
        if "transformer.wte.weight" in weights:  # FSDP's ranks write both names of a tied weight
            weights["lm_head.weight"] = weights["transformer.wte.weight"]
        _save({"model": weights}, shards / "pytorch_model_fsdp_0")
        _save({"optimizer": get_optimizer_state_dict(model, optimizer)}, shards / "optimizer_0")


def _save(state: dict[str, Any], folder: Path) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def _trainer(model: Path, folder: Path, **changes: Any) -> tuple[Any, list[dict[str, Any]]]:
    made = tiny_trainers.trainer("sft", model, folder, **SAVING | changes)
    told: list[dict[str, Any]] = []
    made.add_callback(ResumedRun(made))
    made.autofit_order = ORDER
    checkpointing.follow_saving(made, lambda event: told.append(dict(event)), "", World(made.args))
    return made, told


@pytest.fixture(scope="module")
def calm(gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that nothing befalls, with dropout: random numbers count."""
    return _undisturbed(gpt2, tmp_path_factory.mktemp("calm"))


@pytest.fixture(scope="module", params=["full", "LoRA"])
def either(request: pytest.FixtureRequest, calm: Any, gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return calm if request.param == "full" else _undisturbed(gpt2, tmp_path_factory.mktemp("lora"), **LORA)


def _undisturbed(model: Path, folder: Path, **changes: Any) -> Any:
    made, made_told = _trainer(model, folder, **changes)
    made.add_callback(SaveShards())
    made.train()
    made.told, made.changes = made_told, changes
    return made


def _gone_on_with(calm: Any, model: Path, folder: Path, step: int, **changes: Any) -> Any:
    shutil.copytree(Path(calm.args.output_dir) / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    made, _ = _trainer(model, folder, **changes)
    made.train(resume_from_checkpoint=str(checkpoints.newest_whole(folder).path))
    return made


def _assert_same(made: Any, calm: Any) -> None:
    (logged, weights), (expected, expected_weights) = map(tiny_trainers.outcome, (made, calm))
    assert made.state.global_step == STEPS
    for name in ("loss", "num_tokens"):
        assert [entry[name] for entry in logged[:STEPS]] == [entry[name] for entry in expected[:STEPS]]
    assert weights == expected_weights


def test_every_checkpoint_is_told_and_ends_with_its_manifest(calm: Any) -> None:
    steps = [2, 4, 6, STEPS]
    assert [(event["event"], event["step"]) for event in calm.told] == [
        (kind, step) for step in steps for kind in ("saving", "checkpoint")
    ]
    for event in calm.told[1::2]:
        assert checkpoints.why_not_whole(Path(event["path"])) == ""
        assert json.loads((Path(event["path"]) / checkpoints.MANIFEST).read_text())["order"] == ORDER


@pytest.mark.parametrize("step", [4, 6, STEPS])
def test_a_run_that_goes_on_is_the_same_to_the_bit(calm: Any, gpt2: Path, tmp_path: Path, step: int) -> None:
    """Where the second pass over the data begins, within it, and where only the model is missing."""
    made = _gone_on_with(calm, gpt2, tmp_path, step)
    _assert_same(made, calm)


def test_other_micro_batches_go_on_with_the_same_rows_steps_and_schedule(tmp_path: Path) -> None:
    """Two rows at once, twice, where it were four: no dropout here, whose masks are drawn for a batch."""
    model = tiny_folder(tmp_path / "model", "qwen2")
    calm, _ = _trainer(model, tmp_path / "calm")
    calm.train()
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    (tmp_path / "other").mkdir()
    made = _gone_on_with(calm, model, tmp_path / "other", 2, **split)
    ours, theirs = ([entry for entry in each.state.log_history if "loss" in entry] for each in (made, calm))
    assert [entry["learning_rate"] for entry in ours] == [entry["learning_rate"] for entry in theirs]
    assert [entry["loss"] for entry in ours] == pytest.approx([entry["loss"] for entry in theirs], rel=1e-5)
    assert made.state.max_steps == calm.state.max_steps == len(ours)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Saver:
    """A trainer as far as saving goes: two files for each checkpoint, and each step is the best so far."""

    is_best, is_full = True, False

    def __init__(self, folder: Path, best: str | None = None) -> None:
        single = {"process_index": 0, "world_size": 1, "ddp_timeout": 9}
        self.args = SimpleNamespace(output_dir=str(folder), save_total_limit=1, **single)
        self.state = SimpleNamespace(global_step=0, best_model_checkpoint=best, best_global_step=None, best_metric=None)
        self.events: list[dict[str, Any]] = []
        checkpointing.follow_saving(self, self.events.append, "", World(self.args))

    def add_callback(self, callback: Any) -> None:
        callback.on_train_begin(self.args, self.state, None)

    def _save_checkpoint(self) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        folder.mkdir()
        if self.is_full:
            raise FULL
        (folder / "pytorch_model.bin").write_bytes(b"\x80 weights")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": self.state.global_step}))
        if self.is_best:
            self.state.best_model_checkpoint = str(folder)

    def save(self, step: int) -> list[str]:
        self.state.global_step = self.state.best_global_step = step
        self.state.best_metric = float(step)
        self._save_checkpoint()
        return [event["event"] for event in self.events[-2:]]


@pytest.mark.parametrize(
    ("fails", "event", "left", "best"),
    [
        ("is_full", "save_failed", [1], 1.0),
        ("reach_disk", "save_failed", [1], 1.0),
        ("write_manifest", "checkpoint", [1, 2], 2.0),
    ],
)
def test_no_checkpoint_goes_before_the_next_is_proven(
    fails: str, event: str, left: list[int], best: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written before a disk was full is removed, unless it is only the manifest that had no room."""
    saver = Saver(tmp_path)
    assert saver.save(1) == ["saving", "checkpoint"]
    with monkeypatch.context() as disk:
        disk.setattr(saver if fails == "is_full" else checkpoints, fails, Mock(side_effect=FULL))
        assert saver.save(2) == ["saving", event]
    assert "No space left" in event_line(saver.events[-1])
    assert sorted(checkpoints.step_of(path) for path in tmp_path.iterdir()) == left
    assert (saver.state.best_metric, saver.state.best_global_step) == (best, int(best))
    assert Path(saver.state.best_model_checkpoint).name == f"checkpoint-{int(best)}"
    assert checkpoints.newest_whole(tmp_path).step == left[-1]
    saver.save(3)
    assert [checkpoints.step_of(path) for path in tmp_path.iterdir()] == [3]
    saver.is_best = False
    saver.save(4)
    assert sorted(checkpoints.step_of(path) for path in tmp_path.iterdir()) == [3, 4], "the newest beside the best"
    monkeypatch.setattr(checkpoints, "reach_disk", Mock(side_effect=KeyError("not the disk")))
    with pytest.raises(KeyError, match="not the disk"):
        saver.save(5)
    assert saver.events[-1]["event"] == "saving"


def test_the_best_model_is_the_runs_own_after_its_folder_was_renamed(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    for name, folder in (("checkpoint-1", tmp_path), ("checkpoint-2", Path("before"))):
        assert Saver(tmp_path, f"before/{name}").state.best_model_checkpoint == str(folder / name)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("step", "best", "hint"),
    [
        (STEPS, None, "its weights are complete in .*checkpoint-7: that folder is the model"),
        (STEPS, "run/checkpoint-4", "its weights are complete in run/checkpoint-4: that folder is the model"),
        (STEPS + 1, None, "with --resume_from_checkpoint again: it trains from step 7 of 8"),
    ],
)
def test_a_model_that_has_no_room_at_the_end_is_said_to_be_where_it_is(
    calm: Any, step: int, best: str | None, hint: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = RuntimeError("I/O error: No space left on device (os error 28)")
    save = Mock(side_effect=None if is_late else early)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))))
    state = SimpleNamespace(global_step=step, best_model_checkpoint=best or "run/checkpoint-2")
    unsaved = SimpleNamespace(state=state, save_model=save, args=SimpleNamespace(load_best_model_at_end=bool(best)))
    with pytest.raises(OutputFolderError, match=hint):
        checkpointing.save_trained(unsaved, calm.args.output_dir)


def test_logs_for_which_the_disk_has_no_room_end_no_training(gpt2: Path, tmp_path: Path) -> None:
    made, told = _trainer(gpt2, tmp_path, save_strategy="no", max_steps=2, logging_steps=1)
    log, seen, full = made.log, [], Mock(side_effect=FULL)

    def logs_and_keeps_completions(*args: Any, **options: Any) -> None:
        log(*args, **options)
        full()

    made.log = logs_and_keeps_completions
    tracker = type("Tracker", (TrainerCallback,), {"on_log": full, "__module__": "transformers.integrations.fake"})
    made.add_callback(tracker())
    made.add_callback(type("After", (TrainerCallback,), {"on_log": lambda *_, **__: seen.append(1)})())
    checkpointing.drop_logs_without_room(made, told.append)
    made.train()
    assert made.state.global_step == 2
    assert len(seen) == 3, "two steps and the end"
    no_room = "could not be written, training continues: [Errno 28] No space left on device"
    assert [event["message"] for event in told] == [
        f"what {who} {no_room}" for who in ("Tracker logs", "the trainer logs")
    ]


CHATS = [{"messages": [{"role": "user", "content": f"No. {n}"}], "image": b"%d" % n} for n in range(50)]


def _order(rows: Any, **arguments: Any) -> dict[str, str]:
    return checkpointing.order_of(SimpleNamespace(**{"seed": 42, "data_seed": None} | arguments), rows)


def test_the_same_rows_in_the_same_order_are_known_however_they_lie_and_others_are_told_apart() -> None:
    rows = Dataset.from_list(CHATS)
    parts = concatenate_datasets([rows.select(range(30)), rows.select(range(30, 50))])
    backwards = Dataset.from_list(CHATS[::-1]).select(range(49, -1, -1))
    assert _order(rows) == _order(parts) == _order(backwards)
    assert _order(rows)["--dataset"].startswith("of 50 rows (")
    moved = [Dataset.from_dict({"image": [f"{place}/{n}.png" for n in range(3)]}) for place in ("/old/place", "/new")]
    assert _order(moved[0]) == _order(moved[1])
    changed = Dataset.from_list([*CHATS[:-1], {**CHATS[0], "messages": [{"role": "user", "content": "No. 0!"}]}])
    orders = [_order(each) for each in (rows, rows.shuffle(seed=1), rows.select(range(49)), changed)]
    orders += [_order(rows, seed=7), _order(rows, data_seed=7), _order(rows, train_sampling_strategy="sequential")]
    orders += [_order(rows, shuffle_dataset=True)]
    assert len({json.dumps(order) for order in orders}) == len(orders)


def test_a_checkpoint_of_another_order_is_refused_with_what_it_was_and_what_accepts_it(tmp_path: Path) -> None:
    order = ORDER | {"--data_seed": "None"}
    checkpoints.write_manifest(tmp_path, {}, "run", order)
    checkpoints.check_order(tmp_path, order)
    with pytest.raises(OutputFolderError) as caught:
        checkpoints.check_order(tmp_path, order | {"--seed": "7", "--data_seed": "9"})
    assert caught.value.message == (
        f"{tmp_path} was trained on rows in another order: --seed 42 in the checkpoint, 7 now; --data_seed None in the "
        "checkpoint, 9 now. This epoch would train on some rows twice and skip others."
    )
    assert caught.value.hint.startswith("Resume with the values of the first run: --seed 42, no --data_seed.\n")
    assert "--ignore_data_skip true" in caught.value.hint
    checkpoints.check_order(tmp_path / "TRL's own", {"--seed": "7"})


def _run(trains: Callable[..., Any], arguments: dict[str, Any], **ours: Any) -> None:
    """Runs a trainer of these attributes, unguarded, on a device that only calls ``trains``."""
    trainer = SimpleNamespace(**{"_prepare_for_training": None, "add_callback": lambda _: None, **ours})
    request: Any = SimpleNamespace(guarded=False, knobs=TRL_DEFAULTS, job=SimpleNamespace(arguments=arguments))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "FiniteValues", lambda *_: None)
        device: Any = SimpleNamespace(train=trains)
        train._run(trainer, device, request, lambda _: None, SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize("accepts", [False, True])
def test_another_order_is_refused_before_loading_unless_the_epoch_begins_anew(tmp_path: Path, accepts: bool) -> None:
    checkpoints.write_manifest(tmp_path, {}, "run", {"--seed": "42"})
    trained: list[Any] = []
    resume, args = {"resume_from_checkpoint": str(tmp_path)}, SimpleNamespace(ignore_data_skip=accepts)
    with nullcontext() if accepts else pytest.raises(OutputFolderError, match="--seed 42 in the checkpoint, 7 now"):
        _run(lambda made, **options: trained.append(options), resume, args=args, autofit_order={"--seed": "7"})
    assert trained == [resume] * accepts


def _rows(model: Path, folder: Path, resume: str | None = None) -> list[Any]:
    """What each of nine steps trains on: two more than an epoch has."""
    grouped = {"train_sampling_strategy": "group_by_length", "save_strategy": "steps", "save_steps": 8}
    made, seen = tiny_trainers.trainer("sft", model, folder, max_steps=9, **grouped), []
    train.keep_order(made)
    step = made.training_step

    def watched(module: Any, inputs: Any, *args: Any) -> Any:
        seen.append(inputs["input_ids"].tolist())
        return step(module, inputs, *args)

    made.training_step = watched
    made.train(resume_from_checkpoint=resume)
    return seen


def test_a_run_grouped_by_length_goes_on_with_its_own_rows_in_a_later_epoch(gpt2: Path, tmp_path: Path) -> None:
    whole = _rows(gpt2, tmp_path)
    rest = _rows(gpt2, tmp_path / "other", str(tmp_path / "checkpoint-8"))
    assert whole[8:] == rest
    assert whole[:2] != whole[7:]  # another order in another epoch


HARMLESS = {"a": torch.zeros(2)}


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def _shards(folder: Path, content: Any = HARMLESS) -> None:
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        dcp.save({"optimizer": content}, storage_writer=dcp.FileSystemWriter(folder / name), no_dist=True)


def _index(folder: Path, evil: Evil) -> None:
    _shards(folder)
    (folder / "pytorch_model_fsdp_0/.metadata").write_bytes(pickle.dumps(evil))


def _states_of(folder: Path, evil: Evil) -> None:
    (folder / "global_step3").mkdir()
    torch.save(HARMLESS, folder / "global_step3/mp_rank_00_model_states.pt")
    torch.save({"a": torch.zeros(2), "evil": evil}, folder / "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt")


def _engine(folder: Path) -> None:
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    TorchCheckpointEngine().load(str(next(folder.glob("global_step3/zero*"))))


def _by_torch(name: str, folder: Path) -> None:
    wanted = {"optimizer": {"a": torch.zeros(2), "evil": None}}
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder / name), no_dist=True)


@pytest.mark.parametrize(
    ("write", "load", "named"),
    [
        (_states_of, _engine, "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        (_index, partial(_by_torch, "pytorch_model_fsdp_0"), "pytorch_model_fsdp_0/.metadata"),
        (lambda folder, evil: _shards(folder, {"evil": evil, **HARMLESS}), partial(_by_torch, "optimizer_0"), ""),
    ],
)
def test_a_checkpoint_that_asks_for_code_is_refused_by_name_and_runs_none(
    tmp_path: Path, write: Callable[[Path, Evil], None], load: Callable[[Path], None], named: str
) -> None:
    checkpoint, mark = tmp_path / "checkpoint-3", tmp_path / "ran"
    checkpoint.mkdir()
    write(checkpoint, Evil(mark))
    with pytest.raises(OutputFolderError) as caught, checkpointing.without_code(checkpoint):
        load(checkpoint)
    assert not mark.exists()
    assert f"{checkpoint / named}" in caught.value.message
    assert "it contains posix.mkdir" in caught.value.message
    assert caught.value.hint == "Start again: give another --output_dir, and no --resume_from_checkpoint."


@pytest.mark.parametrize("name", ["_prepare_for_training", "_load_rng_state", "_load_best_model"])
def test_what_a_trainer_loads_runs_no_code_and_users_files_load_later_as_they_ask(tmp_path: Path, name: str) -> None:
    torch.save(Evil(tmp_path / "ran"), tmp_path / "file.pt")
    ours = {name: lambda: torch.load(tmp_path / "file.pt", weights_only=False)}
    with pytest.raises(OutputFolderError, match=r"file\.pt was not loaded: it contains posix.mkdir"):
        _run(lambda made, **_: getattr(made, name)(), {}, **ours)
    assert not (tmp_path / "ran").exists()
    torch.save(Path("own"), tmp_path / "own.pt")
    assert torch.load(tmp_path / "own.pt", weights_only=False) == Path("own")


def _shards_of(calm: Any) -> Path:
    return Path(calm.args.output_dir) / "shards-2"


def test_a_run_goes_on_with_shards_to_the_bit(either: Any, gpt2: Path, tmp_path: Path) -> None:
    made, notes = _trainer(gpt2, tmp_path, **either.changes)[0], []
    resharding.read_other_forms(made, str(_shards_of(either)), TRL_DEFAULTS, notes.append)
    made.train(resume_from_checkpoint=str(_shards_of(either)))
    assert not notes
    _assert_same(made, either)


def test_shards_of_another_model_and_unreadable_ones_are_refused(either: Any, gpt2: Path, tmp_path: Path) -> None:
    state = get_optimizer_state_dict(either.model, either.optimizer)
    state["state"].popitem()
    unreadable = r"Cannot resume from .*FileNotFoundError.*metadata"
    cases: list[tuple[str, Any, type[Exception], str]] = [
        ("pytorch_model_fsdp_0", {"model": {"a": torch.zeros(2)}}, TrainingError, "are not those of this model"),
        ("pytorch_model_fsdp_0", None, OutputFolderError, unreadable),
        ("optimizer_0", {"optimizer": state}, TrainingError, "has state for"),
        ("optimizer_0", None, OutputFolderError, unreadable),
    ]
    made = _trainer(gpt2, tmp_path / "run", **either.changes)[0]
    made.create_optimizer()
    for name, content, kind, words in cases:
        other = shutil.copytree(_shards_of(either), tmp_path / "checkpoint-3")
        if content is None:
            (other / name / ".metadata").unlink()
        else:
            shutil.rmtree(other / name)
            _save(content, other / name)
        resharding.read_other_forms(made, str(other), TRL_DEFAULTS, [].append)
        with pytest.raises(kind, match=words) as caught:
            made._load_optimizer_and_scheduler(str(other))
        again = "Start again: give another --output_dir, and no --resume_from_checkpoint."
        assert caught.value.hint == (again if content is None else resharding.OTHER_MODEL)
        shutil.rmtree(other)


def test_both_forms_hold_the_same(either: Any, gpt2: Path, tmp_path: Path) -> None:
    """``optimizer.pt`` counts parameters, and shards name them."""
    whole, states = Path(either.args.output_dir) / "checkpoint-2", []
    for checkpoint, fill in ((whole, resharding._fill_from_file), (_shards_of(either), resharding._fill_from_shards)):
        made = _trainer(gpt2, tmp_path, **either.changes)[0]
        assert resharding._load_weights(made.model, checkpoint, is_in_shards=checkpoint != whole) == ""
        state = get_optimizer_state_dict(made.model, made.create_optimizer())
        fill(state, checkpoint)
        states.append((dict(made.model.named_parameters()), state["state"]))
    assert_close(states[0], states[1], rtol=0, atol=0)
    assert {float(each["step"]) for each in states[0][1].values()} == {2}


def test_weights_that_lose_precision_are_said(calm: Any) -> None:
    said = resharding._load_weights(copy.deepcopy(calm.model).to(torch.bfloat16), _shards_of(calm), is_in_shards=True)
    assert said == "weights are float32 in the checkpoint and are rounded to bfloat16, the dtype of this run"


def test_a_rank_takes_its_part_of_what_is_whole() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        part = distribute_tensor(torch.zeros(3, 2), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
        resharding._copy_part("a", torch.arange(6.0).view(3, 2), part)
        assert part.to_local().tolist() == [[4, 5]]
        with pytest.raises(TrainingError, match=r"a has the shape \(2, 2\) in the checkpoint, and \(3, 2\) in this"):
            resharding._copy_part("a", torch.zeros(2, 2), part)
    finally:
        torch.distributed.destroy_process_group()


class SpoilWeights(TrainerCallback):  # type: ignore[misc]
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 1:
            next(model.parameters()).data.fill_(math.nan)


def spoil_gradient(made: Any) -> None:
    weight = next(made.model.parameters())
    weight.register_hook(lambda gradient: gradient * (math.nan if made.state.global_step == 1 else 1))


def no_mean(made: Any) -> None:
    """As of a micro-batch in which no token counts."""
    step = made.training_step
    made.training_step = lambda *args: step(*args) * (math.nan if made.state.global_step == 1 else 1)


DISTURB: dict[str, Any] = {
    "weights": (lambda made: made.add_callback(SpoilWeights()), ("nan", "nan", True)),
    "gradient": (spoil_gradient, ("finite", "nan", True)),
    "mean": (no_mean, ("nan", "finite", False)),
    "nothing": (lambda made: None, None),
}


@pytest.mark.parametrize(("what", "logging_steps"), [(what, 3) for what in DISTURB] + [("gradient", 1)])
def test_the_first_step_that_is_no_number_is_told_of_once_and_what_it_spoils_takes_no_checkpoints_place(
    what: str, logging_steps: int, qwen: Path, tmp_path: Path
) -> None:
    disturb, expected = DISTURB[what]
    sizes = {"max_steps": 3, "gradient_accumulation_steps": 2, "logging_steps": logging_steps}
    saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    made, events = tiny_trainers.trainer("sft", qwen, tmp_path, **sizes | saves), []
    disturb(made)
    made.add_callback(FiniteValues(made, events.append, World(made.args)))
    made.train()
    is_spoilt = expected is not None and expected[2]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1" if is_spoilt else "checkpoint-3"]
    if expected is None:
        assert not events
        return
    (event,) = json.loads(json.dumps(events))
    assert event["step"] == 2
    assert (event["loss"], event["gradient"], event["spoils"]) == expected
    assert event_line(event).startswith(f"warning: step 2: loss {expected[0]}, norm of the gradient {expected[1]}: ")
    logged = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert all(map(math.isfinite, logged)), "what transformers logs says nothing"


def test_what_ppo_logs_is_looked_at_and_a_gradient_that_a_scaler_judges_is_not(qwen: Path, tmp_path: Path) -> None:
    made, events = tiny_trainers.trainer("sft", qwen, tmp_path), []
    made.accelerator.scaler = torch.amp.GradScaler("cpu")
    values = FiniteValues(made, events.append, World(made.args))
    made.state.global_step = 4
    values.on_log(made.args, made.state, None, {"loss": 1.0, "grad_norm": math.inf})
    assert not events
    values.on_log(made.args, made.state, None, {"loss/policy_avg": math.nan})
    assert [(event["step"], event["spoils"]) for event in events] == [(4, True)]
