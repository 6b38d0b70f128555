# SPDX-License-Identifier: Apache-2.0
"""What any report says of a verdict: for each step that is not green what broke, by how much, and whether before.

`ReportView` is made once of a verdict; the page, the annotation and the terminal show parts of it.
Tests record numbers and labels (`record_property`), findings carry them; what a check did not record is read from the
parameters in its id, or left out. Nothing is computed here: a figure that is shown is one that was recorded.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from hilgate.judge.verdict import reproduce_line, totals
from hilgate.model.declaration import CPU
from hilgate.model.record import SEVERITY, Outcome
from hilgate.model.verdict import Ruling
from hilgate.report import tables
from hilgate.report.causes import causes
from hilgate.report.merge_base import NOTHING, MergeBase, of_cause, whose
from hilgate.report.reservations import reservations
from hilgate.run import outcome
from hilgate.run.outcome import place
from hilgate.text import count, duration, marked, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hilgate.model.plan import Plan, PlannedStep
    from hilgate.model.record import Check
    from hilgate.model.verdict import StepVerdict, Verdict
    from hilgate.report.causes import Cause
    from hilgate.report.reservations import Reservation
    from hilgate.report.tables import Table
    from hilgate.run.results import Recorded


LIMIT_BYTES = 1024 * 1024
"""Buildkite refuses larger annotations; a report of that size is still a mailable file."""

NAMED_IDS, EVIDENCE_LINES = 20, 12
"""How many flaky and quarantined checks of a step are named, and how many lines of its evidence are shown."""


@dataclass(frozen=True)
class Detail:
    """How much is shown, so that a build with thousands of failures still fits."""

    failures_per_step: int
    message_characters: int
    table_rows: int


DETAILS = (Detail(20, 4000, 500), Detail(8, 1500, 150), Detail(3, 500, 30), Detail(1, 200, 0))
"""Tried in order until the report fits; what is left out is counted and stays in the results folder."""


def fit(render: Callable[[Detail], str], limit: int = LIMIT_BYTES, *, least: str) -> str:
    """The most detailed text below so many bytes; `least` where names and messages leave room for none."""
    texts = (render(detail) for detail in DETAILS)
    return next((text for text in texts if len(text.encode()) < limit), least)


def at_most(lines: Sequence[str], limit: int) -> list[str]:
    """The first lines, and how many there are more."""
    more = len(lines) - limit
    return [*lines[:limit], *([f"and {more} more in verdict.json"] if more > 0 else [])]


@dataclass(frozen=True)
class ReportView:
    """A verdict as every report shows it."""

    plan: Plan
    recorded: Recorded
    verdict: Verdict
    facts: MergeBase = NOTHING
    """What is known of the merge base."""

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        """What its failures come down to."""
        return tuple(causes(self.plan, self.recorded, self.verdict))

    @cached_property
    def whose(self) -> str:
        """Whether its failures are the change's own; empty where that is unknown."""
        counted = [cause for cause in self.causes if not all(failure.step.report_only for failure in cause.failures)]
        return whose(counted, self.facts, self.recorded, local=self.plan.local)

    @property
    def headline(self) -> str:
        """`41 passed, 1 failed, 12 not run; units-cpu: timed out after 600 s`: the checks of all steps, the top cause.

        Of a pass, why its first check was skipped; of a quick run that passed, how little of the gate that is, and how
        to run all of it.
        """
        quick, number = self.plan.profile == "quick", totals(self.verdict)
        if quick and self.verdict.outcome is Outcome.PASS:
            return f"{self.verdict.why}; `{whole_gate()}` runs everything"
        if self.verdict.outcome is not Outcome.PASS:
            why = self._decided()
            words = f"{number}; {why if len(why) <= HEADLINE else f'{why[:HEADLINE]}…'}"
        else:
            skipped = next((check for check in map(self._first_skipped, self.verdict.steps) if check), None)
            reason = shorten(outcome.first_line(skipped.message), HEADLINE) if skipped else ""
            words = f"{number} ({reason})" if skipped else str(number)
        return f"{'quick run: ' if quick else ''}{words}"

    def _first_skipped(self, step: StepVerdict) -> Check | None:
        attempt = self.recorded.last(step.key)
        return outcome.first(attempt.checks, Outcome.DID_NOT_RUN) if attempt else None

    def _decided(self) -> str:
        """Why the verdict is no pass: the step of the top cause and the first line of it, where checks decided."""
        verdict = self.verdict
        decided = next((step for step in verdict.steps if verdict.why.startswith(f"{step.key}: {step.why}")), None)
        top = self.causes[0].failures[0] if self.causes else None
        if not decided or not top or not top.check or top.step.ruling not in {Ruling.REGRESSION, Ruling.INCONCLUSIVE}:
            return verdict.why
        others = verdict.why.removeprefix(f"{decided.key}: {decided.why}")
        return f"{top.step.key}: {outcome.summary(top.check.message).removeprefix('AssertionError: ')}{others}"

    @property
    def step_counts(self) -> str:
        """`2 of 4 steps passed, 2 steps regressed, 1 step stopped by the machine, 3 not selected`."""
        steps, omissions = self.verdict.steps, self.verdict.omissions
        passed = sum(step.outcome is Outcome.PASS for step in steps)
        words = [f"{passed} of {count(len(steps), 'step')} passed"]
        rulings = Counter(step.ruling for step in self.not_green)
        words += [f"{count(number, 'step')} {COUNTED.get(one, one.value)}" for one, number in rulings.items()]
        held_up = sum(omission.cause == "queue out" for omission in omissions)
        words += [f"{held_up} not started"] if held_up else []
        others = len(omissions) - held_up
        words += [f"{others} not selected"] if others else []
        return ", ".join(words)

    @property
    def not_green(self) -> tuple[StepVerdict, ...]:
        """What is not a pass: what counts first, the worst first, otherwise in the order of the plan."""
        steps = [step for step in self.verdict.steps if step.outcome is not Outcome.PASS]
        return tuple(sorted(steps, key=lambda step: (step.report_only, -SEVERITY[step.outcome])))

    @property
    def approval(self) -> str:
        """Who must approve, or has approved, the protected changes; empty where there are none."""
        if not self.verdict.protected_changes:
            return ""
        if self.verdict.approved_by:
            return f"approved by {self.verdict.approved_by}"
        return "an owner who did not start this build must approve"

    def problems(self, limit: int) -> tuple[StepProblem, ...]:
        """Every step in which a cause shows first, the worst first, with at most `limit` causes each.

        A step whose failures all belong to causes of other steps is named there. One that passed with skips is green.
        """
        led: dict[str, list[Cause]] = {}
        for cause in self.causes:
            led.setdefault(cause.failures[0].step.key, []).append(cause)
        return tuple(self._problem(step, led[step.key], limit) for step in self.not_green if step.key in led)

    def _problem(self, step: StepVerdict, led: Sequence[Cause], limit: int) -> StepProblem:
        """What a report says of a step that is not green."""
        planned = next(one for one in self.plan.steps if one.key == step.key)
        attempt = self.recorded.last(step.key)
        checks = attempt.checks if attempt else ()
        skipped = [check for check in checks if check.outcome is Outcome.DID_NOT_RUN]
        reasons = Counter(shorten(outcome.first_line(check.message), 300) for check in skipped)
        whole = next((cause for cause in led if cause.failures[0].check is None), None)
        of_checks = [cause for cause in led if cause is not whole]
        findings = []
        for cause in of_checks[:limit]:
            check = cause.failures[0].check
            assert check is not None
            findings.append(
                replace(
                    finding(check, planned.device, self._of_cause(cause)),
                    number=len(cause.failures),
                    extent=cause.extent,
                    others=tuple(failure.id for failure in cause.failures[1:]),
                    steps=tuple(key for key in cause.steps if key != step.key),
                    waiting=cause.waiting,
                )
            )
        if findings:
            _, image, digest = step.reproduce.partition("  # in image ")
            step = step.model_copy(update={"reproduce": reproduce_line(planned, findings[0].check) + image + digest})
        return StepProblem(
            step,
            tuple(findings),
            max(0, len(of_checks) - limit),
            sum(len(cause.failures) for cause in of_checks[limit:]),
            tuple(reasons.most_common(limit)),
            self._of_cause(whole) if whole else "",
            container_line(step, planned, self.plan.python_path),
            tuple(key for key in whole.steps if key != step.key) if whole else (),
            whole.waiting if whole else (),
        )

    def _of_cause(self, cause: Cause) -> str:
        """Whose the failures of a cause are."""
        return of_cause(cause, self.facts, self.recorded, local=self.plan.local)

    @cached_property
    def reservations(self) -> tuple[Reservation, ...]:
        """Passes that prove less than they seem to."""
        return reservations(self.plan, self.recorded, self.verdict)

    @property
    def reasons(self) -> dict[str, str]:
        """Step key -> why it is in the plan."""
        return {step.key: step.reason for step in self.plan.steps}

    @property
    def peaks(self) -> dict[str, float | None]:
        """Step key -> its peak of memory in MiB."""
        last = {step.key: self.recorded.last(step.key) for step in self.plan.steps}
        return {key: attempt.record.peak_memory_mib for key, attempt in last.items() if attempt}

    @cached_property
    def timeline(self) -> tuple[list[StepBar], list[tuple[float, str]]]:
        """Bars of the attempts that ran and count, in the order of their starts, and (percent, words) of ticks."""
        outcomes = {step.key: step.outcome for step in self.verdict.steps}
        attempts = [self.recorded.last(step.key) for step in self.plan.steps]
        records = [attempt.record for attempt in attempts if attempt]
        records = sorted((one for one in records if one.seconds > 0), key=lambda record: record.started)
        if not records:
            return [], []
        began = records[0].started
        starts = [(record.started - began).total_seconds() for record in records]
        span = max(start + record.seconds for start, record in zip(starts, records, strict=True))
        bars = [
            StepBar(
                record.key,
                outcomes[record.key],
                100 * start / span,
                max(0.3, 100 * record.seconds / span),  # a bar one can see
                duration(record.seconds),
            )
            for start, record in zip(starts, records, strict=True)
        ]
        step = next((seconds for seconds in TICK_SECONDS if span / seconds <= MOST_TICKS), span)
        times = [n * step for n in range(int(span / step) + 1)]
        return bars, [(100 * at / span, f"{at:g} s" if at < 60 else duration(at).removesuffix(" 00 s")) for at in times]

    @property
    def environments(self) -> tuple[tuple[str, str], ...]:
        """(where, what) of every distinct environment that a build record names."""
        distinct = {build.environment.model_dump_json(): build.environment for build in self.recorded.builds}
        rows = []
        for where in distinct.values():
            versions = ", ".join(f"{name} {version}" for name, version in sorted(where.versions.items()))
            image = f", image {where.image}" if where.image else ""
            machine = f"{where.device}, {where.cores} cores, {where.memory_gib:g} GiB"
            rows.append((where.host, f"{machine}; Python {where.python}, {versions}{image}"))
        return tuple(rows)

    @cached_property
    def value_tables(self) -> tuple[Table, ...]:
        """Checks with their numbers, of the steps that declare columns."""
        return tables.value_tables(self.plan, self.recorded, self.verdict)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """Checks as tables, of the steps that declare one."""
        return tables.tables(self.plan, self.recorded, self.verdict)

    @cached_property
    def tables_beside(self) -> tuple[Table, ...]:
        """Steps that stand beside each other, a table of each device."""
        return tables.tables_beside(self.plan, self.recorded, self.verdict)


