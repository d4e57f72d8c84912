from __future__ import annotations

import pytest

from autotrain_mem.support import local_files
from autotrain_mem.support.errors import DatasetNotFoundError, MissingExtraError, ModelNotFoundError
from autotrain_mem.support.local_files import check_data_path, check_image_packages, check_model_folder


def test_a_name_with_two_slashes_is_a_path_and_one_with_one_may_be_a_hub_id() -> None:
    with pytest.raises(DatasetNotFoundError, match="No file or folder data/of/mine"):
        check_data_path("data/of/mine")
    with pytest.raises(ModelNotFoundError, match="No folder models/of/mine"):
        check_model_folder("models/of/mine", "--model")
    check_data_path("trl-lib/Capybara")
    assert check_model_folder("Qwen/Qwen2.5-0.5B", "--model") is None


def test_what_images_are_read_with_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    check_image_packages("a model", "smolvlm")
    monkeypatch.setattr(local_files, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="a model reads images, and Pillow is not installed") as raised:
        check_image_packages("a model", "gemma3")
    assert raised.value.hint == 'Run: pip install "autotrain_mem[vision]"'
    with pytest.raises(MissingExtraError, match="and Pillow and num2words are not installed"):
        check_image_packages("a model", "smolvlm")
