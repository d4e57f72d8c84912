"""Stand-ins for the models and rows of the hub that TRL's tests name: tiny, with random weights and made-up texts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FAMILIES = {
    **{"Qwen2For": "qwen2", "Qwen3For": "qwen3", "LlamaFor": "llama", "MistralFor": "llama", "Gemma3For": "gemma3"},
    **{"Qwen3MoeFor": "qwen3_moe", "GptOssFor": "gpt_oss", "Gemma2For": "gemma3", "GPTNeoXFor": "gpt2"},
}
"""Part of a model's name -> the nearest family of ``tests/tiny.py``. Models of other families are not made, so the
tests that need one fail with TRL's classes too."""
_COMMIT = "0" * 40
_OWNER = "trl-internal-testing"


def write_models(cache: Path, names: set[str]) -> None:
    """Writes the models into a cache of the hub, from which each process loads them by name without a network."""
    import transformers
    from tiny import tiny_folder

    for name in sorted(names):
        folder = cache / f"models--{name.replace('/', '--')}"
        family = next((family for part, family in FAMILIES.items() if f"tiny-{part}" in name), None)
        if "Qwen2.5-0.5B-Instruct" in name:
            family = "qwen2"
        if family is None or "Conditional" in name or folder.exists():
            continue
        snapshot = folder / "snapshots" / _COMMIT
        tiny_folder(snapshot, family)
        if "SequenceClassification" in name:
            kind = transformers.AutoModelForSequenceClassification
            kind.from_pretrained(snapshot, num_labels=1).save_pretrained(snapshot)
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(_COMMIT)


_SENTENCES = ("The sky over the harbour", "Two and three make", "A cat on the wall", "Bread needs flour and", "My name")
_ANSWERS = (" is blue.", " five.", " looks at birds.", " some water.", " is written here.", " was grey.", " seven.")


def _pairs(rows: int) -> Iterator[tuple[str, str, str]]:
    for row in range(rows):
        yield _SENTENCES[row % len(_SENTENCES)], _ANSWERS[row % len(_ANSWERS)], _ANSWERS[(row + 3) % len(_ANSWERS)]


def _said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text.strip()}]


def _rows(kind: str, rows: int) -> list[dict[str, Any]]:
    """Makes the rows of one of TRL's formats: ``standard_preference``, ``conversational_language_modeling``, ..."""
    form, _, what = kind.partition("_")
    speaks = form == "conversational"
    made = []
    for row, (text, good, bad) in enumerate(_pairs(rows)):
        prompt: Any = _said("user", text) if speaks else text
        chosen: Any = _said("assistant", good) if speaks else good
        rejected: Any = _said("assistant", bad) if speaks else bad
        made.append(
            {
                "language_modeling": {"messages": prompt + chosen} if speaks else {"text": text + good},
                "prompt_only": {"prompt": prompt},
                "prompt_completion": {"prompt": prompt, "completion": chosen},
                "preference": {"prompt": prompt, "chosen": chosen, "rejected": rejected},
                "implicit_prompt_preference": {"chosen": prompt + chosen, "rejected": prompt + rejected},
                "unpaired_preference": {"prompt": prompt, "completion": chosen, "label": row % 2 == 0},
            }[what]
        )
    return made


def load_dataset(
    real: Callable[..., Any], path: str, name: str | None = None, *, split: str | None = None, **options: Any
) -> Any:
    """Takes the place of ``datasets.load_dataset`` for TRL's dataset of texts; others are left to ``real``."""
    import datasets

    if path != f"{_OWNER}/zen" or name is None:
        return real(path, name, split=split, **options)
    made = datasets.DatasetDict(
        {part: datasets.Dataset.from_list(_rows(name, rows)) for part, rows in (("train", 17), ("test", 2))}
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