@dataclass(frozen=True)
class CheckFinding:
    """One check that is not green: what an engineer asks first of it; empty where it was not recorded.

    Attributes:
        number: How many failures look like it; it is the smallest of them.
        extent: `every case of test_x`, or `6 of 12 cases of test_x`; empty where the test has no parameters.
        others: Ids of the others, in all steps.
        steps: Keys of other steps in which it shows.
        waiting: Keys of steps that were not started because of it.
        assertion: The first failing assertion, on one line, with its numbers.
        place: `file:line` of it.
        error: `max_abs_err 0.5, max_row_relative_err 0.031 (1.2e-07 allowed), 12 of 640 rows off`.
        case: `shape 160x4x64, dtype float16, layout interleaved, arch gfx942`.
        merge_base: What it did there.
    """

    check: Check
    assertion: str
    place: str
    error: str
    case: str
    merge_base: str
    number: int = 1
    extent: str = ""
    others: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()

    @property
    def alike(self) -> str:
        """`36 failures look like this: every case of test_x`; empty for a failure that stands alone."""
        if self.number == 1:
            return ""
        words = f"{self.number} failures look like this, the smallest is shown"
        return f"{words}: {self.extent}" if self.extent else words


@dataclass(frozen=True)
class StepProblem:
    """A step that is not green, with a check for each cause whose smallest case is in it."""

    step: StepVerdict
    findings: tuple[CheckFinding, ...]
    more: int
    """Causes that are not shown."""
    more_checks: int
    """Checks that failed or were inconclusive for those."""
    skips: tuple[tuple[str, int], ...]
    """(reason, how many checks), of the checks that did not run."""
    merge_base: str
    """The reason of the step itself, where no check says more; empty locally where it cannot be known."""
    container: str
    """The line that repeats it in its image; empty when it ran in none."""
    steps: tuple[str, ...] = ()
    """Keys of other steps that ended alike, where no check says more."""
    waiting: tuple[str, ...] = ()
    """Keys of steps that were not started because of it, where no check says more."""


