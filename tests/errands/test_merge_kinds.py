"""What ``autofit merge`` refuses to merge."""

from types import SimpleNamespace

import pytest
from peft import PeftType

from autotrain_mem.errands.process.merge import check_merges
from autotrain_mem.support.errors import UsageError


def test_prompts_are_not_merged_and_the_error_says_what_they_are() -> None:
    configs = {"default": SimpleNamespace(peft_type=PeftType.PREFIX_TUNING)}
    with pytest.raises(UsageError, match="kind PREFIX_TUNING is not merged") as caught:
        check_merges(SimpleNamespace(peft_config=configs))
    assert "autofit chat" in caught.value.hint
    check_merges(SimpleNamespace(peft_config=configs, merge_and_unload=print))
