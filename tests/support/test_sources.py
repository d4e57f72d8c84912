"""Models and data that cannot be had are refused at once, here and on the hub."""

import os
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from huggingface_hub import constants

from autotrain_mem.support import errors, sources

ROWS = "trl-lib/SomeRows"


def test_a_name_with_two_slashes_is_a_path_and_one_with_one_may_be_a_hub_id() -> None:
    with pytest.raises(errors.DatasetNotFoundError, match="No file or folder data/of/mine"):
        sources.check_data_path("data/of/mine")
    with pytest.raises(errors.ModelNotFoundError, match="No folder models/of/mine"):
        sources.check_model_folder("models/of/mine", "--model")
    sources.check_data_path("trl-lib/Capybara")
    assert sources.check_model_folder("Qwen/Qwen2.5-0.5B", "--model") is None


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A hub on this machine that takes connections until it is closed."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server


def test_an_unreachable_hub_or_invalid_id_is_refused(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources.why_not_asked() == ""
    sources.check_cached("nobody/nothing", None)
    with pytest.raises(errors.ModelNotFoundError, match=r"No model 'my model': .* and it is not a hub id"):
        sources.check_cached("my model", None)
    listening.close()
    with pytest.raises(errors.ModelNotFoundError, match=r"No model 'nobody/nothing': .* the hub \(http://127"):
        sources.check_cached("nobody/nothing", None)
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"http": "http://proxy"})
    sources.check_cached("nobody/nothing", None)


def test_only_an_unknown_host_is_unreachable(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, is_away in ((socket.gaierror(-2, "Name or service not known"), True), (TimeoutError(), False)):
        monkeypatch.setattr(socket, "create_connection", Mock(side_effect=error))
        assert bool(sources.why_not_asked()) is is_away


def test_what_files_show_of_templates_and_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, commit = tmp_path / "models--org--base", "0" * 40
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot, asked = cache / "snapshots" / commit, cache / ".no_exist" / commit / "chat_template.jinja"
    for folder in (snapshot, asked.parent, cache / "refs", tmp_path / "data" / "evaluation"):
        folder.mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    (snapshot / "tokenizer_config.json").write_text("{}")
    assert sources.lacks_template(str(snapshot), None)
    assert not sources.lacks_template("org/base", None), "nobody asked the hub for a template"
    asked.touch()
    assert sources.lacks_template("org/base", None)
    (snapshot / "tokenizer_config.json").write_text('{"chat_template": "a"}')
    assert not sources.lacks_template("org/base", None)
    rows = tmp_path / "data" / "evaluation" / "rows.json"
    rows.touch()
    assert sources.splits_of(str(rows)) == sources.splits_of(str(rows.parent)) == ("train",)
    assert sources.splits_of(str(tmp_path / "data")) == ("test",)
    (tmp_path / "data" / "README.md").touch()
    assert sources.splits_of(str(tmp_path / "data")) == (), "a dataset card may define any"


def test_cached_datasets_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(errors.DatasetNotFoundError, match=f"No dataset '{ROWS}': .* HF_HUB_OFFLINE forbids"):
        sources.check_kept_rows(ROWS, {"HF_DATASETS_CACHE": str(tmp_path)})
    sources.check_kept_rows(str(tmp_path), {})
    (tmp_path / "datasets" / "trl-lib___some_rows").mkdir(parents=True)
    sources.check_kept_rows(ROWS, {"HF_HOME": str(tmp_path)})


def test_a_config_that_no_model_has_is_refused(tmp_path: Path) -> None:
    for written, message in (
        ('{"model_type": "x", "hidden_size": 0}', "sets hidden_size to 0"),
        ('{"model_type": "x", "num_hidden_layers": 100000}', "sets num_hidden_layers to 100000"),
        ('{"model_type": "x", "text_config": {"vocab_size": 1000000000000}}', "sets vocab_size to 1000000000000"),
        ('{"model_type": "x", "rms_norm_eps": NaN}', "sets rms_norm_eps to nan"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "cannot be read: it is nested too deeply"),
    ):
        (tmp_path / "config.json").write_text(written)
        with pytest.raises(errors.ModelConfigError, match=message):
            sources.check_model_folder(str(tmp_path), "--model")


def test_what_would_be_read_for_ever_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x", "hidden_size": 64, "rms_norm_eps": 1e-6}')
    assert sources.check_model_folder(str(tmp_path), "--model")
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        for name in ("tokenizer.json", "additional_chat_templates/tools.jinja"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            make(tmp_path / name)
            with pytest.raises(errors.ModelConfigError, match=rf"{name} is not a regular file"):
                sources.check_model_folder(str(tmp_path), "--model")
            with pytest.raises(errors.MalformedDatasetError, match=rf"{name} is not a regular file"):
                sources.check_data_path(str(tmp_path))
            (tmp_path / name).unlink()
