"""Chat and merge with a tiny model and an adapter of it, in this process."""

import pathlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftType, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from autotrain_mem.cli.errand_process import trained_model
from autotrain_mem.cli.errand_process.trained_model import chat, check_merges, merge
from autotrain_mem.cli.errands import Errand
from autotrain_mem.support.errors import HostMemoryError, ModelNotFoundError, OutputFolderError, UsageError
from autotrain_mem.support.host import HostMemory

pytestmark = pytest.mark.slow

PROMPT = [{"role": "user", "content": "How many apples?"}]


@pytest.fixture(scope="module")
def adapter(model_folder: Callable[[str], pathlib.Path], tmp_path_factory: pytest.TempPathFactory) -> Errand:
    """An errand for an adapter that says something else than its base."""
    base, folder = model_folder("qwen2"), tmp_path_factory.mktemp("run")
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    (folder / "README.md").write_text("---\nlibrary_name: peft\n---\nA card.\n", encoding="utf-8")
    return Errand(task="chat", folder=str(folder), base=str(base), max_new_tokens=6, use_cpu=True)


def talk(errand: Errand, *asked: Any) -> list[dict[str, Any]]:
    """All events of a chat in which this is asked."""
    events: list[Any] = []
    requests = iter([*({"messages": messages} for messages in asked), {}])
    chat(errand, events.append, lambda: next(requests))
    return events


def test_a_merged_model_answers_as_base_and_adapter_do(adapter: Errand, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "merged"
    end = merge(replace(adapter, task="merge", to=str(target)), lambda event: None, dict)
    assert (end["path"], end["dtype"]) == (str(target), "float32")
    assert "library_name" not in (target / "README.md").read_text()
    with_adapter = talk(adapter, PROMPT)
    alone = talk(replace(adapter, folder=str(target), base=None), PROMPT)
    assert with_adapter[0] == {"event": "ready", "device": "cpu", "has_template": True}
    assert "".join(event["text"] for event in with_adapter[1:-1]) == with_adapter[-1]["text"]
    assert alone[-1] == with_adapter[-1]
    bare = talk(replace(adapter, folder=str(adapter.base), base=None), PROMPT)
    assert bare[-1] != with_adapter[-1], "else nothing of the adapter would be in it"
    with pytest.raises(OutputFolderError, match="not written over"):
        merge(replace(adapter, task="merge", to=str(target)), lambda event: None, dict)
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_text_is_continued_and_a_reward_model_gives_a_number(adapter: Errand) -> None:
    plain = talk(replace(adapter, plain=True), [{"role": "user", "content": "Then Ada"}])
    assert plain[0]["has_template"] is False
    scorer = replace(adapter, gives_score=True)
    _, one, other = talk(scorer, PROMPT, [*PROMPT, {"role": "assistant", "content": "Answer: 4"}])
    assert isinstance(one["score"], float)
    assert one["score"] != other["score"]


def test_what_there_is_no_room_for_is_not_loaded(
    adapter: Errand, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelNotFoundError, match="--base"):
        merge(replace(adapter, base=str(tmp_path)), lambda event: None, dict)
    small = HostMemory(total_bytes=1 << 20, available_bytes=1000, source="test")
    monkeypatch.setattr(trained_model, "host_memory", lambda: small)
    errand = replace(adapter, task="merge", to=str(tmp_path / "merged"))
    with pytest.raises(HostMemoryError, match="are available"):
        merge(errand, lambda event: None, dict)
    assert not [*tmp_path.iterdir()]


def test_prompts_are_not_merged_and_the_error_says_what_they_are() -> None:
    configs = {"default": SimpleNamespace(peft_type=PeftType.PREFIX_TUNING)}
    with pytest.raises(UsageError, match="kind PREFIX_TUNING is not merged") as caught:
        check_merges(SimpleNamespace(peft_config=configs))
    assert "autofit chat" in caught.value.hint
    check_merges(SimpleNamespace(peft_config=configs, merge_and_unload=print))
