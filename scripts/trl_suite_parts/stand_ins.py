"""Stand-ins for the models and rows of the hub that TRL's tests name: tiny, with random weights and made-up texts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image

TEMPLATES = {"Qwen2": "qwen2_5", "Qwen3": "qwen3", "Qwen3Moe": "qwen3", "GptOss": "gptoss"}
"""Kind of model -> the chat template of the installed TRL that renders tools; other kinds have the quickstart's."""
_SIZES = {
    **{"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": True},
}
"""The sizes of each kind, under the names that one config or another gives them."""
_COMMIT = "0" * 40
_OWNER = "trl-internal-testing"


def write_models(cache: Path, names: set[str]) -> None:
    """Writes the models into a cache of the hub, from which each process loads them by name without a network."""
    import transformers
    import trl

    from autotrain_mem.cli import tiny_model, word_problems

    tokenizer = tiny_model.train_tokenizer(word_problems.texts(word_problems.problems(100, seed=0)))
    shared = {**_SIZES, "vocab_size": tiny_model.VOCABULARY_SIZE, **tiny_model.special_token_ids()}
    templates = Path(trl.__file__).parent / "chat_templates"
    for name in sorted(names):
        folder = cache / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / _COMMIT
        kind, _, heads = name.rpartition("/tiny-")[2].partition("For")
        if "Qwen2.5-0.5B-Instruct" in name:
            kind = "Qwen2"
        if folder.exists():
            continue
        if heads.startswith("Conditional") or not hasattr(transformers, f"{kind}Config"):
            continue  # models that read images, and repositories with code of their own: not made
        template = templates / f"{TEMPLATES.get(kind)}.jinja"
        tokenizer.chat_template = template.read_text() if kind in TEMPLATES else tiny_model.CHAT_TEMPLATE
        tiny_model.write_model(snapshot, getattr(transformers, f"{kind}Config")(**shared), tokenizer)
        if heads.startswith("SequenceClassification"):
            classifier = transformers.AutoModelForSequenceClassification
            classifier.from_pretrained(snapshot, num_labels=1).save_pretrained(snapshot)
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(_COMMIT)


_SENTENCES = ("The sky over the harbour", "Two and three make", "A cat on the wall", "Bread needs flour and", "My name")
_ANSWERS = (" is blue.", " five.", " looks at birds.", " some water.", " is written here.", " was grey.", " seven.")


def _pairs(rows: int) -> Iterator[tuple[str, str, str]]:
    for row in range(rows):
        yield _SENTENCES[row % len(_SENTENCES)], _ANSWERS[row % len(_ANSWERS)], _ANSWERS[(row + 3) % len(_ANSWERS)]


def _said(role: str, text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": text.strip(), **more}]


def _called(text: str) -> list[dict[str, Any]]:
    """A call of a tool, its result, and the answer."""
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"text": text}}}
    return [*_said("assistant", "", tool_calls=[call]), *_said("tool", text, name="look_up"), *_said("assistant", text)]


_TOOL = {
    "name": "look_up",
    "description": "Looks a text up.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "It."}}},
}


def _rows(source: str, kind: str, rows: int) -> list[dict[str, Any]]:
    """Makes the rows of one of TRL's formats: ``standard_preference``, ``conversational_language_modeling``, ..."""
    form, _, what = kind.partition("_")
    speaks = form == "conversational" or source in ("toolcall", "harmony")
    what = what if form in ("conversational", "standard") else kind
    made = []
    for row, (text, good, bad) in enumerate(_pairs(rows)):
        prompt: Any = _said("user", text) if speaks else text
        chosen, rejected = (_said("assistant", answer) if speaks else answer for answer in (good, bad))
        more: dict[str, Any] = {}
        if source == "harmony":
            chosen, rejected = (_said("assistant", answer, thinking="It is known.") for answer in (good, bad))
            more = {"chat_template_kwargs": {"reasoning_effort": "low"}}
        elif source == "toolcall":
            chosen, rejected = _called(good), _called(bad)
            more = {"tools": json.dumps([{"type": "function", "function": _TOOL}])}
        elif source == "zen-image":
            more = {"image": Image.new("RGB", (64, 48), (9 * row, 99, 255 - 9 * row))}
        made.append(
            {
                "language_modeling": {"messages": prompt + chosen} if speaks else {"text": text + good},
                "prompt_only": {"prompt": prompt},
                "prompt_completion": {"prompt": prompt, "completion": chosen},
                "preference": {"prompt": prompt, "chosen": chosen, "rejected": rejected},
                "implicit_prompt_preference": {"chosen": prompt + chosen, "rejected": prompt + rejected},
                "unpaired_preference": {"prompt": prompt, "completion": chosen, "label": row % 2 == 0},
            }[what]
            | more
        )
    return made


def load_dataset(
    real: Callable[..., Any], path: str, name: str | None = None, *, split: str | None = None, **options: Any
) -> Any:
    """Takes the place of ``datasets.load_dataset`` for TRL's datasets of its tests; others are left to ``real``."""
    import datasets

    owner, _, source = path.partition("/")
    if owner != _OWNER or name is None:
        return real(path, name, split=split, **options)
    made = datasets.DatasetDict(
        {part: datasets.Dataset.from_list(_rows(source, name, rows)) for part, rows in (("train", 17), ("test", 2))}
    )
    part, _, few = (split or "").partition("[:")
    if options.get("streaming"):
        streams = {each: rows.to_iterable_dataset() for each, rows in made.items()}
        return streams[part] if part else datasets.IterableDatasetDict(streams)
    if not part:
        return made
    return made[part].select(range(int(few.rstrip("]")))) if few else made[part]


def cache_variables(cache: Path) -> dict[str, str]:
    """Returns the environment in which the hub's names lead to the stand-ins."""
    return {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