def beside(one: CheckFinding | StepProblem) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(word, keys) of the other steps that a cause shows in, and of those that were not started because of it."""
    return ("also in", one.steps), ("not started because of it", one.waiting)


def more(problem: StepProblem) -> str:
    """`and 3 more causes of 12 failures, in results.jsonl`."""
    return f"and {count(problem.more, 'more cause')} of {count(problem.more_checks, 'failure')}, in results.jsonl"


TICK_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600)
MOST_TICKS = 8


@dataclass(frozen=True)
class StepBar:
    """One step; `left` and `width` in percent of the whole time."""

    key: str
    outcome: Outcome
    left: float
    width: float
    words: str


_ERROR = re.compile(r"(?:^|_)(?:err|error|errors|diff|difference|ulps)(?:_|$)")
_NOT_FINITE = frozenset({"nan", "inf", "-inf"})  # JSON has neither, so `hilgate.evidence` keeps them as labels
_CASE = ("shape", "dtype", "layout", "kernel", "arch")
_DTYPE = re.compile(r"(?<![a-z0-9])(?:b?float\d+|fp8\w*|e[45]m[23]\w*|[bf]f?p?16|fp32|tf32|int8|uint8)(?![a-z0-9])")
_ARCH = re.compile(r"(?<![a-z0-9])gfx[0-9a-f]{3,4}(?![a-z0-9])")
_SCORE = ("exact_match", "ci_low", "ci_high", "n")


def finding(check: Check, device: str, merge_base: str = "") -> CheckFinding:
    """What is asked of one check.

    `device` is where it ran: the arch of a check that names none, where it was a GPU.
    """
    assertion = outcome.summary(check.message)
    return CheckFinding(check, assertion, place(check), error(check), case(check, device), merge_base)


def error(check: Check) -> str:
    """Errors with what was allowed, rows off, or a score beside its baseline, as recorded; empty when nothing was."""
    numbers = [name for name in check.numbers if _ERROR.search(name)]
    wild = [name for name, value in check.labels.items() if _ERROR.search(name) and value in _NOT_FINITE]
    names = [name for name in dict.fromkeys(wild + numbers) if not name.endswith("_allowed")]
    words = []
    # Absolute errors, then relative ones, then any others; what was allowed stands beside its error.
    for name in sorted(names, key=lambda name: (name not in wild, "abs" not in name, "rel" not in name)):
        value = shortest(check.numbers[name]) if name in check.numbers else check.labels[name]
        limit = check.numbers.get(f"{name}_allowed")
        words.append(f"{name} {value}" + (f" ({shortest(limit)} allowed)" if limit is not None else ""))
    if "rows_off" in check.numbers:
        of = f" of {shortest(check.numbers['rows'])}" if "rows" in check.numbers else ""
        words.append(f"{shortest(check.numbers['rows_off'])}{of} rows off")
    if all(name in check.numbers for name in _SCORE):
        score, low, high, n = (check.numbers[name] for name in _SCORE)
        before = check.numbers.get("baseline_exact_match")
        beside = "" if before is None else f", baseline {before:.1%}"
        words.append(f"exact_match {score:.1%} [{low:.1%}, {high:.1%}], n={n:g}{beside}")
    return ", ".join(words)


def case(check: Check, device: str) -> str:
    """What the check was about, in the order in which a kernel engineer asks for it."""
    parameters = check.id[check.id.index("[") :] if "[" in check.id else ""
    labels = {name: check.labels[name] for name in _CASE if check.labels.get(name)}
    if "dtype" not in labels and (found := _DTYPE.search(parameters)):
        labels["dtype"] = found[0]
    if "arch" not in labels:
        found = _ARCH.search(parameters)
        labels["arch"] = found[0] if found else "" if device == CPU else device  # the interpreter is no arch
    return ", ".join(f"{name} {labels[name]}" for name in _CASE if labels.get(name))


def shortest(number: float) -> str:
    """A number with at most four significant digits; whole numbers as they are."""
    return str(number) if isinstance(number, int) else f"{number:.4g}"


IMAGES_VARIABLE = "HILGATE_IMAGES"
"""The repository that images are pulled from; a report names none, so that it can be shown to anybody."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_WORKSPACE = "/hilgate/workspace"


