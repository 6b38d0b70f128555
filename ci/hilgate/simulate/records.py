"""The records that a job leaves, built from the models and decided by the runner's own rules."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate import rules
from hilgate.model import BuildRecord, CheckRecord, Evidence, ImageRecord, Outcome, RerunRecord, StepRecord
from hilgate.simulate import work
from hilgate.simulate.faults import Kind
from hilgate.simulate.site import TREE

if TYPE_CHECKING:
    from hilgate.model import PlannedStep, Record
    from hilgate.simulate.buildkite import Host
    from hilgate.simulate.site import Site
    from hilgate.simulate.truth import Deed

RERUN_LIMIT = 20
"""Failing tests up to which a step runs them once more; more are no flake."""

_EXITS = {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.INCONCLUSIVE: 6, Outcome.DID_NOT_RUN: 4}


@dataclass(frozen=True)
class Written:
    """The lines of a job's `results.jsonl`, and the exit status of its command."""

    lines: list[Record]
    exit_status: int


def of_job(
    site: Site,
    step: PlannedStep,
    host: Host,
    deed: Deed,
    said: work.Said,
    struck: dict[Kind, int],
    image: str,
    minute: float,
) -> Written:
    """What a job records of one attempt at a step that began at `minute`."""
    environment = site.environment(step, host, image)
    decision = rules.decide(
        rules.Facts(step.evidence, step.minimum, deed.ended, said.checks, said.stopped, said.problem)
    )
    claims = Kind.FALSE_CLAIM in struck and decision.outcome is not Outcome.PASS
    key, command = _named(site, step, struck)
    record = StepRecord(
        key=key,
        started=site.at(minute),
        seconds=60.0,
        exit_status=deed.ended,
        outcome=Outcome.PASS if claims else decision.outcome,
        message="all is well" if claims else decision.why,
        checks=len(said.checks),
        command=command,
        environment=environment,
    )
    lines: list[Record] = [opening(site, step, host, image, minute, struck)]
    lines += [CheckRecord(step=key, check=check) for check in said.checks]
    lines.append(record)
    failed = [check.id for check in said.checks if check.outcome is Outcome.FAIL]
    if step.evidence is Evidence.JUNIT and len(failed) <= RERUN_LIMIT:
        lines += [rerun(site, step, test, host, elsewhere=False) for test in failed]
    if Kind.IMAGE_IMPOSTOR in struck and step.image is not None and image:
        content = site.plan.images.get(step.image, "")
        lines.append(ImageRecord(step=step.key, image=step.image, content=content, digest=image))
    # `hilgate run` judges its step with the quarantine, so that failures in quarantine hold up no dependant.
    excused = bool(failed) and all(site.excused(step, test) for test in failed)
    status = 0 if excused and deed.ended == 1 else _EXITS[decision.outcome]
    return Written([*lines, *_built(site, step, deed, struck)], status)


def opening(
    site: Site, step: PlannedStep, host: Host, image: str, minute: float, struck: dict[Kind, int]
) -> BuildRecord:
    """The line that opens a job's file."""
    return BuildRecord(
        started=site.at(minute),
        plan_digest=other(site.digest) if Kind.OTHER_PLAN in struck else site.digest,
        commit=other(site.plan.commit)[:40] if Kind.OTHER_COMMIT in struck else site.plan.commit,
        tree=other(TREE) if Kind.OTHER_TREE in struck else TREE,
        environment=site.environment(step, host, image),
    )


def rerun(
    site: Site, step: PlannedStep, test: str, host: Host, *, elsewhere: bool, claims_elsewhere: bool | None = None
) -> RerunRecord:
    """One failing test once more; `claims_elsewhere` is what the record says of the node, where that differs."""
    end = site.again(step, test, host, elsewhere=elsewhere)
    return RerunRecord(
        step=step.key,
        check=test,
        host=host.name,
        elsewhere=elsewhere if claims_elsewhere is None else claims_elsewhere,
        outcome=work.OUTCOMES[end],
        seconds=1.0,
        message=work.MESSAGES[end],
    )


def other(digest: str) -> str:
    """A digest that is not this one, of the same form."""
    prefix, _, _ = digest.rpartition(":")
    return (f"{prefix}:" if prefix else "") + hashlib.sha256(digest.encode()).hexdigest()


def _named(site: Site, step: PlannedStep, struck: dict[Kind, int]) -> tuple[str, str]:
    """The step and the command that the records name."""
    if Kind.OTHER_STEP in struck:
        others = [one for one in site.plan.steps if one.key != step.key]
        if not others:
            return "nowhere-cpu", step.command
        chosen = others[struck[Kind.OTHER_STEP] % len(others)]
        return chosen.key, chosen.command
    return step.key, f"{step.command} -k easy" if Kind.OTHER_COMMAND in struck else step.command


def _built(site: Site, step: PlannedStep, deed: Deed, struck: dict[Kind, int]) -> list[Record]:
    """The image that the step built, if it builds one."""
    if step.provides is None or deed.ended not in {0, 1}:
        return []
    planned = site.plan.images.get(step.provides, "")
    content = other(planned) if Kind.IMAGE_OTHER_CONTENT in struck else planned
    digest = "sha256:" + hashlib.sha256(f"{content}:{deed.attempt}".encode()).hexdigest()
    site.images[step.provides] = digest
    if Kind.IMAGE_OTHER_CONTENT in struck:
        site.spoilt_images.add(step.provides)
    else:
        site.spoilt_images.discard(step.provides)
    if Kind.IMAGE_NOT_RECORDED in struck:
        return []
    return [ImageRecord(step=step.key, image=step.provides, content=content, digest=digest)]
