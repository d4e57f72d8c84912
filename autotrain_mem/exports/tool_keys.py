"""Reads the table of other tools' keys, and reads files of these tools as TRL's settings and ours.

``keys.csv`` serves both directions. A row's ``keys`` have the name ``trl`` in TRL, or the same one; its ``methods``
have the setting, or all do. The ``text`` maps the tool's values to TRL's where they differ, or says what to do instead.
The ``kind`` says what a key is: one that :meth:`Draft.write` also writes (``same``, ``adapter``, ``trl``, ``report``),
one that is only read (``read``), one that chooses the method (``method``), or one without counterpart: without effect
on a plan (``idle``), with one that is noted (``note``), or one that no plan can have (``refused``). The ``text`` of a
``default`` is the tool's value for TRL's setting of that name, where it differs from TRL's own.
"""

import contextlib
import csv
import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from autotrain_mem.support.errors import UsageError
from autotrain_mem.types.methods_table import METHODS, MethodFacts

NO_LIMIT_TOKENS = 1 << 20
"""Means "no limit" to a tool that takes only a number: longer than any row that fits a card."""

REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Functions of ``trl.rewards`` that ``trl/scripts/grpo.py`` takes by a short name."""
SHAPED_REWARD = "get_soft_overlong_punishment"
"""A function that this script also takes by its short name, and passes arguments."""

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", dict: "a block", list: "a list of blocks"}
_OF_LORA = ("lora_", "use_rslora", "use_dora")
_TOOLS = {
    "axolotl": ("Axolotl", ("base_model",), "axolotl"),
    "llamafactory": ("LLaMA-Factory", ("stage", "finetuning_type", "cutoff_len"), "llamafactory"),
    "recipe": (
        "alignment-handbook, open-r1 or older TRL",
        ("dataset_mixer", "dataset_mixture", "dataset_splits"),
        "tool_keys",
    ),
}
"""Tool -> its name, keys that only its files have, and the module that reads them. A recipe also has the table's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """Holds one key of a tool."""

    name: str
    """A dot separates a block's name from that of the key in it."""
    kind: str
    trl: str
    methods: tuple[str, ...]
    """The methods whose config has the setting; empty for all."""
    values: Mapping[str, Any]
    """The tool's value, as text -> TRL's, where they differ; None is TRL's default."""
    text: str


@functools.cache
def keys_of(tool: str) -> tuple[Key, ...]:
    """Returns the rows of a tool, one for each key."""
    with open(Path(__file__).with_name("keys.csv"), encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file, strict=True) if row["tool"] == tool]
    return tuple(
        Key(
            name=name,
            kind=row["kind"],
            trl=row["trl"] or name.rpartition(".")[2],
            methods=tuple(row["methods"].split()),
            values=json.loads(row["text"]) if row["text"].startswith("{") else {},
            text=row["text"],
        )
        for row in rows
        for name in row["keys"].split()
    )