def container_line(verdict: StepVerdict, step: PlannedStep, python_path: tuple[str, ...]) -> str:
    """`docker run ... <image>@<digest> python3 -m hilgate run ...`; empty when the step ran in no image.

    As the agents run it, but with all GPUs of this machine and without memory limits. `/dev/kfd` and the render nodes
    belong to groups whose numbers are the host's own, so the line asks the host.
    """
    if not _DIGEST.fullmatch(verdict.image):
        return ""
    image = f'"${IMAGES_VARIABLE}/{step.image}@{verdict.image}"' if step.image else verdict.image
    gpus = ["--device=/dev/kfd", "--device=/dev/dri", '--group-add="$(stat -c %g /dev/kfd)"', "--shm-size=16g"]
    return " ".join(
        [
            *("docker run --rm --init", *(gpus if step.gpus else ())),
            *('--user="$(id -u):$(id -g)"', "--cap-drop=ALL", "--security-opt=no-new-privileges"),
            *(() if step.step.network else ("--network=none",)),
            *("--env=HOME=/tmp", f"--env=PYTHONPATH={':'.join(python_path)}", f'--volume="$PWD:{_WORKSPACE}"'),
            *(f"--workdir={_WORKSPACE}", "--entrypoint=", image, f"python3 -m {verdict.reproduce}"),
        ]
    )


