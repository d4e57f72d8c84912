"""Defines the nouns: frozen dataclasses that pass between the layers. Imports no ML library; runs in any process.

Each module is imported when one of its names is first used. Importing all of them would delay early errors.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotrain_mem.settings.declaration import Harm
    from autotrain_mem.settings.knobs import Knobs, Lever
    from autotrain_mem.settings.own import Sharding
    from autotrain_mem.settings.words import Fit
    from autotrain_mem.types.autofit import AutoFit
    from autotrain_mem.types.data import Counting, DataProfile, DataSummary, Fingerprint, ImageProfile, ImageSummary
    from autotrain_mem.types.estimate import (
        Candidate,
        Estimate,
        Footprint,
        MemoryEstimate,
        MixedLengths,
        ReservedByMode,
        ReservedEstimate,
    )
    from autotrain_mem.types.experience import Experience, Incident, LearnedLimits, PhasePeak, Probe, Restart, RunMarker
    from autotrain_mem.types.findings import Condition, Download, Finding, Health, Preflight, Problems, Soundness
    from autotrain_mem.types.gpu_comparison import Cards, LargestValue
    from autotrain_mem.types.hardware import Capability, Hardware, Price, Topology
    from autotrain_mem.types.job import Job, PythonCall
    from autotrain_mem.types.methods_table import METHODS, TEXT_COLUMN, MethodFacts
    from autotrain_mem.types.model import Depths, LayerPattern, ModelFacts
    from autotrain_mem.types.page import Holder, Material, Page, Section, Timeline
    from autotrain_mem.types.plan_file import PLAN_NAME
    from autotrain_mem.types.planned import Plan, Proposal
    from autotrain_mem.types.report import REWARD_NAMES, RUN_NAME, MemoryReading, Report, Shortage
    from autotrain_mem.types.trace import CACHE_EMPTIED, Block, EngineMark, Owner, Routing, StreamUse, Trace, Trained
    from autotrain_mem.types.vllm import VllmServer, VllmSleep
    from autotrain_mem.types.work import Kind, Phase, StepTime, Work, Workload
else:  # hidden from type checkers, which would then accept any name
    from autotrain_mem.support.lazy_names import lazily_imported

    def __getattr__(name: str) -> object:
        return lazily_imported(__name__, __file__, name)
