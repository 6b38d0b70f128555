"""Everything that is known of one planned step when it is judged, and the questions that a ruling asks of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate import health_records, rules
from hilgate.model import Outcome

if TYPE_CHECKING:
    from hilgate.model import Check, Plan, PlannedStep, RerunRecord
    from hilgate.records import Attempt, Recorded


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
            and not health_records.trouble(health, rerun.host, 0)
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
        if not health_records.is_demanded(self.step, self.plan.profile):
            return ""
        missing = health_records.missing(self.recorded.health.get(self.step.key, ()))
        return f"nothing is known of its node's health {missing}" if missing else ""

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
            message = f": {rules.first_line(rerun.message)}" if rerun.message else ""
            words.append(f"again {where}: {rerun.check}: {rerun.outcome.value}{message}")
        return (*words, *((f"its rerun elsewhere cannot be believed: {damaged}",) if damaged else ()))
