"""Everything that is known of one planned step when it is judged, and the questions that a ruling asks of it. Pure.

What the author of a change is told about a step: the taxonomy, decided from everything that arrived. Pure.

`rules` says what an exit status and its checks mean. Here that meets the node, the image, reruns and the quarantine.
Nothing here makes a step greener than its own checks, with one exception that has an owner and a date: failures that
the merge base has in quarantine.

Health of the node a job ran on: the files its hooks left, and what they say about the results beside them.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hilgate.errors import Exit
from hilgate.model import CPU, Check, Evidence, Outcome, Ruling
from hilgate.run import outcome
from hilgate.run import outcome as rules
from hilgate.run.results import MOMENTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hilgate.declare.quarantine import Entries
    from hilgate.model import Check, GpuHealth, Health, Plan, PlannedStep, RerunRecord
    from hilgate.run.outcome import Decision
    from hilgate.run.results import Attempt, Recorded


@dataclass(frozen=True)
class Case:
    """A step and all that arrived about it.

    Attributes:
        excused: Ids in quarantine on this step and device.
        attempt: The attempt that counts; None when the step did not finish.
        trouble: What the hooks saw of its node that makes a result worthless.
    """

    step: PlannedStep
    plan: Plan
    recorded: Recorded
    excused: frozenset[str]
    attempt: Attempt | None
    trouble: tuple[str, ...]

    @property
    def reruns(self) -> tuple[RerunRecord, ...]:
        """Its failing checks that were run once more."""
        return self.recorded.reruns.get(self.step.key, ())

    def passed_again(self, check: Check) -> bool:
        """Whether a rerun of it passed."""
        return any(rerun.check == check.id and rerun.outcome is Outcome.PASS for rerun in self.reruns)

    def failed_elsewhere(self, check: Check) -> bool:
        """Whether it failed on another node too, one whose own health says nothing against that."""
        host = self.attempt.record.environment.host if self.attempt else ""
        health = self.recorded.health.get(f"{self.step.key}.recheck", ())
        return any(
            rerun.check == check.id
            and rerun.outcome is Outcome.FAIL
            and rerun.elsewhere
            and rerun.host != host
            and not trouble(health, rerun.host, 0)
            for rerun in self.reruns
        )

    def other_image(self) -> str:
        """Why the image it ran in is not the planned one; empty when it is, and at a desk."""
        name = self.step.image
        if name is None or self.plan.profile == "gate":
            return ""
        assert self.attempt is not None
        built, ran = self.recorded.images.get(name), self.attempt.record.environment.image
        if built is None:
            return f"no record says which image {name!r} was built in this build"
        if built.content != self.plan.images.get(name):
            return f"the image {name!r} was built from other contents than the plan's"
        return "" if ran == built.digest else f"it ran in image {ran or '(none)'}, built was {built.digest}"

    def without_health(self) -> str:
        """Which health record is demanded and not there; empty when none is."""
        if not is_demanded(self.step, self.plan.profile):
            return ""
        lacking = missing(self.recorded.health.get(self.step.key, ()))
        return f"nothing is known of its node's health {lacking}" if lacking else ""

    def first_trouble(self) -> str:
        """The first thing that stands against its node; empty for nothing."""
        return f"its node is in doubt ({self.trouble[0]})" if self.trouble else ""

    def with_trouble(self, why: str) -> str:
        """The reason, and the node's part in it."""
        return f"{why}; {self.first_trouble()}" if self.trouble else why

    def node_lines(self) -> tuple[str, ...]:
        """Where it ran, and over which files of the merge base."""
        if self.attempt is None:
            hosts = sorted({one.host for one in self.recorded.health.get(self.step.key, ())})
            return tuple(f"node {host}" for host in hosts)
        where = self.attempt.record.environment
        files = self.recorded.restored.get(self.step.key, ())
        restored = (f"with these files of the merge base: {', '.join(files)}",) if files else ()
        return (f"node {where.host}: {where.device}", *restored)

    def rerun_lines(self) -> tuple[str, ...]:
        """A line for each rerun, and why one elsewhere does not count."""
        damaged = self.recorded.damaged.get(f"{self.step.key}.recheck", "")
        words = []
        for rerun in self.reruns:
            where = f"elsewhere, {rerun.host}" if rerun.elsewhere else f"on the same node, {rerun.host}"
            message = f": {outcome.first_line(rerun.message)}" if rerun.message else ""
            words.append(f"again {where}: {rerun.check}: {rerun.outcome.value}{message}")
        return (*words, *((f"its rerun elsewhere cannot be believed: {damaged}",) if damaged else ()))


