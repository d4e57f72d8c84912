"""What each process of a distributed PPO test runs: ``torchrun ppo_script.py MODEL FOLDER``; leaves ``rank-N.json``."""

import hashlib
import json
import pathlib
import sys
from typing import Any

import torch
from ppo_runs import config, logged, trainer, weights
from transformers import TrainerCallback

STEPS = 2


class StopsOneProcess(TrainerCallback):  # type: ignore[misc]
    """As an interrupt does that reaches one process a step before the others."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and args.process_index == 1:
            control.should_training_stop = control.should_save = True


def main() -> None:
    model, folder = map(pathlib.Path, sys.argv[1:])
    found: dict[str, Any] = {}
    for use_lora in (False, True):
        name = "lora" if use_lora else "full"
        straight = _run(model, folder / name, use_lora=use_lora, max_grad_norm=0.1)
        straight.save_model()
        checkpoint = str(folder / name / "checkpoint-1")
        resumed = _run(model, folder / name, use_lora=use_lora, max_grad_norm=0.1, resume=checkpoint)
        found[name] = {"straight": _result(straight), "resumed": _result(resumed)}
    stopped = _run(
        model, folder / "stopped", use_lora=False, save_strategy="steps", save_steps=99, callbacks=[StopsOneProcess()]
    )
    found["stopped"] = stopped.state.global_step
    (folder / f"rank-{stopped.args.process_index}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def _run(
    model: pathlib.Path, folder: pathlib.Path, *, use_lora: bool, resume: Any = None, callbacks: Any = None, **more: Any
) -> Any:
    changes = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "gradient_checkpointing": True}
    args = config(folder, max_steps=STEPS, bf16=True, **changes | more)
    built = trainer(model, args, use_lora=use_lora, callbacks=callbacks)
    built.train(resume_from_checkpoint=resume)
    return built


def _result(built: Any) -> dict[str, Any]:
    values = b"".join(value.numpy().tobytes() for value in weights(built).values())
    return {
        "weights": hashlib.sha256(values).hexdigest(),
        "scores": logged(built, "objective/scores"),
        "precision": built.accelerator.mixed_precision,
        "distributed": str(built.accelerator.distributed_type.value),
        "grad_norm": logged(built, "grad_norm"),
    }


if __name__ == "__main__":
    main()
