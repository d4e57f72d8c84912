"""Finds the best TRL configuration that fits a GPU, before anything is loaded, and trains with it.

Each of TRL's trainers is available under its own name, and plans when it is constructed::

    from autotrain_mem import AutoFit, SFTTrainer

    trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=rows, autofit=AutoFit(effective_batch_size=64))
    print(trainer.plan.knobs)
    trainer.train()

The command's actions are functions, and planning needs no GPU::

    import autotrain_mem
    from autotrain_mem import AutoFit

    plan = autotrain_mem.plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=1024)
    plan.save("plan.json")

``estimate`` predicts the memory of one configuration, ``plan`` finds the best one that fits, ``fit`` trains with it,
``cards`` compares cards, ``gpus`` lists the known cards, and ``write_report`` writes the HTML report of a plan or a
run. The command is ``autofit``. The errors are defined in ``autotrain_mem.support.errors``. ``MemoryWatch`` is a
callback for any Trainer of transformers. Importing this package does not import torch. The first access to a trainer's
class imports TRL.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = ["CPOTrainer", "DPOTrainer", "DistillationTrainer", "GKDTrainer", "GRPOTrainer", "KTOTrainer", "ORPOTrainer"]
__all__ += ["OnlineDPOTrainer", "PPOTrainer", "RLOOTrainer", "RewardTrainer", "SFTTrainer"]
__all__ += ["AutoFit", "__version__", "cards", "estimate", "fit", "gpus", "plan", "write_report"]
__all__ += ["AutofitError", "DoesNotFitError", "UsageError"]
__all__ += ["Candidate", "CardVerdict", "Cards", "DataSummary", "Estimate", "Experience", "Hardware", "Harm"]
__all__ += ["ImageSummary", "Incident", "Job", "Knobs", "LearnedLimits", "Lever", "MemoryEstimate", "MemoryReading"]
__all__ += ["LargestValue", "MemoryWatch", "MixedLengths", "OtherProcess", "Owner", "Phase", "PhasePeak", "Plan"]
__all__ += ["Price"]
__all__ += ["Probe", "Proposal", "Report", "ReservedByMode", "ReservedEstimate"]
__all__ += ["Restart", "Routing", "Sign", "StepTime", "Topology", "Trained", "VllmServer", "VllmSleep"]

if TYPE_CHECKING:
    from autotrain_mem.drop_in.experimental import CPOTrainer, GKDTrainer, OnlineDPOTrainer, ORPOTrainer
    from autotrain_mem.drop_in.experimental_ppo import PPOTrainer
    from autotrain_mem.drop_in.trainers import (
        DistillationTrainer,
        DPOTrainer,
        GRPOTrainer,
        KTOTrainer,
        RewardTrainer,
        RLOOTrainer,
        SFTTrainer,
    )
    from autotrain_mem.support.errors import AutofitError, DoesNotFitError, UsageError
    from autotrain_mem.training.watch.callback import MemoryWatch
    from autotrain_mem.training.watch.diagnose import Sign
    from autotrain_mem.types import Candidate, Estimate, Harm, Job, Knobs, Lever, Plan, Probe, Proposal, Report
    from autotrain_mem.types.autofit import AutoFit
    from autotrain_mem.types.data import DataSummary, ImageSummary
    from autotrain_mem.types.estimate import MemoryEstimate, MixedLengths, ReservedByMode, ReservedEstimate
    from autotrain_mem.types.experience import Experience, Incident, LearnedLimits, OtherProcess, PhasePeak, Restart
    from autotrain_mem.types.gpu_comparison import Cards, CardVerdict, LargestValue
    from autotrain_mem.types.hardware import Hardware, Price, Topology
    from autotrain_mem.types.report import MemoryReading
    from autotrain_mem.types.trace import Owner, Routing, Trained
    from autotrain_mem.types.vllm import VllmServer, VllmSleep
    from autotrain_mem.types.work import Phase, StepTime
    from autotrain_mem.verbs import cards, estimate, fit, gpus, plan, write_report
else:  # hidden from type checkers, for which __getattr__ would make every name valid
    from autotrain_mem.support.lazy_names import lazily_imported

    def __getattr__(name: str) -> object:
        return lazily_imported(__name__, __file__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
