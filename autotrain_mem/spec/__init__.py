"""The nouns: frozen values that pass between the layers. Nothing here acts."""

from autotrain_mem.spec.data import DataProfile
from autotrain_mem.spec.estimate import Estimate, MemoryEstimate, ReservedEstimate
from autotrain_mem.spec.hardware import Hardware
from autotrain_mem.spec.job import Fit, Job
from autotrain_mem.spec.knobs import Harm, Knobs, Lever
from autotrain_mem.spec.plan import Attempt, Plan
from autotrain_mem.spec.report import Report
from autotrain_mem.spec.trace import Block, Owner, Phase, Trace

__all__ = [
    "Attempt",
    "Block",
    "DataProfile",
    "Estimate",
    "Fit",
    "Hardware",
    "Harm",
    "Job",
    "Knobs",
    "Lever",
    "MemoryEstimate",
    "Owner",
    "Phase",
    "Plan",
    "Report",
    "ReservedEstimate",
    "Trace",
]
