"""Which folders hold a trained model; what chat starts; a merged adapter; what is uploaded."""

import contextlib
import json
import pathlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autotrain_mem.cli import main, trained_model_commands
from autotrain_mem.cli.trained_model_commands import with_base
from autotrain_mem.cli.trained_run import TrainedRun, find_run
from autotrain_mem.support import codec
from autotrain_mem.support.errors import HostMemoryError, ModelNotFoundError, OutputFolderError, UsageError
from autotrain_mem.support.host import HostMemory
from autotrain_mem.types.methods_table import METHODS
from tests.report.report_examples import UNCHANGED_PLAN

MakeRun = Callable[..., pathlib.Path]


@pytest.fixture
def make_run(tmp_path: pathlib.Path) -> MakeRun:
    """``make_run("run", "adapter_config.json", ...)``: plan, report and empty files of these names."""

    def made(name: str, *files: str, model: str = "tiny", method: str = "sft", **knobs: object) -> pathlib.Path:
        folder = tmp_path / name
        folder.mkdir()
        plan = replace(UNCHANGED_PLAN, job=replace(UNCHANGED_PLAN.job, model=model, method=method))
        plan = replace(plan, estimate=replace(plan.estimate, knobs=replace(plan.knobs, **knobs)))
        (folder / "plan.json").write_text(json.dumps(codec.to_json(plan)), encoding="utf-8")
        (folder / "run.json").write_text('{"steps": 7}', encoding="utf-8")
        for file in files:
            (folder / file).write_text("{}", encoding="utf-8")
        return folder

    return made


ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def test_a_run_of_another_version_is_a_run(make_run: MakeRun) -> None:
    """Its plan may hold what this version does not know, and lack what it needs."""
    folder = make_run("one", "model.safetensors")
    plan = json.loads((folder / "plan.json").read_text())
    del plan["estimate"], plan["levers"]
    (folder / "plan.json").write_text(json.dumps(plan | {"schema": "autofit.plan/99"}))
    assert find_run(str(folder)).method.name == "sft"
    for text in ("{}", "[", json.dumps(plan | {"method": "later"}), json.dumps(plan | {"model": 7})):
        (folder / "plan.json").write_text(text)
        with pytest.raises(UsageError, match="does not name a method and model"):
            find_run(str(folder))


def test_what_is_no_run_that_has_ended_is_refused_with_the_way_on(make_run: MakeRun, tmp_path: pathlib.Path) -> None:
    begun, dead = make_run("begun", "train.log"), make_run("dead")
    (begun / "checkpoint-4").mkdir()
    (dead / "run.json").unlink()
    for path, kind, words in [
        (str(tmp_path / "nowhere"), UsageError, "There is no folder"),
        ("", UsageError, "There is no folder"),
        (str(begun / "plan.json"), UsageError, "There is no folder"),
        (str(begun / "checkpoint-4"), UsageError, "is not the folder of a run"),
        (str(tmp_path), UsageError, str(begun)),  # the runs in it are named
        (str(begun), OutputFolderError, "--resume_from_checkpoint"),
        (str(dead), OutputFolderError, f"--plan {dead}"),
    ]:
        with pytest.raises(kind) as caught:
            find_run(path)
        assert words in str(caught.value)


