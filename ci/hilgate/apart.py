"""Runs a plan outside of any gate, for those who change what its steps run over, and reads its records back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from hilgate import hardware, results
from hilgate.plan import plan_digest
from hilgate.progress import Lines
from hilgate.run import Runner

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.model import Plan
    from hilgate.results import Recorded


def run_apart(plan: Plan, root: Path, folder: Path) -> Recorded:
    """Run every step of `plan` over `root` with the gate's own runner; its records are in `folder`."""
    digest = plan_digest(plan)
    machine = hardware.detect()
    with Lines(Console(stderr=True), buildkite=False) as progress:
        Runner(
            plan=plan,
            digest=digest,
            root=root,
            results_folder=folder,
            environment=hardware.environment(machine),
            commit=plan.commit,
            tree="",
            cores=machine.cores,
            progress=progress,
        ).run()
    return results.read(folder / results.RESULTS_FILE, plan, digest)
