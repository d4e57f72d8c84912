"""``autofit estimate --sweep``: the table, its JSON and CSV, and combinations that TRL refuses."""

import csv
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from autotrain_mem import api
from tests.place import Autofit, Ran

TINY = ("estimate", "sft", "--model", "tiny", "--gpu", "300MiB")
SHORT = (*TINY, "--max_length", "16")


def rows_of(ran: Ran) -> list[dict[str, str]]:
    assert ran.code == 0, ran.err
    return list(csv.DictReader(io.StringIO(ran.out)))


def points_of(ran: Ran) -> list[dict[str, Any]]:
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["schema"] == "autofit.sweep/1"
    points: list[dict[str, Any]] = found["points"]
    return points


def test_every_point_is_what_estimate_says_of_it_alone(autofit: Autofit) -> None:
    axes = ("--sweep", "gpu=20MiB,300MiB", "--sweep", "per_device_train_batch_size=1,4")
    points = points_of(autofit("estimate", "sft", "--model", "tiny", "--max_length", "4", *axes, "--json"))
    assert points[0]["swept"] == {"gpu": "20MiB", "per_device_train_batch_size": 1}
    assert {point["estimate"]["knobs"]["gradient_accumulation_steps"] for point in points} == {1}
    alone = json.loads(autofit(*TINY, "--max_length", "4", "--per_device_train_batch_size", "4", "--json").out)
    found = points[-1]["estimate"]
    del alone["rehearsal_seconds"], found["rehearsal_seconds"]
    assert found == alone


def test_a_refused_combination_says_why_and_the_others_stand(autofit: Autofit) -> None:
    axes = ("--sweep", "load_in_4bit=true,false", "--sweep", "use_peft=true,false")
    ran = autofit(*SHORT, *axes)
    assert (ran.code, ran.err) == (0, "")  # no progress in a pipe
    assert ran.out.startswith("3 of 4 points fit 300MiB")
    assert "[1]  --load_in_4bit" in ran.out
    assert not [line for line in ran.out.splitlines() if line != line.rstrip()]
    line = "estimate grpo --model tiny --gpu 300MiB --reward_funcs accuracy_reward --prompt_length 8 --csv "
    line += "--max_completion_length 8 --num_generations 4 --sweep per_device_train_batch_size=3,4"
    three, four = rows_of(autofit(*shlex.split(line)))
    assert ("3" in three["refused"], three["required_bytes"]) == (True, "")
    assert int(four["required_bytes"]) > 0


def test_a_value_of_several_words_is_one_setting_and_a_swept_flag_wins_over_the_yaml_file(
    autofit: Autofit, tmp_path: Path
) -> None:
    config = tmp_path / "job.yaml"
    config.write_text("model: tiny\ngpu: 300MiB\nmax_length: 16\nautofit:\n  expandable_segments: true\n")
    axes = ("--sweep", "expandable-segments=false", "--sweep", "lora_target_modules=q_proj v_proj,all-linear")
    points = points_of(autofit("estimate", "sft", "--config", str(config), "--use_peft", "--json", *axes))
    assert [point["swept"]["lora_target_modules"] for point in points] == [["q_proj", "v_proj"], ["all-linear"]]
    one, two = (point["estimate"]["owners_at_peak"]["weights"] for point in points)
    assert two > one
    knobs = [point["estimate"]["knobs"] for point in points]
    assert [(each["max_length"], each["expandable_segments"]) for each in knobs] == [(16, False)] * 2


def test_nothing_is_rehearsed_before_the_last_value_is_read_and_ctrl_c_ends_it_with_one_message(
    autofit: Autofit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(rehearsals: api.Rehearsals, *, checks: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "estimate", interrupted)
    ran = autofit(*TINY, "--sweep", "max_length=16,32,abc")
    assert (ran.code, "'abc'" in ran.err) == (2, True)
    ran = autofit(*TINY, "--sweep", "max_length=16,32")
    assert (ran.code, ran.out) == (130, "")
    assert ran.err.startswith("error: ")