@dataclass(kw_only=True, slots=True)
class Reading:
    """Collects what a tool's file says in TRL's settings. A key that nobody takes is noted, so none is lost."""

    tool: str
    method: str
    given: Collection[str]
    """Names of the flags of the command line, which win over the file."""
    keys: dict[str, Any]
    """The keys that are not read yet."""
    settings: dict[str, Any] = field(default_factory=dict)
    """TRL's settings and ours."""
    names: dict[str, str] = field(default_factory=dict)
    """TRL's name of a setting -> the file's."""
    notes: list[str] = field(default_factory=list)
    """What has no counterpart, and what it means; one line each."""

    @property
    def facts(self) -> MethodFacts:
        return METHODS[self.method]

    def take(self, name: str, default: Any = None) -> Any:
        """Removes a key and returns its value; ``default`` if it is missing or empty. Raises ValueError if the value
        is not of the kind of the default."""
        value, kind = self.keys.pop(name, None), type(default)
        if value is None:
            return default
        with contextlib.suppress(OverflowError, TypeError, ValueError):
            if kind in (int, float) and not isinstance(value, bool) and float(value) == kind(float(value)):
                return kind(float(value))  # PyYAML reads 2e-4 as a text
        is_sound = isinstance(value, kind) and (kind is not list or all(isinstance(each, Mapping) for each in value))
        if kind in _KINDS and (kind in (int, float) or not is_sound):
            raise ValueError(f"{name} is {json.dumps(value)}, not {_KINDS[kind]}")
        return value

    def rename(self, names: Mapping[str, str]) -> None:
        """Reads keys with the same values; ``names``: TRL's name -> the tool's, as for :meth:`Draft.rename`."""
        self.settings |= {name: value for name, key in names.items() if (value := self.take(key)) is not None}
        self.names |= names

    def set_length(self, tokens: int, completion: int | None = None) -> None:
        """Sets the limit of a row's tokens, or for prompts that are answered in training, the prompt's."""
        is_limited = tokens < NO_LIMIT_TOKENS
        if not self.facts.is_online:
            self.settings["max_length"] = tokens if is_limited else None
        elif is_limited and tokens > (completion or 0):
            self.settings["prompt_length"] = tokens - (completion or 0)

    def set_data(self, sources: Sequence[Mapping[str, Any]]) -> None:
        """Sets where rows come from: keys of TRL's ``datasets``. One of them is our ``dataset``, unless its split is a
        part of one, which only a mixture reads."""
        if not {"dataset", "dataset_name", "datasets"}.isdisjoint(self.given):
            self.notes.append("the file's data: the flag's are read in their place")
        elif len(sources) == 1 and "[" not in sources[0].get("split", ""):
            files = sources[0].get("data_files") or sources[0]["path"]
            names = {"split": "dataset_train_split", "name": "dataset_config"}
            self.settings["dataset"] = files[0] if isinstance(files, list) and len(files) == 1 else files
            self.settings |= {names[key]: value for key, value in sources[0].items() if key in names}
        elif sources:
            self.settings["datasets"] = list(sources)

    def read_table(self) -> None:
        """Reads the keys that the table has. Raises one UsageError for all that no plan can have."""
        idle, problems = [], []
        for key in keys_of(self.tool):
            value = self.keys.get(key.name)
            values = key.values or {str(value).lower(): value}
            shown = f"{key.name} {value if len(str(value)) < 40 else '...'}"
            is_off = not value if key.kind in ("idle", "note", "refused") else value is False and "false" not in values
            if is_off or value in (None, "", [], {}) or key.kind in ("method", "default"):
                continue
            if key.kind == "refused" or (key.kind != "note" and str(value).lower() not in values):
                taken = f"Only {', '.join(values)} can be planned with."
                problems.append((f"{shown} has no counterpart in TRL", key.text if key.kind == "refused" else taken))
            elif key.kind == "note":
                self.notes.append(f"{shown}: {key.text}")
            elif key.kind == "idle" or (key.trl.startswith(_OF_LORA) and not self.settings.get("use_peft")):
                idle.append(key.name)
            elif key.methods and self.method not in key.methods:
                self.notes.append(f"{shown}: TRL's {self.method.upper()} has no such setting")
            elif key.kind == "report":
                self.settings.setdefault("report_to", []).append(key.trl)
            elif key.trl.startswith("env."):
                self.settings.setdefault("env", {})[key.trl.removeprefix("env.")] = str(value)
            elif (meant := values[str(value).lower()]) is not None:
                self.settings[key.trl] = meant
                self.names[key.trl] = key.name
        for key in keys_of(self.tool):
            self.keys.pop(key.name, None)
        if problems:
            raise UsageError.of(dict.fromkeys(problems))
        if idle:
            self.notes.append(f"without effect on a plan: {', '.join(idle)}")


