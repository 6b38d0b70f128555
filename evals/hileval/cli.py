# SPDX-License-Identifier: Apache-2.0
"""Judge the accuracy of models: run gates against stored baselines, compare stored runs, record baselines.

`gate` writes `findings.jsonl` (one check per line) and `samples.jsonl` (one answer per line) into the output folder.
Its exit status is that of the worst check.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, get_args

import typer
from pydantic import Field
from rich.console import Console

from hileval import statistics
from hileval.ask.evaluation import read_evaluation
from hileval.ask.loop import Heading, Journal, RecordedRuns, ask_until_decided, questions_of
from hileval.ask.recording import JOURNALS, fingerprint, recorded_path
from hileval.command import stderr
from hileval.engines import EngineError
from hileval.gates.analysis import YEAR, alarms, compare, judge_nights, read_findings, read_nights, render
from hileval.gates.declare import EngineName, Occasion, load_gates
from hileval.gates.drift import judge_sides, run_drift
from hileval.gates.foreign import as_yaml, read_foreign
from hileval.gates.judge import check_backend, diff_answers, judge, side_by_side
from hileval.gates.power import STRESS, Noise, Power, simulate, smallest_drop
from hileval.gates.resolve import ResolvedDrift, find_gate, resolve
from hileval.gates.steps import AREA, area_of
from hileval.records.baseline import Baseline, make_baseline
from hileval.records.records import Filter  # noqa: TC001 - typer evaluates the annotations
from hilgate.errors import Exit, HilgateError, MisuseError, NothingSelectedError, RecordsError
from hilgate.model.record import EXIT_STATUS, Check, Outcome, worst

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hileval.gates.declare import Gate, Gates
    from hileval.gates.resolve import ResolvedGate
    from hileval.gates.rule import GateRule


app = typer.Typer(
    no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False, rich_markup_mode=None
)
console = Console()

COLOURS = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.INCONCLUSIVE: "yellow", Outcome.DID_NOT_RUN: "yellow"}
When = Annotated[
    Occasion | None, typer.Option("--when", help="Apply the rule of this occasion (default: that of the current plan).")
]
Limit = Annotated[int | None, typer.Option(help="Ask only the first N questions. Too few make the gate inconclusive.")]
Of = Annotated[
    int,
    typer.Option(
        min=1, envvar="HILEVAL_GATES", help="Number of gates that share alpha, the probability of a false alarm."
    ),
]
Out = Annotated[Path, typer.Option(envvar="HILGATE_OUT", help="Folder for findings.jsonl and samples.jsonl.")]


@app.command("gates")
def list_gates() -> None:
    """List the declared gates."""
    for name, gate in load_gates().gates.items():
        attention = f", attention by {gate.attention_backend}" if gate.attention_backend else ""
        where = f" on {', '.join(gate.arch)}" if gate.arch else ""
        floor = "no floor" if gate.floor is None else f"floor {gate.floor:.0%}"
        typer.echo(f"{name}: {gate.title}\n  {gate.engine}{attention}{where}, {floor}")
    for name, drift in load_gates().drifts.items():
        second = f" and {drift.second}" if drift.second else ""
        typer.echo(f"{name}: drift of {drift.of}\n  beside {drift.peer}{second}, no baseline")


@app.command("steps")
def print_steps(
    write: Annotated[
        bool, typer.Option("--write", help="Write ci/areas/accuracy.yaml instead of printing it.")
    ] = False,
) -> None:
    """Print the steps that plan the gates, as ci/areas/accuracy.yaml has them."""
    text = area_of(load_gates())
    if write:
        AREA.write_text(text, encoding="utf-8")
    typer.echo(str(AREA) if write else text, nl=write)


@app.command("import")
def import_config(
    files: Annotated[list[Path], typer.Argument(help="Accuracy configurations of vLLM, in either of its formats.")],
    gpus: Annotated[int, typer.Option(min=1, help="Tensor-parallel size for files that name none.")] = 1,
) -> None:
    """Print accuracy configurations of vLLM as entries of gates.yaml."""
    for file in files:
        typer.echo(as_yaml(*read_foreign(file, gpus)), nl=False)


@app.command("gate")
def run_gate(
    name: Annotated[
        str, typer.Argument(help="Gate of evals/gates.yaml, or the file of an accuracy configuration of vLLM.")
    ],
    when: When = None,
    limit: Limit = None,
    of: Of = 1,
    engine: Annotated[
        EngineName | None,
        typer.Option(help="Use another engine than the declared one. The result is then never a pass."),
    ] = None,
    out: Out = Path("results/evals"),
) -> None:
    """Run a gate and judge it against its baseline."""
    gate = resolve(name, load_gates(), when=when, of=of, engine=engine)
    if isinstance(gate, ResolvedDrift):
        refuse_options(gate, when, limit, engine)
    with findings(gate.name, out):
        checks = run_drift(gate, out) if isinstance(gate, ResolvedDrift) else run_answers(gate, limit, out)
    report(checks, out)


def refuse_options(gate: ResolvedDrift, *options: object) -> None:
    """Refuse options that mean something to a gate on answers alone.

    Raises:
        MisuseError: One of them is given.
    """
    if any(option is not None for option in options):
        raise MisuseError(
            "a drift gate has one rule and its own sequences",
            where=gate.name,
            remedy="leave --when, --limit, --engine out",
        )


def run_answers(gate: ResolvedGate, limit: int | None, out: Path) -> list[Check]:
    """Ask the questions of a gate and judge the answers; `out` gets the answers, and what flipped.

    Raises:
        HilgateError: The declaration, the model, the engine or lm-eval stopped it; nothing was measured.
    """
    questions = questions_of(gate)
    heading = Heading.of(gate, questions.identity, fingerprint())
    journal = Journal(questions, JOURNALS / f"{gate.name}.jsonl", heading)
    if journal.resumed:
        stderr.print(f"{journal.resumed} answers of an interrupted run are kept", highlight=False)
    try:
        asked = ask_until_decided(gate, journal, ProgressPrinter(), limit)
        served = check_backend(gate, questions.engine)
        changed = gate.changes(questions.engine.name) if questions.engine is not None else ()
    finally:
        if questions.engine is not None:
            questions.engine.close()
    journal.finish()
    checks = judge(gate, asked, served, changed)
    out.mkdir(parents=True, exist_ok=True)
    samples = "".join(f"{sample.model_dump_json()}\n" for sample in asked.samples)
    (out / "samples.jsonl").write_text(samples, encoding="utf-8")
    if gate.baseline is not None:
        flips = side_by_side(diff_answers(asked, gate.baseline, gate.declared.filter), 10**6)
        (out / "flips.md").write_text(flips, encoding="utf-8")
    return checks


@app.command("judge")
def judge_again(
    name: Annotated[str, typer.Argument(help="Gate of evals/gates.yaml.")],
    folder: Annotated[Path, typer.Argument(help="Folder that `gate` wrote.")],
    when: When = None,
    limit: Limit = None,
    of: Of = 1,
) -> None:
    """Judge the stored answers of a gate again. Starts no engine and writes nothing."""
    gate = resolve(name, load_gates(), when=when, of=of)
    if isinstance(gate, ResolvedDrift):
        refuse_options(gate, when, limit)
        checks = judge_sides(gate, folder)
    else:
        asked, served = read_evaluation(folder, gate, limit)
        checks = judge(gate, asked, served)
    show(checks, folder)
    raise typer.Exit(exit_status(checks))


@app.command("trend")
def trend(
    history: Annotated[
        Path, typer.Option(envvar="HILGATE_HISTORY", help="Folder of judged builds (`hilgate history add`).")
    ] = Path("results/history"),
    out: Out = Path("results/evals"),
) -> None:
    """Report models that got worse from night to night.

    Each night may lose too little to fail a gate; the stored nights together show it.
    """
    with findings("trend", out):
        checks = judge_nights(read_nights(history))
    report(checks, out)


@app.command("compare")
def compare_runs(
    before: Annotated[
        Path,
        typer.Argument(
            help="Stored answers of the trusted run: samples.jsonl of a gate, or samples_*.jsonl of lm-eval."
        ),
    ],
    after: Annotated[Path, typer.Argument(help="Stored answers of the run to judge, in the same format.")],
    which: Annotated[Filter, typer.Option("--filter", help="Score to compare.")] = "flexible",
    margin: Annotated[
        float, typer.Option(min=0.001, max=0.5, help="Largest drop that may pass, as a share of the questions.")
    ] = 0.02,
    alpha: Annotated[float, typer.Option(min=1e-6, max=0.2, help="Probability that two equal runs fail.")] = 0.01,
) -> None:
    """Judge two stored runs of the same questions. Shows both answers of each question whose result changed."""
    check, flips = compare(before, after, which, alpha=alpha, margin=margin)
    typer.echo(f"{check.outcome.value:<12} {check.message}")
    if flips:
        typer.echo(side_by_side(flips, 10**6))
    raise typer.Exit(exit_status([check]))


@app.command("view")
def view(
    run: Annotated[
        Path,
        typer.Argument(help="Folder that `gate` wrote, or stored answers (samples.jsonl of a gate or of lm-eval)."),
    ],
    against: Annotated[
        Path | None,
        typer.Option(help="Baseline (.json) or another run to compare with (default: the baseline of the gate)."),
    ] = None,
    which: Annotated[
        Filter | None, typer.Option("--filter", help="Score to show (default: the score of the gate).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Page to write.")] = Path("results/evals/view.html"),
) -> None:
    """Write a page with the answers of a run.

    It is one static file with every question, its answer, and what changed against the baseline.
    """
    checks = read_findings(run) if run.is_dir() else []
    name = checks[0].id.partition("/")[0] if checks else ""
    gate = load_gates().gates.get(name)
    if against is None and gate is not None and gate.path(gate.baseline).is_file():
        against = gate.path(gate.baseline)
    page = render(run, against, which or (gate.filter if gate else "flexible"))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    typer.echo(str(out))


@contextlib.contextmanager
def findings(name: str, out: Path) -> Iterator[None]:
    """A folder for what a gate says and nothing else: an error leaves a finding, and what another gate left goes."""
    for stale in ("samples.jsonl", "flips.md"):
        (out / stale).unlink(missing_ok=True)
    try:
        yield
    except HilgateError as error:
        stopped = did_not_run(name, error)
        Check.write_all(out, [stopped])
        raise


def report(checks: Sequence[Check], out: Path) -> NoReturn:
    """Write and print the checks of a gate, and exit as they say."""
    Check.write_all(out, checks)
    show(checks, out)
    raise typer.Exit(exit_status(checks))


class ProgressPrinter:
    """A line per batch on stderr: how far, how right, how long still."""

    def __init__(self) -> None:
        self._began = self._before = time.monotonic()
        self._run = 0

    def asked(self, run: int, done: int, most: int, right: int) -> None:
        """See `hileval.ask.loop.Listener`."""
        if run != self._run:
            self._run, self._began = run, self._before
        self._before = time.monotonic()
        spent = self._before - self._began
        left = f", at most {spent / done * (most - done):.0f} s more" if done < most else ""
        stderr.print(f"run {run + 1}: {done}/{most} asked, {right} right, {spent:.0f} s{left}", highlight=False)


def did_not_run(name: str, error: HilgateError) -> Check:
    """The finding of a gate that was stopped by an error: it says so instead of being absent."""
    message = "; ".join(str(error).splitlines())
    return Check(
        id=f"{name}/accuracy", outcome=Outcome.DID_NOT_RUN, message=message, labels={"error": type(error).__name__}
    )


def exit_status(checks: Sequence[Check]) -> Exit:
    """One status for all checks: a failure outranks a missing result, which outranks an inconclusive one.

    Raises:
        NothingSelectedError: there is no check at all.
    """
    if not checks:
        raise NothingSelectedError("a gate without checks", remedy="this is a bug in hileval")
    return EXIT_STATUS[worst(check.outcome for check in checks)]


def show(checks: Sequence[Check], out: Path) -> None:
    """Print one line per check."""
    for check in checks:
        colour = COLOURS[check.outcome]
        console.print(f"[{colour}]{check.outcome.value:<12}[/] {check.id}: ", end="", highlight=False)
        console.print(check.message, markup=False, highlight=False, soft_wrap=True)
    written = [*sorted(out.glob("*.jsonl")), *sorted(out.glob("*.json.gz"))]
    console.print(", ".join(map(str, written)) or f"nothing in {out}", highlight=False, soft_wrap=True)


baseline_app = typer.Typer(
    no_args_is_help=True,
    help="Record, show and accept baselines.",
    rich_markup_mode=None,
)
app.add_typer(baseline_app, name="baseline")
Trusted = Annotated[
    str,
    typer.Option(
        "--attention-backend", help="Trusted attention backend by vLLM's name; `vllm` means vLLM's own choice."
    ),
]
Alternative = Annotated[EngineName | None, typer.Option("--engine", help="Engine for models that vLLM cannot serve.")]
Name = Annotated[str, typer.Argument(help="Gate of evals/gates.yaml.")]


@baseline_app.command("record")
def record(
    name: Name,
    reason: Annotated[str, typer.Option(help="Why the baseline is recorded. Reviewers read it there.")],
    runs: Annotated[int, typer.Option(min=1, help="K: number of times that all questions are asked.")] = 5,
    attention_backend: Trusted = "vllm",
    second: Annotated[
        str | None, typer.Option(help="Second trusted attention backend by vLLM's name. The last run uses it.")
    ] = None,
    engine: Alternative = None,
) -> None:
    """Ask all questions of a gate K times on a trusted attention backend, and write a proposal.

    Each run has its own process, order and batches: K runs of one process would only repeat one run. Finished runs and
    answers are kept, so the same command continues after a crash. Where the weights are drawn, the answer key is made
    first, on the same attention backend.
    """
    gate = find_gate(name, load_gates())
    if gate.weights == "drawn":
        part("the key", "key", name, "--attention-backend", attention_backend)
    if second is not None and runs < 2:
        raise MisuseError("--second is the last of several runs", where=name, remedy="record at least two")
    recorded = []
    for number in range(runs):
        backend = second if second is not None and number == runs - 1 else attention_backend
        options = [] if engine is None else ["--engine", engine]
        words = ("run", name, "--number", str(number), "--attention-backend", backend, *options)
        part(f"run {number + 1} of {runs}", *words)
        recorded.append(RecordedRuns.model_validate_json(recorded_path(name, number).read_bytes()))
        share = f"{recorded[-1].run.correct(gate.filter)}/{len(recorded[-1].run.samples)}"
        typer.echo(f"run {number + 1} of {runs}: {share} right on {recorded[-1].setting.attention_backend}", err=True)
    backends = ", ".join(dict.fromkeys(one.setting.attention_backend for one in recorded))
    baseline = make_baseline(
        name,
        [one.run for one in recorded],
        floor=gate.floor or 0.0,
        which=gate.filter,
        setting=recorded[0].setting.model_copy(update={"attention_backend": backends}),
        environment=recorded[0].environment,
        reason=reason,
    )
    path = proposal_path(gate)
    baseline.write(path)
    for number in range(runs):
        recorded_path(name, number).unlink()
    typer.echo(
        f"{path}\n{summary(baseline, gate)}\nlook at it (baseline show {name}), then: baseline accept {name} --by NAME"
    )


def part(what: str, command: str, name: str, *options: str) -> None:
    """Have a part of a recording done in a process of its own (`python -m hileval.ask`).

    Raises:
        EngineError: It ended without its answer.
    """
    words = [sys.executable, "-m", "hileval.ask", command, name, *options]
    if status := subprocess.run(words, check=False).returncode:
        raise EngineError(
            f"{what} ended with status {status}",
            where=name,
            remedy="read what it says above, then repeat the command: what is finished is kept",
        )


@baseline_app.command("accept")
def accept(
    name: Name, by: Annotated[str, typer.Option(help="Person who reviewed the proposal and answers for it.")]
) -> None:
    """Accept the proposal as the baseline."""
    gate = find_gate(name, load_gates())
    if not by.strip():
        raise MisuseError("--by is empty", where=name, remedy="name a person or a team that can be asked")
    path = proposal_path(gate)
    accepted = Baseline.read(path).model_copy(update={"accepted_by": by.strip()})
    accepted.write(gate.path(gate.baseline))
    path.unlink()
    typer.echo(f"{gate.path(gate.baseline)}\n{summary(accepted, gate)}")


@baseline_app.command("show")
def show_baseline(name: Name) -> None:
    """Show the baseline of a gate, and what its proposal changes if there is one."""
    gate = find_gate(name, load_gates())
    path, proposal = gate.path(gate.baseline), proposal_path(gate)
    if proposal.is_file() and not path.exists():
        typer.echo(f"no baseline yet; proposed  {summary(Baseline.read(proposal), gate)}")
        return
    baseline = Baseline.read(path)
    where = baseline.environment
    typer.echo(summary(baseline, gate))
    typer.echo(f"recorded {baseline.recorded}: {baseline.reason}; accepted by {baseline.accepted_by}")
    typer.echo(f"on {baseline.setting.engine}, {baseline.setting.attention_backend}, {where.device}")
    for field, value in baseline.identity.model_dump().items():
        typer.echo(f"  {field:<14} {value!s:.64}")
    if proposal.is_file():
        show_proposal(name, gate, baseline, Baseline.read(proposal))


def show_proposal(name: str, gate: Gate, now: Baseline, proposed: Baseline) -> None:
    """Print what a proposal changes: identity, setting, exact match and single questions."""
    for line in proposed.identity.differences(now.identity):
        typer.echo(f"identity: {line}")
    for line in proposed.setting.differences(now.setting):
        typer.echo(f"setting: {line}")
    typer.echo(f"now       {summary(now, gate)}\nproposed  {summary(proposed, gate)}")
    hashes = {question.doc_hash: question for question in now.questions}
    both = [question.doc_hash for question in proposed.questions if question.doc_hash in hashes]
    if not both:
        raise RecordsError("the two share no question", where=name, remedy="they are of different tasks")
    if len(both) < max(now.n, proposed.n):
        typer.echo(f"{len(both)} questions are in both")
    before, after = now.outcomes(gate.filter, both), proposed.outcomes(gate.filter, both)
    changed = abs(after.mean(axis=0) - before.mean(axis=0)) >= 0.5
    typer.echo(f"{int(changed.sum())} questions flip; p of no drop {statistics.drop_p(before, after):.3g}")
    for one in (h for h, flipped in zip(both, changed, strict=True) if flipped):
        old = hashes[one]
        typer.echo(f"  question {old.doc_id}: was {getattr(old, gate.filter)}")


def proposal_path(gate: Gate) -> Path:
    """Where a recorded baseline waits to be accepted."""
    path = gate.path(gate.baseline)
    return path.with_name(path.stem + ".proposed.json")


def summary(baseline: Baseline, gate: Gate) -> str:
    """Exact match under the gated filter with its interval, K, how many of them differ, n and d on one line."""
    right = baseline.outcomes(gate.filter)
    low, high = statistics.interval(int(right.sum()), right.size, 0.01)
    found = baseline.d(gate.filter)
    d = "" if found is None else f", d = {found:.2%}"
    runs = f"{baseline.runs} runs ({baseline.distinct(gate.filter)} distinct) of {baseline.n} questions{d}"
    return f"{right.mean():.2%} [{low:.2%}, {high:.2%}] in {runs}"


DROPS = (0.0, 0.02, 0.03, 0.05, 0.10)
GSM8K_QUESTIONS = 1319
"""Of the test set, for models without a baseline of their own."""


class PowerRow(Power):
    """One rule under one true drop."""

    gate: str
    rule: str
    noise: Noise
    baseline_runs: int
    gates: int
    """How many decide together."""
    drop: float
    replays: int
    smallest_drop: float = Field(ge=0)
    """That one look at all questions of the rule fails 9 times in 10 (`power.smallest_drop`)."""


@app.command("power")
def print_power(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[GATE]...", help="Gates to simulate (default: all).")
    ] = None,
    replays: Annotated[int, typer.Option(min=10, help="Number of simulated merges behind each number.")] = 1000,
    d: Annotated[
        float | None,
        typer.Option(
            min=0, max=0.5, help="Share of questions that runs answer differently (default: d of the baseline)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the simulation.")] = 1,
    of: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of gates that share alpha (default: as in CI, the gates of models from a hub)."
        ),
    ] = None,
    stress: Annotated[
        bool,
        typer.Option(help="Also simulate stored runs that share their noise, and answers that change from run to run."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show how often each rule notices a drop, by simulation.

    Prints how many merges a rule fails, passes or leaves undecided, and how many answers it needs.
    """
    declared = load_gates()
    rows: list[PowerRow] = []
    if stress:
        rows = [row for when in get_args(Occasion) for row in stress_rows(when, declared.rules[when], replays, seed)]
    for name in () if stress else names or declared.gates:
        rows += power_of_gate(name, declared, named=bool(names), d=d, replays=replays, seed=seed, of=of)
    if as_json:
        typer.echo(json.dumps([row.model_dump() for row in rows], indent=1))
        return
    heads: set[str] = set()
    for row in rows:
        noise = row.noise
        head = f"{row.gate}, {row.rule}: accuracy {noise.accuracy:.1%}, K = {row.baseline_runs}, 1 of {row.gates}" + (
            "" if stress else f", d {noise.d:.1%}; one look sees {100 * row.smallest_drop:.1f} points"
        )
        if head not in heads:
            heads.add(head)
            typer.echo(f"{head}\n     d   rho  churn  true drop    fail    pass  undecided  answers")
        typer.echo(
            f"{noise.d:>6.1%}{noise.rho:>6.1f}{noise.churn:>7.1%}{row.drop:>11.0%}{row.failed:>8.1%}"
            f"{row.passed:>8.1%}{row.undecided:>11.1%}{row.questions:>9.0f}"
        )
    if stress:
        print_trend(replays, seed)