OF_THE_NODE = frozenset({int(Exit.SICK_NODE)})
"""Exit statuses by which a step says that its node is at fault, whatever its evidence."""

OWN_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})
"""Signals that a process brings upon itself; the others come from outside (SIGKILL: out of memory)."""


@dataclass(frozen=True)
class Ruled:
    """A step's outcome, what it is called, and what that rests on."""

    outcome: Outcome
    ruling: Ruling
    why: str
    evidence: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()
    unexpected_passes: tuple[str, ...] = ()


def rule(step: PlannedStep, plan: Plan, recorded: Recorded, entries: Entries) -> Ruled:
    """Decide on a step.

    Args:
        step: A step of the plan.
        plan: Says for whom the results are: a desk has no hooks and no images.
        recorded: What arrived.
        entries: The quarantine that counts.
    """
    attempt = recorded.last(step.key)
    health = recorded.health.get(step.key, ())
    host = attempt.record.environment.host if attempt else ""
    gpus = step.gpus if is_demanded(step, plan.profile) else 0
    case = Case(step, plan, recorded, entries.of(step), attempt, trouble(health, host, gpus))
    ruled = _expired(_ruled(case), case, entries)
    unknown = tuple(filter(None, [case.without_health()])) if attempt else ()
    seen = (*case.node_lines(), *case.trouble, *unknown, *lines(health))
    return replace(ruled, evidence=(*seen, *ruled.evidence, *case.rerun_lines()))


def _ruled(case: Case) -> Ruled:
    """The first of these that applies: nothing to go by, worthless evidence, the checks themselves."""
    key, recorded = case.step.key, case.recorded
    if key in recorded.damaged:
        return _damaged(case, recorded.damaged[key])
    if case.attempt is None:
        why = "it began and its end was not recorded" if key in recorded.unfinished else "no record of it arrived"
        return Ruled(Outcome.DID_NOT_RUN, Ruling.INFRA, case.with_trouble(why))
    record = case.attempt.record
    if record.command != case.step.step.command:
        return Ruled(Outcome.DID_NOT_RUN, Ruling.REGRESSION, f"another command was run: {record.command}")
    worthless = case.other_image()
    if worthless:
        failed = rules.first(case.attempt.checks, Outcome.FAIL)
        return Ruled(Outcome.DID_NOT_RUN, Ruling.INFRA, worthless + (f"; {failed.id} failed there" if failed else ""))
    return _built(_of_attempts(case), case)


def _damaged(case: Case, problem: str) -> Ruled:
    failing = [check for check in case.recorded.salvaged.get(case.step.key, ()) if check.id not in case.excused]
    if not failing:
        why = case.with_trouble(f"its results cannot be believed: {problem}")
        return Ruled(Outcome.DID_NOT_RUN, Ruling.INFRA, why)
    why = f"{failing[0].id}: {rules.first_line(failing[0].message)} (its results are damaged as well: {problem})"
    if case.trouble:
        return Ruled(Outcome.DID_NOT_RUN, Ruling.INFRA, case.with_trouble(why))
    return Ruled(Outcome.FAIL, Ruling.REGRESSION, why)


def _of_attempts(case: Case) -> Ruled:
    """The last attempt decides. Only one that did not run may be made good by a later one over the same files."""
    assert case.attempt is not None
    earlier = case.recorded.attempts[case.step.key][:-1]
    ruled = _of_attempt(case)
    if not earlier:
        return ruled
    before = ", ".join(attempt.record.outcome.value for attempt in earlier)
    ruled = replace(ruled, why=f"{ruled.why} (attempt {len(earlier) + 1}; before: {before})")
    if ruled.outcome is not Outcome.PASS:
        return ruled
    now = {check.id for check in case.attempt.checks if check.outcome is Outcome.PASS}
    failed = [check.id for attempt in earlier for check in attempt.checks if check.outcome is Outcome.FAIL]
    flaky = tuple(dict.fromkeys(name for name in failed if name in now and name not in case.excused))
    stood = [a for a in earlier if decide(case.step, a, case.excused).outcome in {Outcome.FAIL, Outcome.INCONCLUSIVE}]
    if not stood and not flaky:
        return ruled
    only_open = all(a.record.outcome is Outcome.INCONCLUSIVE for a in stood) and not flaky
    kind = Ruling.INCONCLUSIVE if only_open else Ruling.FLAKY
    return replace(ruled, outcome=Outcome.INCONCLUSIVE, ruling=kind, flaky=flaky)


