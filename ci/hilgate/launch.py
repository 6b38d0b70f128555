"""Starts the process of a step: folder, arguments and environment are the same for a first run and for a rerun."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate import process
from hilgate.evidence import JUNIT_FILE
from hilgate.model import Evidence

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.model import PlannedStep

LOG_FILE = "log.txt"
OUT_VARIABLE = "HILGATE_OUT"


PROFILE_VARIABLE = "HILGATE_PROFILE"
"""What the plan is for, told to every step: gates are stricter before a release."""


@dataclass(frozen=True)
class Site:
    """Where steps run.

    Attributes:
        root: The repository.
        cores: Of the machine.
        profile: Of the plan.
    """

    root: Path
    cores: int
    profile: str


def start(step: PlannedStep, command: str, folder: Path, site: Site, seconds: float) -> process.Child:
    """Start a command of a step.

    Args:
        step: Gives the environment and says what evidence is wanted.
        command: Its own, or a part of it.
        folder: Emptied, then `$HILGATE_OUT` and the place of the log.
        site: Where it runs.
        seconds: After which it is ended.
    """
    folder = folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)  # evidence of an earlier run must never be read as this one's
    folder.mkdir(parents=True)
    arguments = process.argument_list(command)
    if step.evidence is Evidence.JUNIT:
        arguments.append(f"--junitxml={folder / JUNIT_FILE}")
    # Threads would otherwise be as many as the machine has cores, in every step at once.
    env = {"OMP_NUM_THREADS": str(min(step.cores, site.cores)), **os.environ, **step.env}
    env |= {OUT_VARIABLE: str(folder), PROFILE_VARIABLE: site.profile}
    return process.Child(arguments, cwd=site.root, env=env, log=folder / LOG_FILE, timeout_seconds=seconds)