def test_nothing_is_merged_over_a_folder_out_of_a_whole_model_or_without_its_base(
    make_run: MakeRun, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_hub = find_run(str(make_run("two", *ADAPTER, model="Qwen/Qwen2.5-0.5B")))
    assert with_base(on_hub, None).base == "Qwen/Qwen2.5-0.5B"
    assert with_base(on_hub, "ORG/NAME").base == "ORG/NAME"
    whole, run = str(make_run("whole", "model.safetensors")), str(make_run("run", *ADAPTER, load_in_4bit=True))
    assert find_run(run).base_bits == 4
    (tmp_path / "run-merged").mkdir()
    for words, message in [
        ([whole], "nothing to merge"),
        ([run], "run-merged exists"),
        ([run, "--out", whole], "exists already"),
        ([run, "--out", str(tmp_path / "no" / "such")], "There is no folder"),
        ([run, "--out", str(tmp_path / "new")], "there is no such folder. Give --base"),
    ]:
        assert main.run(["merge", *words]) != 0
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_whole_model_is_served_and_talked_to(
    make_run: MakeRun, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = str(make_run("whole", "model.safetensors")), str(make_run("run", *ADAPTER))
    reward = str(make_run("reward", "model.safetensors", method="reward"))
    monkeypatch.setattr(trained_model_commands, "installed_versions", lambda names: dict.fromkeys(names))
    said = {run: f"autofit merge {run}", reward: "scores texts", whole: f"transformers serve {whole}"}
    for folder, message in said.items():
        assert main.run(["chat", folder]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    started: list[list[str]] = []

    def serve(words: list[str]) -> Any:
        started.append(words[3:])
        server = SimpleNamespace(poll=lambda: None, terminate=lambda: started.append(["ended"]))
        return contextlib.nullcontext(server)

    def talk(words: list[str], **options: Any) -> Any:
        started.append(words[3:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(trained_model_commands, "installed_versions", lambda names: dict.fromkeys(names, "1"))
    monkeypatch.setattr(trained_model_commands, "subprocess", SimpleNamespace(Popen=serve, run=talk))
    monkeypatch.setattr(trained_model_commands, "answers", lambda url: True)
    (tmp_path / "run-merged").mkdir()
    assert main.run(["chat", run]) == 0
    merged, port = str((tmp_path / "run-merged").resolve()), started[0][3]
    served = ["serve", merged, "--port", port]
    assert started == [served, ["chat", merged, f"http://localhost:{port}"], ["ended"]]


@pytest.mark.parametrize("name", ["", "model", "a/b/c", "a b/c", "../x/y"])
def test_a_repository_needs_an_owner_and_a_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["push", "run", "--to", name]) == 2
    assert "--to ORG/NAME" in capsys.readouterr().err


def test_a_new_repository_is_private_and_gets_the_model_alone(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.cli.hf import app
    from huggingface_hub.utils import filter_repo_objects

    folder = make_run("run", *ADAPTER, "training_args.bin", "tokenizer.json", "optimizer.pt", ".env")
    (folder / "checkpoint-2").mkdir()
    (folder / "checkpoint-2" / "model.safetensors").write_text("{}")
    made: dict[str, Any] = {}
    codes = iter((0, 1))

    def create(self: HfApi, repo_id: str, *, private: bool, **options: Any) -> Any:
        made["private"] = private
        return SimpleNamespace(repo_id=repo_id)

    def upload(self: HfApi, *, folder_path: str, allow_patterns: Any, ignore_patterns: Any, **options: Any) -> Any:
        names = [str(path.relative_to(folder_path)) for path in pathlib.Path(folder_path).rglob("*") if path.is_file()]
        chosen = filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        made["files"] = sorted(chosen)
        return SimpleNamespace(commit_url="there")

    def run(words: list[str], **options: Any) -> Any:
        app(words[3:], standalone_mode=False)
        return SimpleNamespace(returncode=next(codes))

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    monkeypatch.setattr(trained_model_commands, "subprocess", SimpleNamespace(run=run))
    assert main.run(["push", str(folder), "--to", "ORG/NAME"]) == 0
    assert made == {"private": True, "files": sorted([*ADAPTER, "tokenizer.json"])}
    assert "https://huggingface.co/ORG/NAME" in capsys.readouterr().out
    assert main.run(["push", str(folder), "--to", "ORG/NAME", "--public"]) != 0
    assert not made["private"]
    assert "hf auth login" in capsys.readouterr().err


@pytest.mark.slow
def test_a_merged_model_computes_what_base_and_adapter_do(
    qwen: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from peft import AutoPeftModelForCausalLM, LoraConfig, PeftType, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from autotrain_mem.cli import adapter_merge

    base, folder, target, new = qwen, *(tmp_path / name for name in ("run", "merged", "new"))
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    (folder / "README.md").write_text("---\nlibrary_name: peft\n---\nA card.\n", encoding="utf-8")
    adapter = TrainedRun(
        folder=folder, method=METHODS["sft"], base=str(base), revision=None, base_bits=None, is_adapter=True
    )

    def merge(run: TrainedRun, target: pathlib.Path) -> str:
        return adapter_merge.merge_adapter(run, target, lambda note: None, trust_remote_code=False)

    assert merge(adapter, target).endswith("in float32")
    assert "library_name" not in (target / "README.md").read_text()
    tokens = torch.arange(20, 28)[None]
    merged, beside, bare = (
        model.eval()(tokens).logits
        for model in (
            AutoModelForCausalLM.from_pretrained(target),
            AutoPeftModelForCausalLM.from_pretrained(folder),
            AutoModelForCausalLM.from_pretrained(base),
        )
    )
    torch.testing.assert_close(merged, beside, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(merged, bare, rtol=1e-2, atol=1e-2), "else nothing of the adapter would be in it"
    with pytest.raises(OutputFolderError, match="exists already"):
        merge(adapter, target)
    with pytest.raises(ModelNotFoundError, match="--base"):
        merge(replace(adapter, base=str(tmp_path)), new)
    with monkeypatch.context() as patched:
        patched.setattr(adapter_merge, "free_disk_bytes", lambda folder: 1000)
        with pytest.raises(OutputFolderError, match="another disk"):
            merge(adapter, new)
        small = HostMemory(total_bytes=1 << 20, available_bytes=1000, source="test")
        patched.setattr(adapter_merge, "host_memory", lambda: small)
        with pytest.raises(HostMemoryError, match="are available"):
            merge(adapter, new)
    prompts = SimpleNamespace(peft_config={"default": SimpleNamespace(peft_type=PeftType.PREFIX_TUNING)})
    with pytest.raises(UsageError, match="A PREFIX_TUNING adapter cannot be merged"):
        adapter_merge.check_merges(prompts)
    assert not new.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "merged"}
