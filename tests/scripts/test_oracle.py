"""``scripts/oracle``: what it keeps of a case, and what it says of two files."""

import copy
import json
import pathlib
from collections.abc import Callable

import pytest
from oracle_cases.differences import case_lines, compare
from oracle_cases.execute import printed, warm
from script_runner import Script

from tests.forked import Forge


def test_two_runs_are_equal_and_a_change_is_named(script: Callable[[str], Script], tmp_path: pathlib.Path) -> None:
    oracle, old, new = script("oracle"), tmp_path / "old.json", tmp_path / "new.json"
    for path in (old, new):
        assert oracle.run("--out", path, "--only", "allocator: default").code == 0
    same = oracle.run("--compare", old, new)
    assert (same.code, same.out) == (0, "0 of 1 cases differ\n")
    changed = json.loads(new.read_text())
    changed["cases"]["allocator: default"]["at_the_end"]["num_ooms"] += 1
    new.write_text(json.dumps(changed))
    other = oracle.run("--compare", old, new)
    assert other.code == 1
    assert other.out.startswith("allocator: default: 1 differ, the first at_the_end.num_ooms: ")


@pytest.mark.slow
def test_a_command_is_kept_with_its_traces_and_is_the_same_again(
    tmp_path: pathlib.Path, forge: Forge, qwen: pathlib.Path
) -> None:
    line = f"estimate sft --model {qwen} --max_length 32 --gpu l40s"
    with forge.children(), warm(tmp_path):
        first, again, refused = printed(line), printed(line), printed(f"{line} --max_lenght 5")
    assert first["json"]["required_bytes"] > 0
    [trace] = first["traces"]
    assert trace["operators"] > 1000
    assert compare({"one": first}, {"one": again}) == {}, "seconds are left out"
    more = copy.deepcopy(first)
    more["traces"][0]["not_counted"].append("the kernels' workspaces")
    assert [each.where for each in compare({"one": first}, {"one": more})["one"]] == ["traces.0.not_counted"]
    assert compare({"one": first}, {"one": more}, without_prose=True) == {}
    assert (refused["exit_code"], refused["traces"]) == (2, [])
    assert "max_length" in refused["error"]


def test_values_differ_beyond_the_rounding_of_a_sum() -> None:
    for old, new, said in (
        ({"a": 1}, {"a": 1.0}, None),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, None),
        ({"a": 1}, {"a": True}, "1 differ, the first a: 1 -> True"),
        ({"a": [1, 2], "b": 3}, {"a": [1, 4], "b": 5}, "2 differ, the first a.1: 2 -> 4"),
        ({"a": [1]}, {"a": [1, 2]}, "1 differ, the first a: 1 entries -> 2 entries"),
        ({"a": 1}, {"b": 1}, "2 differ, the first a: 1 -> (absent)"),
    ):
        assert case_lines(compare({"case": old}, {"case": new})) == ([f"case: {said}"] if said else []), old