def _of_attempt(case: Case) -> Ruled:
    """The checks of the attempt that counts, with what reruns, quarantine and node say of them."""
    assert case.attempt is not None
    step, attempt = case.step, case.attempt
    failed = [check for check in attempt.checks if check.outcome is Outcome.FAIL]
    excused = tuple(check.id for check in failed if check.id in case.excused)
    open_ = [check for check in failed if check.id not in case.excused]
    flaky = tuple(check.id for check in open_ if case.passed_again(check))
    passes = tuple(c.id for c in attempt.checks if c.outcome is Outcome.PASS and c.id in case.excused)
    found = Ruled(Outcome.PASS, Ruling.PASS, "", flaky=flaky, quarantined=excused, unexpected_passes=passes)
    standing = [check for check in open_ if check.id not in flaky]
    if standing:
        decision = decide(step, attempt, case.excused)
        confirmed = next((check for check in standing if case.failed_elsewhere(check)), None)
        if case.trouble and confirmed is None:
            why = f"{decision.why}; but {case.first_trouble()}: it may be the node's doing"
            return replace(found, outcome=Outcome.DID_NOT_RUN, ruling=Ruling.INFRA, why=why)
        return replace(found, outcome=decision.outcome, ruling=Ruling.REGRESSION, why=decision.why)
    decision = decide(step, attempt, case.excused, frozenset(flaky))
    if case.trouble or case.without_health():
        why = f"{case.first_trouble() or case.without_health()}; the step itself: {decision.why}"
        return replace(found, outcome=Outcome.DID_NOT_RUN, ruling=Ruling.INFRA, why=why)
    if flaky and decision.outcome is Outcome.INCONCLUSIVE:
        why = f"{open_[0].id} failed and passed when run again: {rules.first_line(open_[0].message)}"
        return replace(found, outcome=decision.outcome, ruling=Ruling.FLAKY, why=why)
    if excused and (decision.outcome is Outcome.PASS or attempt.record.exit_status == Exit.FAIL):
        why = f"{decision.why}; {len(excused)} failed in quarantine"
        return replace(found, outcome=decision.outcome, ruling=Ruling.QUARANTINED, why=why)
    return replace(found, outcome=decision.outcome, ruling=_named(case, decision), why=decision.why)


def decide(
    step: PlannedStep, attempt: Attempt, excused: frozenset[str], flaky: frozenset[str] = frozenset()
) -> Decision:
    """What the rules say of an attempt where some failures do not count as such; never better than it says itself.

    A failure that is excused is left out, so it counts for no minimum either; a flaky one is inconclusive. Exit status
    1 says that checks failed: it goes with them, and no other status does.
    """
    record = attempt.record
    derived = rules.decide(_facts(step, attempt, record.exit_status, attempt.checks))
    left = tuple(
        check.model_copy(update={"outcome": Outcome.INCONCLUSIVE})
        if check.outcome is Outcome.FAIL and check.id in flaky
        else check
        for check in attempt.checks
        if check.outcome is not Outcome.FAIL or check.id not in excused
    )
    if left != attempt.checks and record.outcome is Outcome.FAIL:
        status = Exit.PASS if record.exit_status == Exit.FAIL else record.exit_status
        facts = _facts(step, attempt, status, left)
        return rules.decide(replace(facts, stopped="it was ended before it was done"))
    if rules.SEVERITY[derived.outcome] > rules.SEVERITY[record.outcome]:
        return rules.Decision(derived.outcome, f"{derived.why} (recorded as {record.outcome.value})")
    return rules.Decision(record.outcome, record.message or derived.why)


def _facts(step: PlannedStep, attempt: Attempt, status: int | None, checks: tuple[Check, ...]) -> rules.Facts:
    return rules.Facts(step.step.evidence, step.step.minimum, status, checks, stopped=attempt.record.message)


def _named(case: Case, decision: Decision) -> Ruling:
    """What an outcome without a failing check is called."""
    assert case.attempt is not None
    record = case.attempt.record
    if decision.outcome is Outcome.PASS:
        return Ruling.PASS
    if decision.outcome is Outcome.INCONCLUSIVE:
        return Ruling.INCONCLUSIVE
    if decision.outcome is Outcome.FAIL:
        return Ruling.REGRESSION
    status = record.exit_status
    if status is None:
        return Ruling.REGRESSION if record.message.startswith(rules.TIMED_OUT) else Ruling.INFRA
    if status < 0:
        # On a node that was watched and is sound, a crash is the step's own, as a hang is.
        watched = bool(case.recorded.health.get(case.step.key))
        return Ruling.REGRESSION if watched and -status in OWN_SIGNALS else Ruling.INFRA
    refused = status == Exit.CANNOT_RUN_HERE and case.step.step.evidence is not Evidence.JUNIT  # pytest's 5: no tests
    return Ruling.INFRA if refused or status in OF_THE_NODE else Ruling.REGRESSION


