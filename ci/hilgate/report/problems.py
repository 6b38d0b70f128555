# SPDX-License-Identifier: Apache-2.0
"""What the first screen says of a verdict: for each step that is not green what broke, by how much, and whether before.

Tests record numbers and labels (`record_property`), findings carry them; what a check did not record is read from the
parameters in its id, or left out. Nothing is computed here: a figure that is shown is one that was recorded.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.judge.verdict import totals
from hilgate.model.declaration import CPU
from hilgate.model.record import SEVERITY, Outcome
from hilgate.model.verdict import Ruling
from hilgate.report.merge_base import NOTHING, MergeBase, on_merge_base
from hilgate.run import outcome
from hilgate.text import count, duration, marked, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hilgate.model.plan import Plan, PlannedStep
    from hilgate.model.record import Check
    from hilgate.model.verdict import StepVerdict, Verdict
    from hilgate.run.results import Attempt, Recorded


LIMIT_BYTES = 1024 * 1024
"""Buildkite refuses larger annotations; a report of that size is still a mailable file."""

NAMED_IDS, EVIDENCE_LINES = 20, 12
"""Of flaky and quarantined checks of one step; the others are counted. Of the evidence of one step."""


@dataclass(frozen=True)
class Detail:
    """How much is shown, so that a build with thousands of failures still fits."""

    failures_per_step: int
    message_characters: int
    table_rows: int


DETAILS = (Detail(20, 4000, 500), Detail(8, 1500, 150), Detail(3, 500, 30), Detail(1, 200, 0))
"""Tried in order until the report fits; what is left out is counted and stays in the results folder."""


def fit(render: Callable[[Detail], str]) -> str:
    """The most detailed text below `LIMIT_BYTES`."""
    text = ""
    for detail in DETAILS:
        text = render(detail)
        if len(text.encode()) < LIMIT_BYTES:
            return text
    raise AssertionError(f"a report of {len(text)} characters at the least detail")


def at_most(lines: Sequence[str], limit: int) -> list[str]:
    """The first lines, and how many there are more."""
    more = len(lines) - limit
    return [*lines[:limit], *([f"and {more} more in verdict.json"] if more > 0 else [])]


@dataclass(frozen=True)
class CheckFinding:
    """One check that is not green: what an engineer asks first of it; empty where it was not recorded.

    Attributes:
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


@dataclass(frozen=True)
class StepProblem:
    """A step that is not green, with the checks that say so."""

    step: StepVerdict
    findings: tuple[CheckFinding, ...]
    more: int
    """Checks that failed or were inconclusive and are not shown."""
    skips: tuple[tuple[str, int], ...]
    """(reason, how many checks), of the checks that did not run."""
    merge_base: str
    """Of the step itself, where no check says more; empty locally where nobody can know."""
    container: str
    """The line that repeats it in its image; empty when it ran in none."""


@dataclass(frozen=True)
class Named:
    """Checks that somebody must look after although they may not have stopped anything."""

    step: str
    kind: str
    what: str
    ids: tuple[str, ...]


def problems(
    plan: Plan, recorded: Recorded, verdict: Verdict, *, limit: int, facts: MergeBase = NOTHING
) -> tuple[StepProblem, ...]:
    """Every step that is not green, worst first; a step that passed with skips is green and not here."""
    planned = {step.key: step for step in plan.steps}
    return tuple(
        _problem(plan, planned[step.key], step, recorded.last(step.key), limit, facts) for step in not_green(verdict)
    )


def _problem(
    plan: Plan, planned: PlannedStep, step: StepVerdict, attempt: Attempt | None, limit: int, facts: MergeBase
) -> StepProblem:
    local = plan.local
    checks = attempt.checks if attempt else ()
    wrong = [check for check in checks if check.outcome in {Outcome.FAIL, Outcome.INCONCLUSIVE}]
    wrong.sort(key=lambda check: -SEVERITY[check.outcome])
    skipped = [check for check in checks if check.outcome is Outcome.DID_NOT_RUN]
    reasons = Counter(shorten(outcome.first_line(check.message), 300) for check in skipped)
    return StepProblem(
        step,
        tuple(
            finding(one, planned.device, on_merge_base(facts, step.key, one.id, local=local)) for one in wrong[:limit]
        ),
        max(0, len(wrong) - limit),
        tuple(reasons.most_common(limit)),
        on_merge_base(facts, step.key, local=local),
        container_line(step, planned, plan.python_path),
    )


