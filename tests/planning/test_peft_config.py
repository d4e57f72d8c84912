"""``--peft_config``: read from where PEFT saves it, and refused where flags say otherwise."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotrain_mem.checks.flag_checks import Flags, quantization
from autotrain_mem.exports.tools import check
from autotrain_mem.planning.read_request import with_peft_config
from autotrain_mem.planning.run_request import RunRequest
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types.autofit import AutoFit
from autotrain_mem.types.findings import collect

VERA = {"peft_type": "VERA", "r": 256, "inference_mode": True}


def request(config: object, *argv: str) -> RunRequest:
    return RunRequest(method="sft", model="tiny", argv=argv, autofit=AutoFit(peft_config=config))  # type: ignore[arg-type]


def test_a_folder_a_file_the_keys_and_json_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(VERA))
    read = [with_peft_config(request(each)) for each in (tmp_path, str(file), VERA, json.dumps(VERA))]
    assert {one.autofit.peft_config for one in read} == {'{"peft_type": "VERA", "r": 256}'}
    assert read[0].autofit.pins == {"peft_config": '{"peft_type": "VERA", "r": 256}', "use_peft": True}
    assert with_peft_config(replace(read[0], argv=("--use_peft",))).autofit == read[0].autofit, "a plan hands it on"


def test_what_cannot_be_is_refused() -> None:
    for config, argv, words in (
        ("nowhere", (), "nowhere cannot be read"),
        ("{", (), "is not JSON"),
        ('{"r": 8}', (), "names no peft_type"),
        (VERA, ("--use_peft", "false"), "--use_peft false and --peft_config contradict"),
        (VERA, ("--lora_r", "4", "--use_dora"), "--lora_r, --use_dora and --peft_config both"),
        ({"peft_type": "LOKR"}, ("--load_in_4bit",), "--load_in_4bit does not work with LOKR"),
        ({"peft_type": "PREFIX_TUNING"}, ("--gradient_checkpointing",), "has no prefix"),
        ({"peft_type": "LORA", "init_lora_weights": "eva"}, (), "initialize_lora_eva_weights"),
    ):
        with pytest.raises(UsageError) as caught:
            with_peft_config(request(config, *argv))
        assert words in caught.value.message
        assert caught.value.hint


def test_a_script_hears_the_same() -> None:
    loha = {"peft_config": '{"peft_type": "LOHA"}', "load_in_8bit": True, "use_peft": True}
    unknown = {"peft_config": '{"peft_type": "SHIRA"}'}
    for given, words in ((unknown, "SHIRA is not supported"), (loha, "--load_in_8bit does not work with LOHA")):
        (finding,) = collect([quantization], Flags(method="sft", given=given))
        assert words in finding.message


def test_no_tools_file_trains_another_adapter() -> None:
    shared = {"is_zero": False, "token_shards": 1}
    check("commands", "sft", peft_config="{}", **shared)
    check("trl", "sft", peft_config=None, **shared)
    with pytest.raises(UsageError, match="has no key for a config of PEFT's own"):
        check("axolotl", "sft", peft_config="{}", **shared)
