"""A model that cannot be loaded by its name: each reason has its own words and its own cure."""

from pathlib import Path

import pytest
from huggingface_hub import constants, errors

from autotrain_mem.data.token_lengths import load_tokenizer
from autotrain_mem.support.errors import ModelNotFoundError
from autotrain_mem.trainers.pretrained import not_loaded


@pytest.mark.parametrize(
    ("kind", "said", "cure"),
    [
        (errors.RepositoryNotFoundError, "and the hub has no such model", "hf auth login"),
        (errors.GatedRepoError, "org/m is gated", "https://huggingface.co/org/m"),
        (errors.RevisionNotFoundError, "no such --model_revision", "commits/main"),
        (errors.LocalEntryNotFoundError, "and the hub (https://huggingface.co) cannot be reached", "the connection"),
        (PermissionError, "cannot be loaded: PermissionError at m when downloading.", "Check the spelling"),
    ],
)
def test_a_hub_that_does_not_answer_is_told_from_one_that_has_no_such_model(
    kind: type[Exception], said: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    raised = OSError("PermissionError at m when downloading.\nCheck your cache.")
    raised.__cause__ = kind.__new__(kind)  # some want the hub's response
    error = not_loaded("org/m", raised)
    assert said in error.message
    assert cure in error.hint
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert ("HF_HUB_OFFLINE" in not_loaded("org/m", raised).message) is (kind is errors.LocalEntryNotFoundError)


def test_a_tokenizer_that_the_hub_was_not_asked_for_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="can be loaded: HF_HUB_OFFLINE forbids"):
        load_tokenizer("no-such-org/no-such-model")
    with pytest.raises(ModelNotFoundError, match=r"can be loaded\.\n"):
        load_tokenizer(str(tmp_path))