def power_of_gate(
    name: str, declared: Gates, *, named: bool, d: float | None, replays: int, seed: int, of: int | None
) -> list[PowerRow]:
    """The rows of one gate, and on stderr what could not be said; one without a baseline stops it only if `named`."""
    gate = find_gate(name, declared)
    rows: list[PowerRow] = []
    for when in gate.rules:
        if not named and d is None and not gate.path(gate.baseline).exists():
            typer.echo(f"{name}, {when}: no baseline says how noisy it is; name a --d to assume", err=True)
            continue
        found = power_of_rule(name, gate, when, declared, d=d, replays=replays, seed=seed, of=of)
        if not found:
            typer.echo(f"{name}, {when}: no baseline, published figure or floor to start from", err=True)
        if found and d is not None and found[0].noise.d < d:
            most = found[0].noise
            typer.echo(
                f"{name}, {when}: d {d:.1%} cannot be at an accuracy of {most.accuracy:.1%}; {most.d:.1%} is used",
                err=True,
            )
        rows += found
    return rows


def print_trend(replays: int, seed: int) -> None:
    """How often a trend of nights of all questions alarms: of an unchanged model, and of half a point less a night."""
    typer.echo(
        "trend: alarms in a year unchanged; after 30 nights, in 10 of -0.5 points, in 20, in 10 of -1, in 10 of -0.5 "
        "more each; in 30 nights after a change of rounding of 0.5, 1 and 3 % lost and gained"
    )
    replayed = functools.partial(alarms, n=GSM8K_QUESTIONS, replays=replays, seed=seed)
    for d in (0.005, 0.01, 0.02, 0.04, 0.08):
        still = replayed(d, good=0, nights=YEAR)
        low = [replayed(d, shift=0.005, good=30, nights=nights) for nights in (10, 20)]
        lower = replayed(d, shift=0.01, good=30, nights=10)
        falling = replayed(d, ramp=0.005, good=30, nights=10)
        other = [replayed(d, rounding=share, good=30, nights=30) for share in (0.005, 0.01, 0.03)]
        typer.echo(f"{d:>6.1%}" + "".join(f"{share:>8.1%}" for share in (still, *low, lower, falling, *other)))


