"""Whole or torn: by the manifest, and by what the files say of themselves."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from autotrain_mem.training.checkpoints import (
    MANIFEST,
    discard,
    newest_start,
    newest_whole,
    set_torn_aside,
    step_of,
    why_no_start,
    why_torn,
    write_manifest,
)


def _checkpoint(folder: Path, step: int) -> Path:
    """As transformers writes one, byte for byte as far as anybody looks."""
    made = folder / f"checkpoint-{step}"
    made.mkdir(parents=True)
    header = json.dumps({"weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (made / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with zipfile.ZipFile(made / "optimizer.pt", "w") as archive:
        archive.writestr("data.pkl", bytes(1000))
    (made / "scheduler.pt").write_bytes(b"older than zip")
    (made / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return made


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_checkpoint_is_whole_as_it_was_written(tmp_path: Path, with_manifest: bool) -> None:
    made = _checkpoint(tmp_path, 5)
    if with_manifest:
        write_manifest(made)
    assert why_torn(made) == ""
    assert newest_whole(tmp_path).step == step_of(made) == 5


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("hurt", [_cut, _remove])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_file_that_is_short_or_gone_is_seen(
    tmp_path: Path, name: str, hurt: Callable[[Path], None], with_manifest: bool
) -> None:
    made = _checkpoint(tmp_path, 5)
    if with_manifest:
        write_manifest(made)
    hurt(made / name)
    if (name, hurt, with_manifest) == ("optimizer.pt", _remove, False):
        return  # a model saved without its optimizer is one, too (save_only_model)
    assert why_torn(made)
    assert newest_whole(tmp_path) is None


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    made = _checkpoint(tmp_path, 5)
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors"}}))
    assert why_torn(made) == "model-00001.safetensors is missing"


def test_a_note_makes_a_checkpoint_no_less_whole_and_a_torn_manifest_does(tmp_path: Path) -> None:
    made = _checkpoint(tmp_path, 5)
    write_manifest(made)
    (made / "README.md").write_text("A note.")
    assert why_torn(made) == ""
    (made / MANIFEST).write_text('{"files": {"mod')
    assert why_torn(made).startswith("it cannot be read")


def test_the_newest_by_number_counts_not_by_name(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        _checkpoint(tmp_path, step)
    _cut(tmp_path / "checkpoint-100" / "model.safetensors")
    (tmp_path / "checkpoint-final").mkdir()
    assert newest_whole(tmp_path).step == 10
    write_manifest(tmp_path / "checkpoint-9", "mine")
    assert newest_start(tmp_path, run="mine").step == 9


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_a_model_alone_is_whole_and_none_to_go_on_from(tmp_path: Path, name: str) -> None:
    """transformers would begin optimizer and schedule anew."""
    _checkpoint(tmp_path, 5)
    alone = _checkpoint(tmp_path, 10)
    (alone / name).unlink()
    assert newest_whole(tmp_path).step == 10
    assert newest_start(tmp_path).step == 5
    assert "--save_only_model" in why_no_start(alone)


def test_what_is_torn_is_moved_where_transformers_does_not_look(tmp_path: Path) -> None:
    from transformers.trainer_utils import get_last_checkpoint, sort_checkpoints

    for step in (5, 10):
        _checkpoint(tmp_path, step)
    _cut(tmp_path / "checkpoint-10" / "model.safetensors")
    (said,) = set_torn_aside(tmp_path)
    assert said == "checkpoint-10 is torn (model.safetensors is cut short): it was moved to torn-checkpoint-10"
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-5")
    assert sort_checkpoints(str(tmp_path)) == [str(tmp_path / "checkpoint-5")]
    assert set_torn_aside(tmp_path) == ()


def test_a_second_torn_one_of_the_same_step_does_not_replace_the_first(tmp_path: Path) -> None:
    for _ in range(2):
        (tmp_path / "checkpoint-5").mkdir()
        set_torn_aside(tmp_path)
    discard(tmp_path / "checkpoint-5")  # what is not there is no error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["torn-checkpoint-5", "torn-checkpoint-5-2"]
