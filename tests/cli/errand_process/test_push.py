"""What is uploaded, and what is not, with a hub that only notes what it is asked."""

import fnmatch
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError

from autotrain_mem.cli.errand_process import main as module
from autotrain_mem.cli.errand_process.main import UPLOADED, push
from autotrain_mem.cli.errands import Errand
from autotrain_mem.support.errors import AutofitError, TrainingError, UsageError

ERRAND = Errand(task="push", folder="run", to="ORG/NAME")


class Hub:
    """Stands for the hub's client."""

    def __init__(self, files: list[str] | None = None, error: Exception | None = None) -> None:
        self.files, self.error = files, error
        self.made: list[tuple[str, bool]] = []

    def repo_exists(self, name: str) -> bool:
        if self.error is not None:
            raise self.error
        return self.files is not None

    def list_repo_files(self, name: str) -> list[str]:
        return self.files or []

    def create_repo(self, name: str, *, private: bool) -> None:
        self.made.append((name, private))

    def upload_folder(self, **options: Any) -> Any:
        self.options = options
        return SimpleNamespace(oid="c0ffee")


@pytest.fixture(autouse=True)
def logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(module, "get_token", lambda: "hf_x")


def pushed(hub: Hub, errand: Errand = ERRAND) -> Any:
    return push(errand, lambda event: None, dict, hub)


def test_a_new_repository_is_private_and_gets_the_model_alone() -> None:
    hub = Hub()
    assert pushed(hub)["url"].endswith("ORG/NAME")
    assert hub.made == [("ORG/NAME", True)]
    assert hub.options["allow_patterns"] == [*UPLOADED]
    kept = ["plan.json", "run.json", "training_args.bin", "memory.jsonl", "train.log", "checkpoint-2/model.safetensors"]
    kept += [".env", "optimizer.pt", "_autofit.lock"]
    sent = ["model-00001-of-2.safetensors", "adapter_config.json", "tokenizer.json", "chat_template.jinja", "README.md"]
    matched = [name for name in kept + sent if any(fnmatch.fnmatch(name, each) for each in UPLOADED)]
    assert [name for name in matched if name not in sent] == ["checkpoint-2/model.safetensors"]
    assert set(sent) <= {*matched}


def test_what_lies_in_a_repository_is_not_written_over_unasked() -> None:
    with pytest.raises(UsageError, match="--update"):
        pushed(Hub([".gitattributes", "model.safetensors"]))
    again, empty = Hub(["model.safetensors"]), Hub([".gitattributes"])
    pushed(again, Errand(task="push", folder="run", to="ORG/NAME", update=True))
    pushed(empty)
    assert (again.made, empty.made) == ([], [])


def test_each_reason_that_nothing_is_sent_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    response: Any = SimpleNamespace(status_code=403, headers={}, request=None)
    forbidden = HfHubHTTPError("no", response=response)
    for hub, kind, words in [
        (Hub(error=forbidden), UsageError, "hf auth login"),
        (Hub(error=ConnectionError("no route")), TrainingError, "no route"),
    ]:
        with pytest.raises(kind) as caught:
            pushed(hub)
        assert words in str(caught.value)
    for change in ((module, "get_token", lambda: None), (module.constants, "HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(*change)
        with pytest.raises(AutofitError, match=r"hf auth login|HF_HUB_OFFLINE"):
            pushed(Hub())
