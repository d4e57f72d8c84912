"""What the supervisor does with every ending; the processes are a script of endings."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem.errors import (
    AutofitError,
    GpuOutOfMemoryError,
    InterruptedByUser,
    RewardFunctionError,
    TrainingError,
)
from autotrain_mem.spec import Knobs, Learned, codec
from autotrain_mem.training.checkpoints import Checkpoint
from autotrain_mem.training.exit_causes import Cause, Ending
from autotrain_mem.training.supervisor import RESTARTS, Change, Stint, supervise

END = {"event": "end", "interrupted": False}
SMALLER = Change(
    knobs=replace(TRL_DEFAULTS, per_device_train_batch_size=4, gradient_accumulation_steps=2),
    flags="--per_device_train_batch_size 4 --gradient_accumulation_steps 2",
)
LEARNED = Learned(train_tokens=512)


def killed(step: int, began_at: int = 0) -> Ending:
    return Ending(error=TrainingError("It ended."), code=-signal.SIGKILL, step=step, began_at=began_at)


def out_of_memory(step: int, began_at: int = 0) -> Ending:
    return Ending(error=GpuOutOfMemoryError("Out of memory."), step=step, began_at=began_at)


def raised(text: str, step: int, began_at: int = 0) -> Ending:
    return Ending(error=TrainingError(f"The trainer raised {text}"), step=step, began_at=began_at)


@dataclass
class Script:
    """Processes that end one after the other as they are told to, each with the checkpoint that it leaves."""

    endings: list[tuple[Any, int | None]]
    smaller: Change | None = None
    stints: list[Stint] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)

    def train(self, stint: Stint, hear: Callable[[dict[str, Any]], None]) -> Any:
        self.stints.append(stint)
        ended, self.left = self.endings.pop(0)
        if isinstance(ended, BaseException):
            raise ended
        hear({"event": "incident", "incident": {}, "learned": codec.to_json(LEARNED)})
        return ended

    def newest(self, ending: Ending) -> Checkpoint | None:
        if self.left == -1:
            raise KeyboardInterrupt
        return None if self.left is None else Checkpoint(path=Path(f"run/checkpoint-{self.left}"), step=self.left)

    def changed(self, cause: Cause, ending: Ending, knobs: Knobs) -> Change | None:
        return self.smaller

    def explained(self, ending: Ending) -> AutofitError:
        ending.error.hint = f"{ending.error.hint}[explained]"
        return ending.error

    def run(self, restarts: int = RESTARTS) -> Any:
        first = Stint(knobs=TRL_DEFAULTS, learned=Learned(), checkpoint=None)
        return supervise(first, self, restarts=restarts, on_event=self.told.append)

    @property
    def restarts(self) -> list[dict[str, Any]]:
        return [event["restart"] for event in self.told if event["event"] == "restart"]


def test_a_run_that_ends_well_is_one_process() -> None:
    script = Script([(END, None)])
    assert script.run() is END
    assert len(script.stints) == 1


def test_a_killed_process_is_gone_on_with_from_the_last_checkpoint() -> None:
    script = Script([(killed(47), 40), (END, 60)])
    assert script.run() is END
    assert [stint.resume_from for stint in script.stints] == [None, Path("run/checkpoint-40")]
    assert script.restarts == [
        {"step": 47, "resumed_at": 40, "cause": "killed", "why": "signal 9", "change": ""},
    ]


def test_without_a_checkpoint_it_begins_anew() -> None:
    script = Script([(killed(3), None), (END, None)])
    assert script.run() is END
    assert script.stints[1].resume_from is None
    assert script.restarts[0]["resumed_at"] == 0


def test_what_the_guard_learned_is_known_to_the_next_process() -> None:
    script = Script([(killed(47), 40), (END, 60)])
    script.run()
    assert [stint.learned for stint in script.stints] == [Learned(), LEARNED]


def test_so_many_processes_in_a_row_that_come_no_further_are_enough() -> None:
    script = Script([(killed(3), None)] * (RESTARTS + 1))
    with pytest.raises(TrainingError, match="started again 3 times without getting further"):
        script.run()
    assert len(script.stints) == RESTARTS + 1


def test_a_new_checkpoint_sets_the_count_back() -> None:
    further = [(killed(10 * n + 5, 10 * (n - 1)), 10 * n) for n in range(1, 10)]
    script = Script([*further, (END, 100)])
    assert script.run() is END
    assert len(script.restarts) == 9


def test_no_restarts_means_none() -> None:
    script = Script([(killed(47), 40)])
    with pytest.raises(TrainingError, match=r"--max_restarts 0(.|\n)*run/checkpoint-40; --resume_from_checkpoint"):
        script.run(restarts=0)


def test_a_full_card_gets_a_smaller_plan_and_the_next_one_starts_from_that() -> None:
    script = Script([(out_of_memory(7), 5), (killed(12, 5), 10), (END, 20)], smaller=SMALLER)
    assert script.run() is END
    assert [stint.knobs for stint in script.stints] == [TRL_DEFAULTS, SMALLER.knobs, SMALLER.knobs]
    assert [restart["change"] for restart in script.restarts] == [SMALLER.flags, ""]


def test_a_card_that_was_full_for_once_is_tried_again_and_explained_when_it_comes_again() -> None:
    script = Script([(out_of_memory(7), 5), (out_of_memory(7, 5), 5)])
    with pytest.raises(GpuOutOfMemoryError, match=r"explained(.|\n)*take less"):
        script.run()
    assert len(script.stints) == 2


def test_a_card_that_is_full_in_the_first_step_is_explained_at_once() -> None:
    script = Script([(out_of_memory(0), None)])
    with pytest.raises(GpuOutOfMemoryError, match="explained"):
        script.run()


@pytest.mark.parametrize(
    "ending",
    [
        Ending(error=RewardFunctionError("reward raised."), step=7),
        raised("ValueError: wrong", 7),
        raised("RuntimeError: before the first step", 5, began_at=5),
    ],
)
def test_what_would_end_so_again_is_not_tried_again(ending: Ending) -> None:
    script = Script([(ending, 5)])
    with pytest.raises(type(ending.error)):
        script.run()
    assert len(script.stints) == 1


def test_an_unknown_error_is_tried_again_from_a_checkpoint_only() -> None:
    with pytest.raises(TrainingError):
        Script([(raised("RuntimeError: odd", 7), None)]).run()
    assert Script([(raised("RuntimeError: odd", 7), 5), (END, 20)]).run() is END


@pytest.mark.parametrize("text", ["RuntimeError: odd", "AcceleratorError: CUDA error: device-side assert triggered"])
def test_the_same_error_at_the_same_step_is_not_tried_a_third_time(text: str) -> None:
    script = Script([(raised(text, 7), 5), (raised(text, 7, 5), 5)])
    with pytest.raises(TrainingError, match="It has ended so twice, after step 7"):
        script.run()


def test_the_same_error_at_another_step_is() -> None:
    text = "AcceleratorError: CUDA error: unspecified launch failure"
    assert Script([(raised(text, 7), 5), (raised(text, 9, 5), 5), (END, 20)]).run() is END


def test_an_interrupt_is_never_gone_on_from() -> None:
    script = Script([(InterruptedByUser("Interrupted."), 5)])
    with pytest.raises(InterruptedByUser):
        script.run()
    assert len(script.stints) == 1


def test_an_interrupt_between_two_processes_says_where_to_go_on() -> None:
    with pytest.raises(InterruptedByUser, match="Interrupted after step 7, while no training process ran"):
        Script([(killed(7), -1)]).run()


def test_the_users_own_error_is_told_in_its_own_words_and_with_the_checkpoint() -> None:
    error = RewardFunctionError("reward raised.", hint="Mend it.")
    with pytest.raises(AutofitError) as caught:
        Script([(Ending(error=error, step=7), 5)]).run()
    said = "Its last whole checkpoint is run/checkpoint-5; --resume_from_checkpoint goes on from there."
    assert caught.value.hint.splitlines() == ["Mend it.[explained]", said]
