"""Rows in every shape that people bring are read, or refused with the place and the reason."""

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import datasets
import pytest

from autotrain_mem.data import load
from autotrain_mem.data.token_lengths import load_tokenizer
from autotrain_mem.methods.row_formats import check_first_rows, columns_read, is_empty, why_bad, wrong_format
from autotrain_mem.support.errors import DatasetError
from autotrain_mem.support.sources import check_data_path

ASKED = {"role": "user", "content": "2 + 2?"}
SAID = {"role": "assistant", "content": "It is 4."}
HUMAN, GPT = {"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "It is 4."}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
PARTS = {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}
TEXTS = [{"text": "a"}, {"text": "b"}]
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
JSON_TEXTS = json.dumps(TEXTS)


def said(*messages: Any) -> list[dict[str, Any]]:
    return [{"messages": [ASKED, SAID]}, {"messages": list(messages)}]


def labelled(*labels: Any) -> list[dict[str, Any]]:
    return [{"prompt": "a", "completion": "b", "label": label} for label in labels]


Shape = tuple[str, Any, int | str]
SHAPES: dict[str, Shape] = {
    # kind of rows: the method and the suffix if not .jsonl, the content, and the rows that are read, or what is said
    "text": ("sft", TEXTS, 2),
    "messages": ("sft", said(ASKED, SAID), 2),
    "from and value": ("sft", [{"conversations": [HUMAN, GPT]}], 1),
    "tool calls": ("sft", said(ASKED, CALLS, {"role": "tool", "name": "add", "content": "4"}), 2),
    "tools": ("sft", [{"messages": [ASKED, SAID], "tools": [{"type": "function"}]}], 1),
    "completion": ("sft", [{"prompt": "a", "completion": "b"}], 1),
    "spoken completion": ("sft", [{"prompt": [ASKED], "completion": [SAID]}], 1),
    "tokens": ("sft", [{"input_ids": [1, 2], "labels": [-100, 2]}], 1),
    "pairs": ("dpo", [PAIR], 1),
    "pairs without prompt": ("dpo", [{"chosen": [ASKED, SAID], "rejected": [ASKED, SAID]}], 1),
    "tokens of pairs, older names": ("reward", [{"chosen_input_ids": [1, 2], "rejected_input_ids": [3]}], 1),
    "labels": ("kto", labelled(True, False), 2),
    "labels as numbers": ("kto", labelled(1, 0), 2),
    "labels in csv": ("kto .csv", "prompt,completion,label\na,b,true\na,b,false\n", 2),
    "prompts": ("grpo", [{"prompt": "a"}, {"prompt": "b", "solution": "4"}], 2),
    "other columns": ("sft", [{"text": "a", "id": 3, "meta": {"k": [1]}}, {"text": "b", "id": "x"}], 2),
    "not a number beside": ("sft", '{"text": "a", "score": NaN}\n', 1),
    "unicode": ("sft", '{"text": "Ünï 😀 \u2028 漢字"}\n', 1),
    "byte order mark": ("sft", '\ufeff{"text": "a"}\n', 1),
    "carriage returns": ("sft", '{"text": "a"}\r\n{"text": "b"}\r\n', 2),
    "blank lines": ("sft", '\n{"text": "a"}\n\n  \n{"text": "b"}', 2),
    "long row": ("sft", [{"text": "x " * 600_000}, {"text": "b"}], 2),
    "list": ("sft .json", json.dumps(TEXTS, indent=1), 2),
    "list in lines' place": ("sft", json.dumps(TEXTS, indent=1), 2),
    "list of texts": ("sft .json", '["a", "b"]', 2),
    "one object": ("sft .json", json.dumps({"messages": [ASKED, SAID]}, indent=1), 1),
    "ndjson": ("sft .ndjson", TEXTS, 2),
    "quoted": ("sft .csv", 'text,n\n"a, ""b""\nc",1\n', 1),
    "repeated column": ("sft .csv", "text,text\na,b\n", 1),
    "gzip": ("sft .jsonl.gz", gzip.compress(b'{"text": "a"}\n'), 1),
    "gzip of a list": ("sft .json.gz", gzip.compress(JSON_TEXTS.encode()), 2),
    "gzip of csv": ("sft .csv.gz", gzip.compress(b"text\na\n"), 1),
    "bzip2": ("sft .jsonl.bz2", bz2.compress(b'{"text": "a"}\n'), 1),
    "xz": ("sft .jsonl.xz", lzma.compress(b'{"text": "a"}\n'), 1),
    # what is refused
    "no content": ("sft", said(ASKED, {**SAID, "content": None}), "line 2, message 2 of messages has no content"),
    "no role": ("sft", said({"rol": "user", "content": "a"}), "line 2, message 1 of messages has no role"),
    "role of one's own": ("sft", said(ASKED, {**SAID, "role": "critic"}), 2),
    "parts": ("sft", said(PARTS, SAID), "line 2, message 1 of messages has a list of parts as content"),
    "content a number": ("sft", said({**ASKED, "content": 4}), "line 2, message 1 of messages has the content 4"),
    "no messages": ("sft", [*said(), {"messages": []}], "line 2, messages has no messages, and 1 more such row"),
    "messages as text": ("sft", [{"messages": "hello"}], 'messages is "hello", not a list of messages'),
    "texts as messages": ("sft", [{"messages": ["hi"]}], 'message 1 of messages is "hi", not an object with role'),
    "role in conversations": ("sft", [{"conversations": [ASKED]}], "role: rename conversations to messages"),
    "from in messages": ("sft", [{"messages": [HUMAN]}], "no role, but from: rename messages to conversations"),
    "value is null": ("sft", [{"conversations": [HUMAN, {**GPT, "value": None}]}], "conversations has no value"),
    "prompt and text": ("sft", [{"prompt": [ASKED], "completion": "b"}], "completion is text, but prompt is a c"),
    "prompt an object": ("grpo", [{"prompt": ASKED}], "prompt is .*, not text or a list of messages"),
    "prompt is empty": ("grpo", [{"prompt": [ASKED]}, {"prompt": []}], "line 2, prompt has no messages"),
    "text and chat": ("dpo", [PAIR, {**PAIR, "chosen": [SAID]}], "line 2, prompt is text, but chosen is a conver"),
    "label as text": ("kto", labelled("true", "false"), 'label is "true", not true or false, and 1 more'),
    "label is null": ("kto", labelled(True, None), "line 2, label is null"),
    "no tokens": ("sft", [{"input_ids": [5, 6]}, {"input_ids": []}], "line 2, input_ids is .*not a list of whole"),
    "tokens with a point": ("sft", [{"input_ids": [1.5, 2]}], "input_ids is .*not a list of whole numbers"),
    "number": ("sft", [{"text": "a"}, {"text": 5}], "line 2, text is 5, not text"),
    "not a number": ("sft", '{"text": NaN}', "line 1, text is NaN, not text"),
    "null after a blank line": ("sft", '\n{"text": null}\n', "line 2, text is null, not text"),
    "null in a packed file": ("sft .jsonl.gz", gzip.compress(b'\n{"text": null}'), "line 2, text is null, not text"),
    "null far below": ("sft", [*TEXTS * 602, {"text": None}], "line 1205, text is null"),
    "empty cell": ("sft .csv", "prompt,completion\na,\nb,c\n", "row 1, completion is null"),
    "NA": ("sft .csv", "text\nhello\nNA\n", "(?s)row 2, text is null.*an empty cell, NA and null"),
    "instruction and output": ("sft", [{"instruction": "a", "input": "", "output": "b"}], "no format that TRL kn"),
    "nested": ("sft", [{"example": {"text": "a"}}], r"columns example\), and SFTTrainer"),
    "other method": ("dpo", [{"prompt": "a", "completion": "b"}], "holds prompts with completions"),
    "no header": ("sft .csv", "hello there,hi\nb,c\n", "columns hello there, hi"),
    "semicolons": ("sft .csv", "prompt;completion\na;b, c\n", "separates its columns by ';'.*\n.*sep=';'"),
    "tabs": ("sft .tsv", "prompt\tcompletion\na\tb\n", r"separates its columns by '\\t'"),
    "rows in data": ("sft .json", json.dumps({"version": 1, "data": TEXTS}), r"rows in 'data'.*\n.*\)\)\['data'\]"),
    "rows in much data": ("sft .json", json.dumps({"data": TEXTS * 60_000}), "rows in 'data'"),
    "splits": ("sft .json", json.dumps({"train": TEXTS, "test": TEXTS}), "rows in 'train' and 'test'"),
    "columns": ("sft .json", '{"text": ["a", "b"]}', r'text is \["a", "b"\], not text'),
    "null among rows": ("sft", 'null\n{"text": "a"}\n', "line 1 is not a JSON object"),
    "list among rows": ("sft", '{"text": "a"}\n[1, 2]\n', "line 2 is not a JSON object"),
    "cut line": ("sft", '\ufeff{"text": "a"}\n{"text":\n', "line 2, column 9 is not JSON"),
    "cut list": ("sft .json", '[{"text": "a"},', "line 1, column 16 is not JSON"),
    "bad line of .json": ("sft .json", '{"text": "a"}\n{"text": "c"}\n{"text": b}\n', "line 3, column 10 is not JSON"),
    "comma after a row": ("sft", '{"text": "a"},\n', "line 1, column 14 is not JSON"),
    "repeated key": ("sft", '{"text": "a", "text": "b"}\n', "specified twice in row 0"),
    "very deep": ("sft", '{"text":' + "[" * 2000 + "]" * 2000 + "}", "nested too deeply"),
    "latin-1": ("sft .csv", "text\ncaf\xe9\n".encode("latin-1"), "line 2 is not UTF-8"),
    "not packed": ("sft .jsonl.gz", b'{"text": "a"}\n', "cannot be unpacked"),
    "cut when packed": ("sft .jsonl.gz", gzip.compress(b'{"text": "a"}\n')[:20], "cannot be unpacked"),
    "not parquet": ("sft .parquet", b"hello", "5 bytes"),
    "other kind": ("sft .txt", "hello\n", "The file type of .* is not supported"),
    "no rows": ("sft .csv", "text,x\n", "has no rows"),
}


@pytest.fixture(scope="module")
def template(qwen: Path) -> str:
    return str(load_tokenizer(str(qwen)).chat_template)


@pytest.mark.parametrize("kind", SHAPES)
def test_rows_of_each_shape_are_read_or_refused_with_the_reason(kind: str, template: str, tmp_path: Path) -> None:
    where, content, expected = SHAPES[kind]
    method, _, suffix = where.partition(" ")
    path = tmp_path / f"rows{suffix or '.jsonl'}"
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)

    def read() -> int:
        check_data_path(str(path))
        check_first_rows(method, str(path), "text")
        rows = load.load_named(str(path), None)["train"]
        if not (columns := columns_read(method, rows.column_names, "text")):
            raise wrong_format(method, rows.column_names, str(path), "text")
        load.check_rows(rows, columns, str(path), template)
        return len(rows)

    if isinstance(expected, int):
        assert read() == expected
    else:
        with pytest.raises(DatasetError, match=expected) as raised:
            read()
        assert raised.value.hint


def test_a_role_that_the_template_leaves_out_is_refused() -> None:
    shows_two = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}"
    row = said(ASKED, {**SAID, "role": "critic"})[1]
    assert "message 2 of messages has the role 'critic'" in why_bad(row, shows_two)


def test_folders_of_each_kind_are_read(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(TEXTS)
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    rows.to_parquet(tmp_path / "files" / "rows.parquet")
    for name in ("saved", "splits", "files"):
        assert load.load_named(str(tmp_path / name), None)["train"]["text"] == ["a", "b"], name


def test_rows_without_an_answer_are_seen() -> None:
    empty = ({"text": ""}, {"prompt": "a", "completion": ""}, {**PAIR, "chosen": ""}, {"prompt": ""})
    assert all(map(is_empty, (*empty, {"messages": [ASKED, {**SAID, "content": ""}]})))
    assert not any(map(is_empty, ({"text": "a"}, {"prompt": "", "completion": "b"}, PAIR, *said(ASKED, CALLS))))
