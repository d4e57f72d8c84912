"""A folder in which commands and calls are tried, with one worker for all of them: it takes seconds to start."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from autotrain_mem import api
from autotrain_mem.cli import word_problems
from autotrain_mem.machine import choose
from autotrain_mem.worker import pool
from tests.forked import Forge


@dataclass(frozen=True)
class Ran:
    """Exit code and both outputs of one command line."""

    code: int
    out: str
    err: str


Autofit = Callable[..., Ran]


class SharedWorkers(api.Workers):
    """Outlive the ``with`` block of a command."""

    def __exit__(self, *_: object) -> None:
        pass

    def end(self) -> None:
        super().__exit__()


def preferences(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Word problems as pairs; ``rejected`` is the solution with a slip in its last sum, and so a wrong answer."""
    random = Random(seed)
    for row in word_problems.problems(count, seed):
        question, solution = row["messages"]
        *lines, last_sum, answer = solution["content"].splitlines()
        total = int(answer.rpartition(" ")[2])
        wrong = total + random.randint(1, 9)
        content = "\n".join([*lines, last_sum.replace(f"= {total}.", f"= {wrong}."), f"Answer: {wrong}"])
        yield {"prompt": [question], "chosen": [solution], "rejected": [{**solution, "content": content}]}


def questions(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Word problems as prompts, and the number that a reward function checks as ``answer``."""
    for row in word_problems.problems(count, seed):
        question, solution = row["messages"]
        yield {"prompt": [question], "answer": solution["content"].rpartition(" ")[2]}


def write_rows(folder: Path) -> None:
    word_problems.write_rows(folder / "data.jsonl", word_problems.problems(60, seed=0))
    word_problems.write_rows(folder / "pairs.jsonl", preferences(40, seed=0))
    word_problems.write_rows(folder / "prompts.jsonl", questions(40, seed=0))


def _cache(folder: Path) -> str:
    return str(folder.with_name(f"{folder.name}-cache"))


@contextmanager
def started_in(folder: Path, forge: Forge) -> Iterator[SharedWorkers]:
    """Where relative paths lead, as for a user who is there; one, since the suite runs in two processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("AUTOFIT_CACHE", _cache(folder))
        with forge.children():
            shared = SharedWorkers(1)
            shared.first.flags()
    yield shared
    shared.end()


@contextmanager
def a_user_in(folder: Path, workers: SharedWorkers, forge: Forge) -> Iterator[None]:
    """In that folder, on a machine without a GPU; trainings are forked, and what is rehearsed is kept."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    with pytest.MonkeyPatch.context() as patch, forge.children():
        patch.chdir(folder)
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            patch.delenv(name, raising=False)
        patch.setenv("AUTOFIT_CACHE", _cache(folder))
        for module in (api, pool):
            patch.setattr(module, "Workers", lambda count=None: workers)
        patch.setattr(choose, "detect", lambda *_: ())
        yield
    for each, handler in before.items():
        signal.signal(each, handler)
