# SPDX-License-Identifier: Apache-2.0
"""The steps of the gate that are hilgate's own: hygiene and the bug zoo."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate.errors import Exit
from hilgate.model.record import Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable


def conclude(checks: Iterable[Check]) -> Exit:
    """Print checks as they finish, and return the exit status: 0, 1 (one failed) or 5 (one did not run).

    Under the runner (`HILGATE_OUT` set) they are also written to `findings.jsonl`, after each one: what had finished
    is there when the command is ended.
    """
    out, done = os.environ.get("HILGATE_OUT"), list[Check]()
    for check in checks:
        done.append(check)
        sys.stdout.write(f"{check.outcome.value:<12} {check.id:<32} {check.seconds:5.1f} s  {check.message}\n")
        sys.stdout.flush()
        if out:
            Check.write_all(Path(out), done)
    outcomes = {check.outcome for check in done}
    if Outcome.FAIL in outcomes:
        return Exit.FAIL
    return Exit.CANNOT_RUN_HERE if Outcome.DID_NOT_RUN in outcomes else Exit.PASS
