"""Small jobs beside planning and training, each done in a process of its own: the parent's side."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from autotrain_mem.settings.knobs import BASE_BITS
from autotrain_mem.support import codec, errors
from autotrain_mem.support.errors import ModelNotFoundError, OutputFolderError, TrainingError, UsageError
from autotrain_mem.support.files import read_start
from autotrain_mem.support.processes import Child, ChildDied
from autotrain_mem.types.methods_table import METHODS, MethodFacts
from autotrain_mem.types.plan_file import LARGEST_BYTES, PLAN_NAME
from autotrain_mem.types.report import RUN_NAME

Task = Literal["chat", "merge", "push", "columns"]
Send = Callable[[Mapping[str, Any]], None]
Receive = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    """Asks for one small job, in one line of JSON; what a job does not need keeps its default."""

    task: Task
    folder: str = ""
    """Of the run."""
    base: str | None = None
    """The model that an adapter belongs to; None where the folder holds the whole model."""
    revision: str | None = None
    """Of the base model, on the hub."""
    gives_score: bool = False
    """The model is a classifier of one score: a reward model."""
    base_bits: int | None = None
    """The base was quantized to so many bits while it was trained."""
    use_cpu: bool = False
    trust_remote_code: bool = False
    max_new_tokens: int = 0
    plain: bool = False
    """Continue the text as it is, without the chat template."""
    to: str = ""
    """Where the result goes: a new folder, or ``ORG/NAME`` on the hub."""
    public: bool = False
    update: bool = False
    """Push to a repository that holds files already."""
    dataset: str = ""


PROCESS = "autotrain_mem.cli.errand_process.main"
ENVIRONMENT = {"HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}

Event = Mapping[str, Any]


class ErrandProcess:
    """The parent's side of a small job that is under way."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def send(self, message: Mapping[str, Any]) -> None:
        """Hand over one object."""
        with _explained():
            self._child.send(message)

    def receive(self) -> Event:
        """Wait for the next object. Raises what the process says that went wrong."""
        with _explained():
            message = self._child.receive()
        if "error" in message:
            raise errors.from_json(message)
        return message


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turns the death of the process into an error of ours."""
    try:
        yield
    except ChildDied as death:
        if death.code == -signal.SIGKILL:
            raise TrainingError(
                "The process was killed, most likely since the host ran out of memory.",
                hint="Close other programs, or take a machine with more memory.",
            ) from death
        ended = f"The process ended before its time: exit status {death.code}."
        raise TrainingError(ended, hint=death.log_tail.strip()) from death


@contextlib.contextmanager
def started(errand: Errand) -> Iterator[ErrandProcess]:
    """Start the process of a job; it ends with the context, in the middle of whatever it does."""
    child = Child(PROCESS, ENVIRONMENT, has_children=True)  # out of reach of the terminal's Ctrl-C: we end it
    try:
        process = ErrandProcess(child)
        process.send(codec.to_json(errand))
        yield process
    finally:
        child.kill()  # what it writes is in a folder of another name until it is whole
        child.stop()


def finish(errand: Errand, on_event: Callable[[Event], None] = lambda event: None) -> Event:
    """Do a job to its end; returns its last word, and hands over each ``note`` on the way."""
    with started(errand) as process:
        while (event := process.receive())["event"] != "end":
            on_event(event)
        return event


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MODEL_WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""What ``save_pretrained`` writes (``peft/utils/constants.py`` and ``transformers/utils/__init__.py``)."""

_A_RUN = "A run is the output folder of `autofit METHOD`, with the model, plan.json and run.json in it."


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """Holds what an output folder says of the training that is done in it.

    Of ``plan.json`` these few values are read as they stand: what was trained with another autofit, whose plan this one
    cannot follow, is a model all the same.
    """

    folder: Path
    method: MethodFacts
    base: str
    """The model that was trained: a hub id, or a folder."""
    revision: str | None
    """Of the base, on the hub."""
    base_bits: int | None
    """The base was quantized to so many bits while it was trained."""
    is_adapter: bool
    """Else the folder holds all weights of the model."""


