"""The nouns of hilgate: what is declared, what is planned, what was found, what was decided.

Every file that one stage hands to the next (`plan.json`, `results.jsonl`, `findings.jsonl`, `verdict.json`) is one of
these models as JSON. They are frozen and forbid unknown keys, so a misspelt key is an error and never a silent default.
"""

from hilgate.model.base import SCHEMA_VERSION, Evidence, Key, Noun, Number, Outcome, Profile, Ruling, Scalar
from hilgate.model.decided import Counts, StepVerdict, Verdict
from hilgate.model.declared import Agents, Area, Device, Matrix, Quarantine, Quarantined, Queue, Step
from hilgate.model.found import (
    BuildRecord,
    Check,
    CheckRecord,
    Environment,
    GpuHealth,
    Health,
    ImageRecord,
    Record,
    RerunRecord,
    StepRecord,
    record_adapter,
)
from hilgate.model.planned import Loosening, Omission, Plan, PlannedStep

__all__ = [
    "SCHEMA_VERSION",
    "Agents",
    "Area",
    "BuildRecord",
    "Check",
    "CheckRecord",
    "Counts",
    "Device",
    "Environment",
    "Evidence",
    "GpuHealth",
    "Health",
    "ImageRecord",
    "Key",
    "Loosening",
    "Matrix",
    "Noun",
    "Number",
    "Omission",
    "Outcome",
    "Plan",
    "PlannedStep",
    "Profile",
    "Quarantine",
    "Quarantined",
    "Queue",
    "Record",
    "RerunRecord",
    "Ruling",
    "Scalar",
    "Step",
    "StepRecord",
    "StepVerdict",
    "Verdict",
    "record_adapter",
]
