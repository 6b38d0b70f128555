# SPDX-License-Identifier: Apache-2.0
"""What a machine must have before any step runs, as the repository's own command answers it (`prerequisites`)."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from pydantic import ValidationError

from hilgate.errors import CannotRunHereError, DeclarationError, Exit
from hilgate.model import first_problem
from hilgate.model.record import Check, Outcome
from hilgate.text import argument_list, count

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.model.declaration import Project

SECONDS = 20


def ask(root: Path, project: Project) -> tuple[Check, ...]:
    """One check for each thing that the machine must have; none where the repository declares no command.

    Raises:
        DeclarationError: The command cannot be run, or what it prints is no check a line.
    """
    if not project.prerequisites:
        return ()
    where, remedy = project.prerequisites, "repair `prerequisites` in ci/project.yaml, or the command"
    try:
        done = subprocess.run(
            argument_list(project.prerequisites), cwd=root, capture_output=True, timeout=SECONDS, check=False
        )
        checks = tuple(Check.model_validate_json(line) for line in done.stdout.splitlines() if line.strip())
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeclarationError(f"the prerequisites cannot be asked: {error}", where=where, remedy=remedy) from error
    except ValidationError as error:
        what = f"a line of the prerequisites is no check: {first_problem(error)}"
        raise DeclarationError(what, where=where, remedy=remedy) from error
    if done.returncode not in {Exit.PASS, Exit.CANNOT_RUN_HERE} or not checks:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        what = f"the prerequisites ended with {done.returncode}: {last}"
        raise DeclarationError(what, where=where, remedy=remedy)
    return checks


def demand(root: Path, project: Project) -> None:
    """Refuse to run anything where something is missing.

    Raises:
        CannotRunHereError: Something is missing; the error names it all, with the packages that bring it.
    """
    missing = [check.message for check in ask(root, project) if check.outcome is not Outcome.PASS]
    if missing:
        raise CannotRunHereError(
            f"this machine lacks {count(len(missing), 'thing')} that this repository needs",
            where="; ".join(missing),
            remedy="install or change that, and try again; `hilgate doctor` lists all that is asked",
        )