def _built(ruled: Ruled, case: Case) -> Ruled:
    """A step that builds an image passes only with a record of that image, of the planned contents."""
    image = case.step.step.provides
    if image is None or ruled.outcome is not Outcome.PASS:
        return ruled
    record = case.recorded.images.get(image)
    if record is None:
        why = f"it left no record of the image {image!r}, which it builds"
    elif record.content != case.plan.images.get(image):
        why = f"it built the image {image!r} from other contents than the plan's"
    else:
        return ruled
    return replace(ruled, outcome=Outcome.DID_NOT_RUN, ruling=Ruling.REGRESSION, why=why)


def _expired(ruled: Ruled, case: Case, entries: Entries) -> Ruled:
    """An entry that has expired is red by itself, so that it cannot be forgotten."""
    expired = entries.expired_of(case.step)
    if not expired:
        return ruled
    words = tuple(f"quarantine of {one.test} expired on {one.expires}: mend it or take it out" for one in expired)
    if ruled.outcome is not Outcome.PASS:
        return replace(ruled, evidence=(*ruled.evidence, *words))
    return replace(ruled, outcome=Outcome.FAIL, ruling=Ruling.QUARANTINED, why=words[0], evidence=words[1:])


SHOWN_LINES = 5
"""Kernel log lines that a ruling quotes; the rest stay in the health file."""


def is_demanded(step: PlannedStep, profile: str) -> bool:
    """Whether a result of this step counts only with both records: on a GPU of an agent. A desk has no hooks."""
    return profile != "gate" and step.queue is not None and step.device != CPU


def missing(health: Sequence[Health]) -> str:
    """Which of the two records is not there; empty when both are."""
    moments = {one.moment for one in health}
    return ", ".join(moment for moment in MOMENTS if moment not in moments)


def trouble(health: Sequence[Health], host: str, gpus: int) -> tuple[str, ...]:
    """What the hooks saw that makes a result worthless; empty on a node that was fit throughout.

    Args:
        health: The records of one job.
        host: Node that the results name; empty when there are none.
        gpus: GPUs the step needs.
    """
    found: list[str] = []
    for one in health:
        if host and one.host != host:
            found.append(f"the health {one.moment} is of {one.host}, the results are of {host}")
        found += [f"unfit {one.moment}: {problem}" for problem in one.problems]
        if not (one.healthy or one.problems or one.dmesg):
            found.append(f"unfit {one.moment}: the hook does not say why")
        if len(one.gpus) < gpus:
            found.append(f"{len(one.gpus)} of {gpus} GPUs {one.moment}")
    found += _changed(health)
    # What the kernel said before the step began counts only where the hook found the node unfit for it.
    log = [line for one in health if one.moment == "after" or not one.healthy for line in one.dmesg]
    return (*found, *(f"kernel log: {line}" for line in log[:SHOWN_LINES]))


def lines(health: Sequence[Health]) -> tuple[str, ...]:
    """Node and GPU memory before and after, a line for each GPU."""
    before, after = _by_bdf(health, "before"), _by_bdf(health, "after")
    shown = []
    for bdf in sorted(before | after):
        used = [f"{gpus[bdf].vram_used_mib:,} MiB {when}" if bdf in gpus else f"not there {when}"
                for gpus, when in ((before, "before"), (after, "after"))]  # fmt: skip
        gpu = (after | before)[bdf]
        name = f"{bdf} {gpu.name}" if gpu.name else bdf
        shown.append(f"GPU {name}: {', '.join(used)}, of {gpu.vram_total_mib:,} MiB")
    ended = [process for one in health for process in one.ended]
    return (*shown, *(f"left running, and ended: {process}" for process in ended[:SHOWN_LINES]))


def _by_bdf(health: Sequence[Health], moment: str) -> dict[str, GpuHealth]:
    return {gpu.bdf: gpu for one in health if one.moment == moment for gpu in one.gpus}


def _changed(health: Sequence[Health]) -> list[str]:
    """GPUs that went away or counted new uncorrectable errors while the step ran."""
    if missing(health):
        return []
    before, after = _by_bdf(health, "before"), _by_bdf(health, "after")
    gone = [f"GPU {bdf} was gone afterwards" for bdf in sorted(before.keys() - after.keys())]
    errors = [
        (bdf, after[bdf].ecc_uncorrectable - gpu.ecc_uncorrectable) for bdf, gpu in before.items() if bdf in after
    ]
    return gone + [f"GPU {bdf}: {new} new uncorrectable memory errors" for bdf, new in errors if new > 0]