def stress_rows(when: str, rule: GateRule, replays: int, seed: int) -> list[PowerRow]:
    """A rule with no drop and with one of its margin, in every cell of `power.STRESS`."""
    return [
        _row(rule, GSM8K_QUESTIONS, noise, gate="any model", when=when, drop=drop, runs=5, replays=replays, seed=seed)
        for noise in STRESS
        for drop in (0.0, rule.margin)
    ]


def _row(
    rule: GateRule,
    n: int,
    noise: Noise,
    *,
    gate: str,
    when: str,
    drop: float,
    runs: int,
    replays: int,
    seed: int,
    of: int = 1,
) -> PowerRow:
    last = rule.plan(n)[-1]
    new_runs = rule.noisy_runs if rule.noisy_d is not None and noise.d > rule.noisy_d else 1
    power = simulate(rule.shared(of), n, noise, drop=drop, base_runs=runs, replays=replays, seed=seed)
    return PowerRow(
        **power.model_dump(),
        gate=gate,
        rule=when,
        noise=noise,
        baseline_runs=runs,
        gates=of,
        drop=drop,
        replays=replays,
        smallest_drop=smallest_drop(last, runs, new_runs, noise.d, rule.alpha / of, 0.9),
    )


def power_of_rule(
    name: str, gate: Gate, when: Occasion, declared: Gates, *, d: float | None, replays: int, seed: int, of: int | None
) -> list[PowerRow]:
    """The rows of one gate and rule: from its baseline's own accuracy and noise, else from the published figure.

    No rows where there is neither a baseline nor a figure nor a floor.

    Raises:
        RecordsError: There is no baseline, and no d was given.
    """
    rule = declared.rules[gate.rule_at(when)]
    try:
        baseline = Baseline.read(gate.path(gate.baseline))
    except RecordsError:
        if d is None:
            raise
        known = gate.published[0].value if gate.published else gate.floor
        if known is None:
            return []
        accuracy, noise, runs, n = known, d, rule.baseline_runs, GSM8K_QUESTIONS
    else:
        accuracy = min(float(baseline.outcomes(gate.filter).mean()), 1 - 0.5 / baseline.n)
        noise, runs, n = (baseline.d(gate.filter) or 0.0) if d is None else d, baseline.runs, baseline.n
    assumed = Noise(accuracy=accuracy, d=min(noise, accuracy, 1 - accuracy), rho=float(gate.deterministic))
    of = of or (declared.deciding_together if gate.weights == "hub" else 1)
    return [
        _row(rule, n, assumed, gate=name, when=when, drop=drop, runs=runs, replays=replays, seed=seed, of=of)
        for drop in DROPS
    ]
