"""Models and data that cannot be had are refused at once, here and on the hub."""

import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from huggingface_hub import constants

from autotrain_mem.support.errors import DatasetNotFoundError, ModelNotFoundError
from autotrain_mem.support.sources import (
    check_cached,
    check_data_path,
    check_kept_rows,
    check_model_folder,
    why_not_asked,
)

ROWS = "trl-lib/SomeRows"


def test_a_name_with_two_slashes_is_a_path_and_one_with_one_may_be_a_hub_id() -> None:
    with pytest.raises(DatasetNotFoundError, match="No file or folder data/of/mine"):
        check_data_path("data/of/mine")
    with pytest.raises(ModelNotFoundError, match="No folder models/of/mine"):
        check_model_folder("models/of/mine", "--model")
    check_data_path("trl-lib/Capybara")
    assert check_model_folder("Qwen/Qwen2.5-0.5B", "--model") is None


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A hub on this machine that takes connections until it is closed."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server


def test_an_unreachable_hub_and_an_invalid_hub_id_are_refused_at_once(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_not_asked() == ""
    check_cached("nobody/nothing", None)
    with pytest.raises(ModelNotFoundError, match=r"No model 'my model': .* and it is not a hub id"):
        check_cached("my model", None)
    listening.close()
    with pytest.raises(ModelNotFoundError, match=r"No model 'nobody/nothing': .* the hub \(http://127"):
        check_cached("nobody/nothing", None)
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"http": "http://proxy"})
    check_cached("nobody/nothing", None)


def test_an_unknown_host_is_unreachable_and_a_slow_one_is_not(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, is_away in ((socket.gaierror(-2, "Name or service not known"), True), (TimeoutError(), False)):
        monkeypatch.setattr(socket, "create_connection", Mock(side_effect=error))
        assert bool(why_not_asked()) is is_away


def test_cached_datasets_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DatasetNotFoundError, match=f"No dataset '{ROWS}': .* HF_HUB_OFFLINE forbids"):
        check_kept_rows(ROWS, {"HF_DATASETS_CACHE": str(tmp_path)})
    check_kept_rows(str(tmp_path), {})
    (tmp_path / "datasets" / "trl-lib___some_rows").mkdir(parents=True)
    check_kept_rows(ROWS, {"HF_HOME": str(tmp_path)})