PASSED_BUT = "passed_but"
"""The label of a check that passes and does not prove all it is for."""


def named(verdict: Verdict, recorded: Recorded) -> tuple[Named, ...]:
    """Flaky and quarantined checks, unexpected passes and passes with a reservation, of every step, green ones too."""
    kinds = (
        ("flaky", "failed and then passed over the same files: not a pass", "flaky"),
        ("quarantined", "failed in quarantine: an owner has promised to mend it", "quarantined"),
        ("unexpected pass", "in quarantine and passed: remove the entry from ci/quarantine.yaml", "unexpected_passes"),
    )
    return tuple(
        Named(step.key, kind, what, ids)
        for step in verdict.steps
        for kind, what, attribute in kinds
        if (ids := getattr(step, attribute))
    ) + tuple(
        Named(step.key, "passed, but", "a pass that does not prove all it is for", notes)
        for step in verdict.steps
        if (notes := _reservations(recorded.last(step.key)))
    )


def _reservations(attempt: Attempt | None) -> tuple[str, ...]:
    return tuple(
        f"{check.id}: {check.labels[PASSED_BUT]}"
        for check in (attempt.checks if attempt else ())
        if check.outcome is Outcome.PASS and check.labels.get(PASSED_BUT)
    )


def approval(verdict: Verdict) -> str:
    """Who must approve, or has approved, what the change makes of its own gate; empty when it leaves it alone."""
    if not verdict.loosened:
        return ""
    if verdict.approved_by:
        return f"approved by {verdict.approved_by}"
    return "needs a named approval by somebody of the gate's owners who did not start this build"


_ERROR = re.compile(r"(?:^|_)(?:err|error|errors|diff|difference|ulps)(?:_|$)")
_NOT_FINITE = frozenset({"nan", "inf", "-inf"})  # JSON has neither, so `hilgate.evidence` keeps them as labels
_CASE = ("shape", "dtype", "layout", "kernel", "arch")
_DTYPE = re.compile(r"(?<![a-z0-9])(?:b?float\d+|fp8\w*|e[45]m[23]\w*|[bf]f?p?16|fp32|tf32|int8|uint8)(?![a-z0-9])")
_ARCH = re.compile(r"(?<![a-z0-9])gfx[0-9a-f]{3,4}(?![a-z0-9])")
_PLACE = re.compile(r"(\S+\.py:\d+): \S+( \(\S+\))?")
_SCORE = ("exact_match", "ci_low", "ci_high", "n")


def finding(check: Check, device: str, merge_base: str = "") -> CheckFinding:
    """What is asked of one check.

    `device` is where it ran: the arch of a check that names none, where it was a GPU.
    """
    assertion = outcome.summary(check.message)
    return CheckFinding(check, assertion, place(check), error(check), case(check, device), merge_base)


def place(check: Check) -> str:
    """`file:line` where a test failed, and the helper's: the last line of its message (`hilgate.evidence`)."""
    last = check.message.splitlines()[-1:]
    found = _PLACE.fullmatch(last[0].strip()) if last else None
    return found[1] + (found[2] or "") if found else ""


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
    known = {name: check.labels[name] for name in _CASE if check.labels.get(name)}
    if "dtype" not in known and (found := _DTYPE.search(parameters)):
        known["dtype"] = found[0]
    if "arch" not in known:
        found = _ARCH.search(parameters)
        known["arch"] = found[0] if found else "" if device == CPU else device  # the interpreter is no arch
    return ", ".join(f"{name} {known[name]}" for name in _CASE if known.get(name))


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
    Ruling.PASS: "it did its work and found nothing wrong",
    Ruling.REGRESSION: "it did its work and what it checks is wrong",
    Ruling.UNFINISHED: "it did not do its work, and nothing says that the machine is at fault",
    Ruling.INFRA: "the node, the agent, the network or the image; nothing was learned about the change",
    Ruling.NOT_STARTED: "another step stood in its way; nothing was learned about it",
    Ruling.FLAKY: "a check failed and then passed over the same files, which is not a pass",
    Ruling.QUARANTINED: "nothing but failures that the merge base has in quarantine",
    Ruling.INCONCLUSIVE: "the evidence is too thin to tell",
}
"""What each ruling tells the author of a change."""

