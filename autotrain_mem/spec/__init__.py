"""Holds the nouns: frozen values that pass between the layers. Runs in any process (pure)."""

from autotrain_mem.spec.data import Counting, DataProfile, DataSummary
from autotrain_mem.spec.estimate import Candidate, Estimate, Footprint, MemoryEstimate, ReservedByMode, ReservedEstimate
from autotrain_mem.spec.experience import Experience, Incident, Learned, OtherProcess, PhasePeak, Probe, Restart
from autotrain_mem.spec.hardware import Hardware
from autotrain_mem.spec.job import Fit, Job
from autotrain_mem.spec.knobs import Harm, Knobs, Lever, Sharding
from autotrain_mem.spec.plan import Plan, Proposal
from autotrain_mem.spec.report import Report
from autotrain_mem.spec.topology import Topology
from autotrain_mem.spec.trace import Block, Owner, Trace
from autotrain_mem.spec.work import Phase, StepTime, Work, Workload

__all__ = [
    "Block",
    "Candidate",
    "Counting",
    "DataProfile",
    "DataSummary",
    "Estimate",
    "Experience",
    "Fit",
    "Footprint",
    "Hardware",
    "Harm",
    "Incident",
    "Job",
    "Knobs",
    "Learned",
    "Lever",
    "MemoryEstimate",
    "OtherProcess",
    "Owner",
    "Phase",
    "PhasePeak",
    "Plan",
    "Probe",
    "Proposal",
    "Report",
    "ReservedByMode",
    "ReservedEstimate",
    "Restart",
    "Sharding",
    "StepTime",
    "Topology",
    "Trace",
    "Work",
    "Workload",
]