RULINGS: dict[Ruling, str] = {
    Ruling.PASS: "it ran, and every check passed",
    Ruling.REGRESSION: "it ran, and a check failed",
    Ruling.UNFINISHED: "it did not finish, and nothing says that the machine is at fault",
    Ruling.INFRA: "the node, the agent, the network or the image; nothing was learned about the change",
    Ruling.NOT_STARTED: "a step that it needs did not pass; nothing was learned about it",
    Ruling.FLAKY: "a check failed and then passed over the same files, which is not a pass",
    Ruling.QUARANTINED: "only checks failed that the merge base has in quarantine",
    Ruling.INCONCLUSIVE: "the evidence is too thin to tell",
}
"""What each ruling tells the author of a change."""

COUNTED: dict[Ruling, str] = {
    Ruling.REGRESSION: "regressed",
    Ruling.INFRA: "stopped by the machine",
    Ruling.QUARANTINED: "in quarantine",
}
"""How steps of a ruling are counted (`3 steps regressed`), where its own word is no such end of a sentence."""


HEADLINE = 200
"""Characters of what decided; the paragraph of its step has the rest."""


def whole_gate() -> str:
    """The command that runs every step, as the reader starts the gate: `make gate` says how in HILGATE_GATE."""
    return f"{os.environ.get('HILGATE_GATE', 'hilgate gate ')}--all"


def ruled(step: StepVerdict) -> str:
    """`✗ fail: regression`; the ruling is left out where it says the same as the outcome."""
    ruling = "" if step.ruling.value == step.outcome.value else f": {step.ruling.value}"
    return f"{marked(step.outcome)}{ruling}{' (only reported)' if step.report_only else ''}"


def not_green(verdict: Verdict) -> tuple[StepVerdict, ...]:
    """What is not a pass: what counts first, the worst first, otherwise in the order of the plan."""
    steps = [step for step in verdict.steps if step.outcome is not Outcome.PASS]
    return tuple(sorted(steps, key=lambda step: (step.report_only, -SEVERITY[step.outcome])))
