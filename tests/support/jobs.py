# SPDX-License-Identifier: Apache-2.0
"""Job folders as agents leave them, for tests of everything that is judged about more than exit statuses."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

from support.plans import ENVIRONMENT, plan, step

from hilgate.evidence import kind_of
from hilgate.judge.verdict import judge
from hilgate.model.declaration import Quarantined
from hilgate.model.plan import plan_digest
from hilgate.model.record import (
    BuildRecord,
    Check,
    CheckRecord,
    GpuHealth,
    Health,
    ImageRecord,
    Outcome,
    RerunRecord,
    StepRecord,
)
from hilgate.run import results
from hilgate.run.rules import StepFacts, decide

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.model.plan import Plan, PlannedStep
    from hilgate.model.record import Record
    from hilgate.model.verdict import StepVerdict, Verdict

NOW = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
CONTENT = "e" * 64
DIGEST = "sha256:" + "d" * 64
TEST = "tests/t.py::test_gather[bs16]"
OTHER = "tests/t.py::test_write[bs16]"
NODE, ELSEWHERE = "mi300-7", "mi300-9"


def passed(name: str = OTHER, **more: Any) -> Check:
    return Check(id=name, outcome=Outcome.PASS, **more)


def failed(name: str = TEST, message: str = "max_abs_err 0.5 > 0.001\nmore", **more: Any) -> Check:
    return Check(id=name, outcome=Outcome.FAIL, message=message, **more)


def skipped(name: str = OTHER, message: str = "needs gfx950") -> Check:
    return Check(id=name, outcome=Outcome.DID_NOT_RUN, message=message)


def undecided(name: str = OTHER) -> Check:
    return Check(id=name, outcome=Outcome.INCONCLUSIVE, message="n=50 cannot see 3 points")


def gpu_step(name: str = "gather", **changes: Any) -> PlannedStep:
    values = {
        "key": f"{name}-gfx942",
        "device": "gfx942",
        "queue": "amd_mi300_1",
        "gpus": 1,
        "image": "rocm",
        "evidence": "junit",
    }
    return step(name, "python -m pytest tests/t.py", **(values | changes))


PACKAGES = {"samples": "kernels/samples"}
IMAGE_STEP = step("image", "python -c pass", key="image-rocm-cpu", provides="rocm")
GATHER = gpu_step()


def agents_plan(*steps: PlannedStep, **changes: Any) -> Plan:
    """A plan for agents whose first step builds the image; without steps, the one GPU step."""
    values: dict[str, Any] = {
        "profile": "pr",
        "images": {"rocm": CONTENT},
        "merge_base": "b" * 40,
        "packages": PACKAGES,
    }
    return plan(IMAGE_STEP, *(steps or (GATHER,)), **(values | changes))


def environment(host: str = NODE, image: str = DIGEST) -> Any:
    return ENVIRONMENT.model_copy(update={"host": host, "image": image, "device": "AMD Instinct MI300X"})


def opening(a_plan: Plan, **changes: Any) -> BuildRecord:
    values: dict[str, Any] = {
        "started": NOW,
        "plan_digest": plan_digest(a_plan),
        "commit": a_plan.commit,
        "tree": "t" * 64,
        "environment": environment(),
    }
    return BuildRecord.model_validate(values | changes)


def finished(a_step: PlannedStep, *checks: Check, status: int | None = 0, **changes: Any) -> list[Record]:
    """Records of an attempt; its outcome is what the runner's own rules say unless `outcome` is given."""
    stopped = changes.pop("stopped", "")
    problem = changes.pop("problem", "")
    lacked = changes.get("lacked", ())
    may_lack = a_step.step.may_lack
    facts = StepFacts(
        kind_of(a_step), a_step.step.minimum, status, checks, stopped, problem, "", may_lack, frozenset(lacked)
    )
    decision = decide(facts)
    values: dict[str, Any] = {
        "key": a_step.key,
        "started": NOW,
        "seconds": 60.0,
        "exit_status": status,
        "outcome": decision.outcome,
        "message": decision.why,
        "checks": len(checks),
        "command": a_step.step.command,
        "imported": PACKAGES,
        "environment": environment(),
    }
    record = StepRecord.model_validate(values | changes)
    return [*(CheckRecord(step=record.key, check=check) for check in checks), record]


def image(**changes: Any) -> ImageRecord:
    values: dict[str, Any] = {"step": IMAGE_STEP.key, "image": "rocm", "content": CONTENT, "digest": DIGEST}
    return ImageRecord.model_validate(values | changes)


def again(outcome: str = "pass", *, host: str = NODE, check: str = TEST, key: str = GATHER.key) -> RerunRecord:
    message = "" if outcome == "pass" else "max_abs_err 0.5 > 0.001"
    return RerunRecord(
        step=key, check=check, host=host, elsewhere=host != NODE, outcome=outcome, seconds=1.0, message=message
    )


def entry(test: str = TEST, step: str = "gather", days: int = 7, **changes: Any) -> Quarantined:
    """A test in quarantine for two weeks, of which so many days are left."""
    expires = NOW.date() + dt.timedelta(days=days)
    values: dict[str, Any] = {
        "test": test,
        "step": step,
        "reason": "wrong lane",
        "owner": "kernels",
        "added": expires - dt.timedelta(days=14),
        "expires": expires,
    }
    return Quarantined.model_validate(values | changes)


def health(moment: str, key: str = GATHER.key, **changes: Any) -> Health:
    gpu = GpuHealth(
        index=0, bdf="0000:05:00.0", name="MI300X", vram_total_mib=196_592, vram_used_mib=285, ecc_uncorrectable=0
    )
    values: dict[str, Any] = {
        "step": key,
        "moment": moment,
        "host": NODE,
        "agent": f"{NODE}-1",
        "taken": NOW,
        "seconds": 3.0,
        "healthy": True,
        "gpus": (gpu,),
    }
    return Health.model_validate(values | changes)


class Jobs:
    """The folder `jobs` of a build on agents; it begins sound and complete, and each test spoils something."""

    def __init__(self, folder: Path, a_plan: Plan | None = None) -> None:
        self.plan = a_plan or agents_plan()
        self.folder = folder / "jobs"
        self.job(IMAGE_STEP.key, image(), *finished(IMAGE_STEP, passed("built"), environment=environment(image="")))
        self.job(GATHER.key, *finished(GATHER, passed(TEST), passed()))
        self.healthy()

    def path(self, key: str = GATHER.key, name: str = results.RESULTS_FILE) -> Path:
        return self.folder / key / name

    def job(self, key: str, *lines: Record, **changes: Any) -> None:
        """Replace what a job left by a build record (with `changes`) and these."""
        results.write(self.path(key).parent, opening(self.plan, **changes), lines)

    def healthy(self, key: str = GATHER.key, **after: Any) -> None:
        """Write both health files; `after` changes the second."""
        for one in (health("before", key), health("after", key, **after)):
            self.path(key, f"health-{one.moment}.json").write_text(one.model_dump_json())

    def recorded(self) -> results.Recorded:
        return results.read_all(self.folder.parent, self.folder, self.plan, plan_digest(self.plan))

    def verdict(self, **more: Any) -> Verdict:
        return judge(self.plan, self.recorded(), plan_digest(self.plan), decided=NOW, **more)

    def ruled(self, key: str = GATHER.key, **more: Any) -> StepVerdict:
        return next(one for one in self.verdict(**more).steps if one.key == key)
