"""Finds the best TRL configuration that fits a GPU, before anything is loaded, and trains with it.

TRL's trainers under their own names, planned::

    from autotrain_mem import AutoFit, SFTTrainer

    trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=rows, autofit=AutoFit(effective_batch_size=64))
    print(trainer.plan.knobs)
    trainer.train()

The three verbs, which need no GPU::

    import autotrain_mem

    plan = autotrain_mem.plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=1024)

The command is ``autofit`` (``autotrain_mem.cli``). Importing this package loads no torch; a trainer's class loads TRL
when it is first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotrain_mem.drop_in.ppo import PPOTrainer
    from autotrain_mem.drop_in.trainers import DPOTrainer, GRPOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer
    from autotrain_mem.errors import AutofitError
    from autotrain_mem.spec import Estimate, Hardware, Knobs, Plan, Report
    from autotrain_mem.spec.autofit import AutoFit
    from autotrain_mem.verbs import estimate, fit, gpus, plan

__version__ = "0.1.0"

__all__ = [
    "AutoFit",
    "AutofitError",
    "DPOTrainer",
    "Estimate",
    "GRPOTrainer",
    "Hardware",
    "Knobs",
    "PPOTrainer",
    "Plan",
    "RLOOTrainer",
    "Report",
    "RewardTrainer",
    "SFTTrainer",
    "__version__",
    "estimate",
    "fit",
    "gpus",
    "plan",
]

_PLACES = {
    "AutoFit": "spec.autofit",
    "AutofitError": "errors",
    "DPOTrainer": "drop_in.trainers",
    "Estimate": "spec",
    "GRPOTrainer": "drop_in.trainers",
    "Hardware": "spec",
    "Knobs": "spec",
    "PPOTrainer": "drop_in.ppo",
    "Plan": "spec",
    "RLOOTrainer": "drop_in.trainers",
    "Report": "spec",
    "RewardTrainer": "drop_in.trainers",
    "SFTTrainer": "drop_in.trainers",
    "estimate": "verbs",
    "fit": "verbs",
    "gpus": "verbs",
    "plan": "verbs",
}
"""Name -> the module that has it, imported when the name is first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
