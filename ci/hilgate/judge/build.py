# SPDX-License-Identifier: Apache-2.0
"""Judge a results folder and write `verdict.json`. However little was recorded, there is a verdict."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hilgate import git
from hilgate.declare.load import load
from hilgate.declare.quarantine import USED_FILE, effective, load_quarantine
from hilgate.errors import Exit, HilgateError, writing
from hilgate.judge.earlier import Before, before
from hilgate.judge.verdict import exit_status, judge
from hilgate.model import VERDICT_FILE
from hilgate.model.declaration import Quarantine
from hilgate.model.record import Outcome
from hilgate.model.verdict import Verdict
from hilgate.run import results

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.model.plan import Plan
    from hilgate.run.results import Recorded

OTHER_FILES = "the files are not those that its steps ran over: they changed since, or while they ran; run it again"


@dataclass(frozen=True)
class Judged:
    """A decision with all that led to it.

    Attributes:
        plan: The steps that were decided on.
        refused: Why the quarantine that should count cannot be read; the verdict is red then.
    """

    plan: Plan
    recorded: Recorded
    verdict: Verdict
    refused: HilgateError | None = None

    @property
    def exit_status(self) -> Exit:
        """The exit status of a command that ends with this verdict."""
        return self.refused.exit_status if self.refused else exit_status(self.verdict, self.plan)


def judge_folder(
    folder: Path,
    plan: Plan,
    digest: str,
    *,
    jobs: Path | None = None,
    only: frozenset[str] | None = None,
    job: str = "",
    root: Path | None = None,
    approved_by: str = "",
) -> Judged:
    """Judge a results folder, or what agents left in `jobs`; write `verdict.json` and the quarantine that counted.

    Args:
        folder: Where the verdict is written.
        plan: What was expected.
        digest: `plan_digest` of it.
        jobs: A folder with one results folder per agent's job; None locally.
        only: Decide on these steps of the plan alone, as an agent's own job does, also on those that are only
            reported. The node's health, images and
            approvals are left to the verdict of the whole build, which alone can know them.
        job: The one step of `only`, where `folder` is the folder of its job.
        root: The repository that has the quarantine; None judges without one.
        approved_by: Who approved the protected changes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    judged = plan
    if only is not None:
        asked = [step for step in plan.steps if step.key in only]
        steps = tuple(step.model_copy(update={"report_only": False}) for step in asked)
        # An agent's job leaves approvals to the verdict of the build; locally there is no other one.
        left_out = {} if plan.local else {"profile": "gate"}
        judged = plan.model_copy(update={"steps": steps, **left_out})
    recorded = results.read_all(folder, jobs, plan, digest, job, approved=bool(approved_by))
    excused, refused = Quarantine(), None
    if root:
        try:  # the merge base's, or the change's own where somebody approved it
            base = "" if approved_by else plan.merge_base
            excused = effective(root, base, load_quarantine(root, load(root)))
        except HilgateError as error:
            refused = error
    doubts = (OTHER_FILES,) if root and plan.local and jobs is None and _moved(recorded, root) else ()
    past = before(folder, plan, recorded) if jobs is not None else Before()
    recorded = replace(recorded, waited=past.waited)
    verdict = judge(
        judged,
        recorded,
        digest,
        decided=dt.datetime.now(dt.UTC),
        quarantine=excused,
        approved_by=approved_by,
        doubts=(*doubts, *past.doubts),
        before=past.said,
        approvals=only is None or plan.local,
    )
    if refused:
        verdict = verdict.model_copy(update={"outcome": Outcome.FAIL, "why": f"the quarantine: {refused.what}"})
    with writing(folder):
        verdict.save(folder / VERDICT_FILE)
        excused.save(folder / USED_FILE)
    return Judged(judged, recorded, verdict, refused)


def _moved(recorded: Recorded, root: Path) -> bool:
    """Whether a step ran over other files than those that are here now."""
    trees = {build.tree for build in recorded.builds if build.tree}
    return bool(trees) and trees != {git.fingerprint(root)}


def judge_nothing(folder: Path, why: str) -> Verdict:
    """Write the verdict of results without a plan: no old verdict may outlive that."""
    folder.mkdir(parents=True, exist_ok=True)
    verdict = Verdict(
        decided=dt.datetime.now(dt.UTC),
        profile=None,
        commit="",
        plan_digest="",
        outcome=Outcome.DID_NOT_RUN,
        why=why,
        steps=(),
        omissions=(),
    )
    verdict.save(folder / VERDICT_FILE)
    return verdict
