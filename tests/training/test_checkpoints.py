"""Whole or torn, by the manifest or without one; and who can go on with which form."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.trainer_utils import get_last_checkpoint, sort_checkpoints

from autotrain_mem.training import checkpoints
from autotrain_mem.training.checkpoint_kinds import Resumer, how_to_resume, is_of_another_form, why_not

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


def checkpoint(folder: Path, step: int) -> Path:
    """With the files of one that transformers writes."""
    made = folder / f"checkpoint-{step}"
    made.mkdir(parents=True)
    for name in FILES:
        (made / name).write_bytes(bytes(16))
    (made / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return made


def _prove(checkpoint: Path, run: str = "") -> None:
    checkpoints.write_manifest(checkpoint, checkpoints.reach_disk(checkpoint), run)


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("hurt", [lambda file: os.truncate(file, file.stat().st_size // 2), Path.unlink, _pipe])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_file_that_is_short_or_gone_is_seen(tmp_path: Path, name: str, hurt: Callable[[Path], None]) -> None:
    """Without a manifest, only whether there are weights and a state, and whether a file could be endless."""
    for folder in (tmp_path / "bare", tmp_path / "proven"):
        made = checkpoint(folder, 5)
        if folder.name == "proven":
            _prove(made)
        hurt(made / name)
        is_seen = name == "trainer_state.json" or (name, hurt) == ("model.safetensors", Path.unlink) or hurt is _pipe
        assert bool(checkpoints.why_torn(made)) is (is_seen or folder.name == "proven")
        assert (checkpoints.newest_whole(folder) is None) is bool(checkpoints.why_torn(made))


@pytest.mark.parametrize("name", FILES)
def test_other_bytes_of_the_same_number_are_seen_before_a_run_goes_on_with_them(tmp_path: Path, name: str) -> None:
    for step in (5, 10):
        _prove(checkpoint(tmp_path, step))
    file = tmp_path / "checkpoint-10" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    why = f"{name} differs from its checksum"
    assert checkpoints.why_not_whole(file.parent) == checkpoints.why_no_start(file.parent) == why
    assert checkpoints.newest_whole(tmp_path).step == 5
    told: list[str] = []
    assert checkpoints.newest_start(tmp_path, on_torn=told.append).step == 5
    assert told == [f"checkpoint-10 is incomplete ({why}): it was moved to torn-checkpoint-10"]


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *(("model.safetensors", True), ("model-00001-of-00002.safetensors", True), ("pytorch_model.bin", True)),
        *(("adapter_model.safetensors", True), ("adapter_model.bin", True), ("second/adapter_model.bin", True)),
        *(("pytorch_model_fsdp_0/__0_0.distcp", True), ("global_step5/mp_rank_00_model_states.pt", True)),
        *(("global_step5/zero_pp_rank_0_mp_rank_00_model_states.pt", True), ("pytorch_model_fsdp.bin", True)),
        *(("training_args.bin", False), ("other.safetensors", False), ("optimizer_0/__0_0.distcp", False)),
        *(("global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt", False), ("adapter_config.json", False)),
    ],
)
def test_without_a_manifest_only_files_of_weights_pass_for_weights(tmp_path: Path, name: str, is_one: bool) -> None:
    made, other = checkpoint(tmp_path, 5), checkpoint(tmp_path, 4)
    (made / name).parent.mkdir(exist_ok=True)
    (made / "model.safetensors").unlink()
    (made / name).touch()
    assert checkpoints.why_torn(made) == ("" if is_one else "it holds no weights")
    told: list[str] = []
    assert checkpoints.newest_start(tmp_path, on_torn=told.append).path == (made if is_one else other)
    moved = "checkpoint-5 is incomplete (it holds no weights): it was moved to torn-checkpoint-5"
    assert told == ([] if is_one else [moved])


def test_without_a_manifest_a_name_of_another_step_is_told_and_not_gone_on_with(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, 5)
    assert checkpoints.why_torn(made.rename(tmp_path / "before-the-holidays")) == ""
    (tmp_path / "before-the-holidays").rename(tmp_path / "checkpoint-9")
    checkpoint(tmp_path, 3)
    told: list[str] = []
    assert checkpoints.newest_start(tmp_path, on_torn=told.append).step == 3
    why = "trainer_state.json has step 5"
    assert told == [f"checkpoint-9 is incomplete ({why}): it was moved to torn-checkpoint-9"]
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-3"), "transformers finds no torn one"
    assert sort_checkpoints(str(tmp_path)) == [str(tmp_path / "checkpoint-3")]
    (tmp_path / "checkpoint-9").mkdir()
    checkpoints.newest_start(tmp_path)
    checkpoints.discard(tmp_path / "checkpoint-9")  # what is not there is no error
    assert (tmp_path / "torn-checkpoint-9-2").is_dir()


def test_the_manifest_is_written_last_and_synced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = checkpoint(tmp_path, 5)
    synced: list[str] = []

    def fsync(number: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{number}")).name.partition(".json.")[0])
        if len(synced) == 2:
            raise OSError(errno.EINVAL, "nothing to wait for")

    monkeypatch.setattr(os, "fsync", fsync)
    _prove(made)
    manifest = f".{checkpoints.MANIFEST}".removesuffix(".json")
    assert synced == [*sorted(FILES), made.name, tmp_path.name, manifest, made.name]


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, None, [2, 4, 6, 8, 10]),
        (3, None, [4, 6, 8, 10]),
        (1, None, [8, 10]),
        (2, "elsewhere/checkpoint-2", [2, 8, 10]),
        (1, "checkpoint-2", [2, 8, 10]),
        (1, "checkpoint-8", [8, 10]),
    ],
)
def test_the_fewest_steps_go_first(tmp_path: Path, limit: int | None, best: str | None, left: list[int]) -> None:
    """10 is of a run that this one, at 8, branched off."""
    for step in (2, 4, 6, 8, 10):
        made = checkpoint(tmp_path, step)
        os.utime(made, (0, 10**9 - 100 * step))
    checkpoints.rotate(tmp_path, step=8, limit=limit, best=best)
    assert sorted(checkpoints.step_of(path) for path in tmp_path.iterdir()) == left


def test_a_torn_manifest_is_none(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, 5)
    _prove(made)
    (made / "README.md").write_text("A note.")
    assert checkpoints.why_torn(made) == ""
    for written in ('{"files": {"mod', '{"files": ' + "[" * 100_000, "[]", '{"files": 1, "order": []}'):
        (made / checkpoints.MANIFEST).write_text(written)
        assert checkpoints.why_torn(made).startswith("it cannot be read")
        assert (checkpoints.run_of(made), checkpoints.check_order(made, {"--seed": "7"})) == ("", None)
    for step in ('{"a":' * 100_000, '{"global_step": 1e400}'):
        (made / checkpoints.MANIFEST).unlink(missing_ok=True)
        (made / "trainer_state.json").write_text(step)
        assert (checkpoints.why_torn(made).startswith("it cannot be read"), checkpoints.step_of(made)) == (True, 0)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_the_newest_by_number_counts_and_a_model_alone_is_none_to_go_on_from(tmp_path: Path, name: str) -> None:
    """Transformers would begin optimizer and schedule anew."""
    made = {step: checkpoint(tmp_path, step) for step in (8, 9, 10, 100)}
    (made[100] / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-final").mkdir()
    (made[10] / name).unlink()
    assert checkpoints.newest_whole(tmp_path).step == 10
    assert checkpoints.newest_start(tmp_path).step == 9
    assert "--save_only_model" in checkpoints.why_no_start(made[10])
    _prove(made[8], "mine")
    assert checkpoints.newest_start(tmp_path, run="mine").step == 8


def test_an_older_one_that_a_run_can_go_on_with_is_named_instead_and_never_a_newer_one(tmp_path: Path) -> None:
    made = {step: checkpoint(tmp_path, step) for step in (5, 10, 15, 20)}
    (made[10] / "trainer_state.json").unlink()
    assert checkpoints.instead_of(made[15]) == f"Resume from an older one: --resume_from_checkpoint {made[5]}."
    assert checkpoints.instead_of(made[5]) == "Start again: give another --output_dir, and no --resume_from_checkpoint."


OF_FORM = {
    "whole": ["model.safetensors", "optimizer.pt"],
    "shards": ["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"],
    "zero": ["global_step3/mp_rank_00_model_states.pt", "model.safetensors"],
    "zero3": ["global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt", "model.safetensors"],
}


def of_form(folder: Path, form: str, ranks: int = 2) -> Path:
    for name in (*OF_FORM[form], *(f"rng_state_{rank}.pth" for rank in range(ranks if ranks > 1 else 0))):
        file = folder / "checkpoint-3" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    return folder / "checkpoint-3"


RESUMERS: list[tuple[str, dict[str, Any], str]] = [
    ("whole", {"sharding": None, "processes": 1}, ""),
    ("whole", {"sharding": "fsdp2", "processes": 4, "optim": "adamw_torch_fused"}, ""),
    ("whole", {"sharding": "zero3", "processes": 4}, "DeepSpeed resumes only its own"),
    ("whole", {"sharding": "fsdp2", "processes": 2, "optim": "adafactor"}, "adafactor cannot be resharded"),
    ("whole", {"sharding": "ddp", "processes": 2, "optim": "adafactor"}, ""),
    ("shards", {"sharding": "ddp", "processes": 3}, ""),
    ("shards", {"sharding": "zero2", "processes": 2}, "DeepSpeed resumes only its own"),
    ("zero3", {"sharding": "zero3", "processes": 2}, ""),
    ("zero3", {"sharding": "zero3", "processes": 4}, "ZeRO-3 checkpoint of 2 ranks, and DeepSpeed resumes it only"),
    ("zero3", {"sharding": "fsdp2", "processes": 2}, "as many ranks"),
    ("zero", {"sharding": "zero3", "processes": 2}, "ZeRO-1 or ZeRO-2 checkpoint of 2 ranks"),
]
WAYS_OUT = {
    "whole": "--gpus 2 --sharding ddp",
    "shards": "any number of GPUs with --sharding fsdp2",
    "zero3": "--gpus 2 --sharding zero3",
    "zero": "checkpoint-3/zero_to_fp32.py ",
}


def test_who_can_go_on_with_it_by_itself_or_at_all_and_the_way_out_is_told(tmp_path: Path) -> None:
    made = {form: of_form(tmp_path / form, form) for form in OF_FORM}
    for form, resumer, why in RESUMERS:
        told = why_not(made[form], Resumer(**resumer))
        assert why in told if why else told == "", (form, resumer)
    assert not is_of_another_form(made["shards"], Resumer(sharding="hsdp", processes=4))
    assert is_of_another_form(made["shards"], Resumer(sharding="ddp", processes=4))
    assert not is_of_another_form(made["zero"], Resumer(sharding="zero1", processes=2))
    assert is_of_another_form(made["zero"], Resumer(sharding="zero2", processes=4))
    assert [form for form, way_out in WAYS_OUT.items() if way_out not in how_to_resume(made[form])] == []