COUNTED: dict[Ruling, str] = {
    Ruling.REGRESSION: "regressed",
    Ruling.INFRA: "stopped by the machine",
    Ruling.QUARANTINED: "in quarantine",
}
"""How steps of a ruling are counted (`3 steps regressed`), where its own word is no such end of a sentence."""


def headline(plan: Plan, verdict: Verdict, recorded: Recorded) -> str:
    """`41 passed, 1 failed, 12 not run; units-cpu: timed out after 600 s`: the checks of all steps, and what decided.

    Of a pass, why its first check was skipped; of a run of subsets that passed, how little of the whole it was, and how
    to run that.
    """
    if verdict.outcome is Outcome.PASS and plan.promised:
        return f"{verdict.why}; `{gate_command('--all')}` runs everything"
    return f"{'smoke: ' if plan.profile == 'smoke' else ''}{_counted(verdict, recorded)}"


HEADLINE = 200
"""Characters of what decided; the paragraph of its step has the rest."""


def gate_command(options: str) -> str:
    """How whoever reads this started the gate, with these options: `make gate` says so in HILGATE_GATE."""
    return f"{os.environ.get('HILGATE_GATE', 'hilgate gate ')}{options}"


def _counted(verdict: Verdict, recorded: Recorded) -> str:
    if verdict.outcome is not Outcome.PASS:
        why = verdict.why
        for step in verdict.steps:
            attempt = recorded.last(step.key) if why.startswith(f"{step.key}: ") else None
            if attempt and (check := outcome.first(attempt.checks, verdict.outcome)):
                why = why.replace(f"{check.id}: ", "", 1)  # an id can be longer than all else; it stands below
        return f"{totals(verdict)}; {why if len(why) <= HEADLINE else f'{why[:HEADLINE]}…'}"
    for step in verdict.steps:
        attempt = recorded.last(step.key)
        check = outcome.first(attempt.checks, Outcome.DID_NOT_RUN) if attempt else None
        if check:
            return f"{totals(verdict)} ({outcome.first_line(check.message)})"
    return str(totals(verdict))


def step_counts(verdict: Verdict) -> str:
    """`2 of 4 steps passed, 2 steps regressed, 1 step stopped by the machine, 3 not selected`."""
    passed = sum(step.outcome is Outcome.PASS for step in verdict.steps)
    words = [f"{passed} of {count(len(verdict.steps), 'step')} passed"]
    rulings = [step.ruling for step in not_green(verdict)]
    words += [
        f"{count(rulings.count(ruling), 'step')} {COUNTED.get(ruling, ruling.value)}"
        for ruling in dict.fromkeys(rulings)
    ]
    words += [f"{len(verdict.omissions)} not selected"] if verdict.omissions else []
    if reused := [step for step in verdict.steps if step.reused]:
        checks, of = (sum((one.counts.passed for one in steps), 0) for steps in (reused, verdict.steps))
        words.append(f"{count(len(reused), 'step')} reused ({checks:,} of {of:,} checks)")
    return ", ".join(words)


def time_of(step: StepVerdict, at: str = "%d %b %H:%M") -> str:
    """How long it took, or when it ran where an earlier pass stands for it: `reused, 21 Nov 14:02` (local time)."""
    return f"reused, {step.reused.astimezone():{at}}" if step.reused else duration(step.seconds)


def ruled(step: StepVerdict) -> str:
    """`✗ fail: regression`; the ruling is left out where it says the same as the outcome."""
    return marked(step.outcome) + ("" if step.ruling.value == step.outcome.value else f": {step.ruling.value}")


def not_green(verdict: Verdict) -> tuple[StepVerdict, ...]:
    """What is not a pass, worst first, otherwise in the order of the plan."""
    steps = [step for step in verdict.steps if step.outcome is not Outcome.PASS]
    return tuple(sorted(steps, key=lambda step: -SEVERITY[step.outcome]))
