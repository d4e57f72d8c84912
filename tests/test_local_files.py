from __future__ import annotations

import pytest

from autotrain_mem.errors import DatasetNotFoundError, ModelNotFoundError
from autotrain_mem.local_files import check_data_path, check_model_folder


def test_a_name_with_two_slashes_is_a_path_and_one_with_one_may_be_a_hub_id() -> None:
    with pytest.raises(DatasetNotFoundError, match="No file or folder data/of/mine"):
        check_data_path("data/of/mine")
    with pytest.raises(ModelNotFoundError, match="No folder models/of/mine"):
        check_model_folder("models/of/mine", "--model")
    check_data_path("trl-lib/Capybara")
    assert check_model_folder("Qwen/Qwen2.5-0.5B", "--model") is None