def find_run(path: str) -> TrainedRun:
    """Read the folder of a run that has ended well.

    Raises:
        UsageError: there is no such folder, or no run of ours in it.
        OutputFolderError: the run has not come to its end.
    """
    folder = Path(path)
    if not path.strip() or not folder.exists():
        raise UsageError(f"There is no folder {path!r}.", hint=_A_RUN)
    if not folder.is_dir():
        raise UsageError(f"{path} is a file, not the folder of a run.", hint=_A_RUN)
    if not (folder / PLAN_NAME).is_file():
        inside = sorted(str(path.parent) for path in folder.glob(f"*/{PLAN_NAME}"))[:3]  # of a quickstart, say
        hint = f"It holds these runs: {', '.join(inside)}." if inside else _A_RUN
        raise UsageError(f"{path} is not the folder of a run: it holds no {PLAN_NAME}.", hint=hint)
    plan = _read(folder / PLAN_NAME)
    method, base, arguments = plan.get("method"), plan.get("model"), _mapping(plan, "job", "arguments")
    if not isinstance(method, str) or method not in METHODS or not isinstance(base, str):
        raise UsageError(f"{folder / PLAN_NAME} names no method and model that this autofit knows.", hint=_A_RUN)
    has_adapter = _has(folder, ADAPTER_WEIGHTS) and (folder / ADAPTER_CONFIG).is_file()
    if not (has_adapter or _has(folder, MODEL_WEIGHTS)) or not (folder / RUN_NAME).is_file():
        has_checkpoints = any(path.is_dir() for path in folder.glob("checkpoint-*"))
        steps = _read(folder / RUN_NAME).get("steps")
        go_on = f"autofit {method} --output_dir {folder} --resume_from_checkpoint  continues it."
        raise OutputFolderError(
            f"The run in {folder} is not finished: it holds no trained model yet."
            f"{f' It ended after step {steps}.' if steps else ''}",
            hint=go_on if has_checkpoints else f"autofit {method} --plan {folder}  trains with its plan again.",
        )
    knobs = _mapping(plan, "knobs")
    return TrainedRun(
        folder=folder,
        method=METHODS[method],
        base=base,
        revision=str(arguments["model_revision"]) if arguments.get("model_revision") else None,
        base_bits=next((bits for name, bits in BASE_BITS.items() if knobs.get(name)), None),
        is_adapter=has_adapter,
    )


def _has(folder: Path, names: tuple[str, ...]) -> bool:
    return any((folder / name).is_file() for name in names)


def _read(path: Path) -> dict[str, Any]:
    """The content of a file; empty where it cannot be read, so that what is missing in it can be said."""
    try:
        content = json.loads(read_start(path, LARGEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _mapping(content: dict[str, Any], *keys: str) -> dict[str, Any]:
    for key in keys:
        inner = content.get(key)
        content = inner if isinstance(inner, dict) else {}
    return content


_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def errand_of(run: TrainedRun, task: Task, *, base: str | None = None, trust_remote_code: bool = False) -> Errand:
    """Say what any job with a run's model has to know.

    Args:
        base: Where the base model is now; None for where it was when the adapter was trained.

    Raises:
        UsageError: a base is named, and the run has none.
        ModelNotFoundError: the base was a folder, which is not there any more.
    """
    if base is not None and not run.is_adapter:
        raise UsageError(f"{run.folder} holds the whole model: it needs no base.", hint="Remove --base.")
    place = None
    if run.is_adapter:
        place = base or run.base
        if place.startswith((".", "/", "~")) or place.count("/") != 1:  # it looks like a folder
            if not Path(place).expanduser().is_dir():
                raise ModelNotFoundError(
                    f"The adapter in {run.folder} belongs to the model {place}, and there is no such folder.",
                    hint="Give --base the folder or the hub id where that model is now.",
                )
            place = str(Path(place).expanduser())
    return Errand(
        task=task,
        folder=str(run.folder),
        base=place,
        revision=None if base is not None else run.revision,
        gives_score=run.method.has_score_head,
        base_bits=run.base_bits,
        trust_remote_code=trust_remote_code,
    )


def merge_errand(run: TrainedRun, errand: Errand, out: str | None) -> Errand:
    """Check where the merged model is to go; beside the run, with ``-merged`` behind its name, by default.

    Raises:
        UsageError: there is nothing to merge.
        OutputFolderError: the folder is there, or the one that it is to be in is not.
    """
    if not run.is_adapter:
        raise UsageError(
            f"{run.folder} holds the whole model: all of its weights were trained, so there is nothing to merge.",
            hint=f'Use it as it is: AutoModelForCausalLM.from_pretrained("{run.folder}"), or autofit push {run.folder}',
        )
    folder = run.folder.resolve()
    target = Path(out).expanduser() if out else folder.with_name(f"{folder.name}-merged")
    if target.exists():
        raise OutputFolderError(f"{target} exists, and is not written over.", hint="Give --out a new folder.")
    if not target.absolute().parent.is_dir():
        raise OutputFolderError(
            f"There is no folder {target.absolute().parent} to write to.", hint="Make it, or give --out another."
        )
    return replace(errand, to=str(target))


def quantized_note(errand: Errand) -> str | None:
    """Say what it means that an adapter was trained on a quantized base; None where it was not."""
    if errand.base is None or errand.base_bits is None:
        return None
    return (
        f"the adapter was trained on the base in {errand.base_bits} bits, and is laid over its full weights here: "
        "these differ a little from what it has learned beside, so compare an answer or two"
    )


def check_repository(name: str) -> None:
    """Raises UsageError where it is not the name of a repository on the hub."""
    if not _REPOSITORY.fullmatch(name):
        raise UsageError(f"--to {name!r} is no repository's name.", hint="--to ORG/NAME, or --to USER/NAME")
