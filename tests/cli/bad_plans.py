"""Files that hold no plan to explain or to follow, and how that is mistyped, by the name of the golden file."""

from __future__ import annotations

from pathlib import Path

PLANS = {
    "empty_plan.json": b"\n",
    "words_plan.json": b"fits rtx3060 with 3 changes: needs 8.51 GiB of 11.2 GiB\n",
    "cut_short_plan.json": b'{\n  "schema": "autofit.plan/4",\n  "method": "sft",\n  "model": "Qwen/Qw',
    "list_plan.json": b"[1, 2]\n",
    "not_utf8_plan.json": b'{"schema": "\xff\xfe"}',
    "old_plan.json": b'{"schema": "autofit.plan/2", "method": "sft", "model": "Qwen/Qwen2.5-0.5B", "seconds": 9}',
    "old_fit.json": b'{"schema": "autofit.fit/1", "plan": {"schema": "autofit.plan/1", "method": "dpo"}, "run": {}}',
    "an_estimate.json": b'{"schema": "autofit.estimate/1", "fits": true}',
    "bare_plan.json": b'{"schema": "autofit.plan/4", "method": "sft", "model": "my model"}',
}

CASES = {
    "plan_missing": (42, "explain nowhere.json"),
    "plan_folder_without": (42, "explain tiny"),
    "plan_empty": (42, "explain empty_plan.json"),
    "plan_not_json": (42, "explain words_plan.json"),
    "plan_cut_short": (42, "explain cut_short_plan.json"),
    "plan_a_list": (42, "explain list_plan.json"),
    "plan_not_utf8": (42, "explain not_utf8_plan.json"),
    "plan_of_another_version": (42, "explain old_plan.json"),
    "plan_of_another_version_in_a_run": (42, "explain old_fit.json"),
    "plan_an_estimate": (42, "explain an_estimate.json"),
    "plan_without_its_keys": (42, "explain bare_plan.json"),
    "plan_not_given": (2, "explain"),
    "plan_given_twice": (2, "explain a.json b.json"),
    "plan_with_a_flag": (2, "explain a.json --gpu rtx3060"),
    "plan_as_json": (2, "explain a.json --json"),
    "plan_to_follow_missing": (42, "sft --plan nowhere.json"),
    "plan_to_follow_cut_short": (42, "sft --plan cut_short_plan.json --simulate"),
    "plan_to_follow_old": (42, "plan sft --plan old_plan.json --gpu rtx3060"),
    "plan_to_estimate": (2, "estimate sft --plan old_plan.json"),
    "plan_for_all_cards": (2, "plan sft --plan old_plan.json --gpu all"),
    "out_for_all_cards": (2, "plan sft --model tiny --gpu rtx3060,l4 --out cards.json"),
    "out_of_an_estimate": (2, "estimate sft --model tiny --gpu rtx3060 --out plan.json"),
    "out_is_no_plan": (42, "plan sft --model tiny --gpu rtx3060 --out data.jsonl"),
    "out_is_a_device": (62, "plan sft --model tiny --gpu rtx3060 --out /dev/null"),
    "out_is_empty": (42, "plan sft --model tiny --gpu rtx3060 --out="),
    "out_is_stdout": (2, "plan sft --model tiny --gpu rtx3060 --out -"),
    "plan_is_a_device": (42, "explain /dev/zero"),
    "plan_is_stdin": (2, "sft --plan -"),
    "out_folder_missing": (62, "plan sft --model tiny --gpu rtx3060 --out nowhere/plan.json"),
}


def write(folder: Path) -> None:
    """Write them all."""
    for name, content in PLANS.items():
        (folder / name).write_bytes(content)