def read_tool_file(
    config: Mapping[str, Any], file: str, prog: str, *, given: Collection[str], own: Collection[str]
) -> tuple[dict[str, Any], tuple[str, ...], dict[str, str]]:
    """Returns the keys of a YAML file as TRL's and ours, what to say about it, and TRL's name -> the file's:
    ``micro_batch_size in run.yaml``. Another tool's file is translated.

    Args:
        prog: The command, whose last word is the method.
        given: Names of the flags on the command line.
        own: Names of our keys, which stay as they are.

    Raises:
        UsageError: The file is for another method, or no plan can have what it asks for.
    """
    marks = {name: {*own_keys} for name, (_, own_keys, _) in _TOOLS.items()}
    marks["recipe"] |= {key.name for key in keys_of("recipe")}
    tool = next((name for name, each in marks.items() if not config.keys().isdisjoint(each)), None)
    file_name = Path(file).name
    if tool is None:
        return dict(config), (), {name: f"{name} in {file_name}" for name in config}
    title, _, module = _TOOLS[tool]
    blocks = {key.name.partition(".")[0] for key in keys_of(tool) if "." in key.name}
    flat: dict[str, Any] = {}
    for name, value in config.items():
        parts = value if name in blocks and isinstance(value, Mapping) else {"": value}
        # Axolotl also takes the keys of fsdp_config with the prefix.
        flat |= {f"{name}.{part.removeprefix('fsdp_')}".rstrip("."): each for part, each in parts.items()}
    command, method = prog.rsplit(" ", 1)
    chosen = [key.values.get(str(flat.get(key.name)).lower()) for key in keys_of(tool) if key.kind == "method"]
    made_for = next((each for each in reversed(chosen) if each), method if tool == "recipe" else "sft")
    if made_for != method:
        raise UsageError(
            f"{file} is a file of {title} for {made_for}, not for {method}.",
            hint=f"{command} {made_for} --config {file}",
        )
    defaults = {key.trl: json.loads(key.text) for key in keys_of(tool) if key.kind == "default"}
    reading = Reading(tool=tool, method=method, given=given, keys=flat, settings=defaults)
    try:
        resolve_name(f"autotrain_mem.exports.{module}:read")(reading)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{file} has a value that {title} cannot have: {error}.", hint=f"Compare it with an example of {title}."
        ) from error
    reading.read_table()
    for name, value in list(reading.keys.items()):
        if tool == "recipe" or name in own:
            reading.settings.setdefault(name, value)
        elif value:
            reading.notes.append(f"{name} {value}: no counterpart is known, so the plan is made without it")
    opening = f"{file_name} is a file of {title}, read as TRL's {method} settings"
    names = {name: f"{key} in {file_name}" for name, key in reading.names.items()}
    return reading.settings, (opening, *(f"{file_name}: {note}" for note in reading.notes)), names


_REWARDS = {name: name for name in (*REWARDS, SHAPED_REWARD)}
_REWARDS |= {"accuracy": "accuracy_reward", "soft_overlong_punishment": SHAPED_REWARD}
"""open-r1's names (``rewards.py: get_reward_funcs``) and TRL's -> TRL's."""


def read(reading: Reading) -> None:
    """Reads a recipe of alignment-handbook or open-r1 (``src/alignment/configs.py``, ``src/open_r1/configs.py``): TRL's
    keys and a few of its own."""
    mixer, mixture = reading.take("dataset_mixer", {}), reading.take("dataset_mixture", {})
    splits = reading.take("dataset_splits") or ["train"]
    names = {"id": "path", "config": "name", "split": "split", "columns": "columns"}
    mixed = [{"id": path, "weight": weight, "split": splits[0]} for path, weight in mixer.items()]
    entries = mixture.get("datasets", mixed)
    sources = [{names[key]: value for key, value in each.items() if key in names} for each in entries]
    if sources:
        reading.set_data(sources)
    if any(each.get("weight", 1) != 1 for each in entries):
        reading.notes.append("the weights of the data: TRL reads all rows of each dataset")
    if functions := reading.take("reward_funcs"):
        if lost := [name for name in functions if name.isidentifier() and name not in _REWARDS]:
            cure = "copy them, and give --reward_funcs MODULE.FUNCTION"
            reading.notes.append(f"reward_funcs {', '.join(lost)}: functions of open-r1's own; {cure}")
            reading.take("reward_weights")  # one for each function
        reading.settings["reward_funcs"] = [_REWARDS.get(name, name) for name in functions if name not in lost] or None
