# SPDX-License-Identifier: Apache-2.0
"""Judge the accuracy of models: run gates against stored baselines, compare stored runs, record baselines.

`gate` writes `findings.jsonl` (one check per line) and `samples.jsonl` (one answer per line) into the output folder.
Its exit status is that of the worst check.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hileval import compare, statistics
from hileval.ask.loop import ask, in_its_own_process
from hileval.ask.recording import recorded_path
from hileval.errors import RunsError
from hileval.gates.declare import EngineName, Occasion, load_gates
from hileval.gates.judge import FLIPPED, judge
from hileval.gates.resolve import find_gate, resolve
from hileval.gates.steps import areas_of
from hileval.records.answers import FLIPS_FILE, RecordedRun
from hileval.records.baseline import Baseline, make_baseline
from hilgate.errors import Exit, HilgateError, MisuseError, NothingSelectedError, RecordsError
from hilgate.model.record import EXIT_STATUS, Check, Outcome, worst

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hileval.gates.declare import Gate, Gates


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help=__doc__,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()

COLOURS = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.INCONCLUSIVE: "yellow", Outcome.DID_NOT_RUN: "yellow"}
Name = Annotated[str, typer.Argument(help="Gate of evals/gates.yaml.")]
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


@app.command("gate")
def run_gate(
    name: Name,
    when: When = None,
    limit: Limit = None,
    of: Of = 1,
    judge_only: Annotated[
        bool,
        typer.Option("--judge-only", help="Judge the answers in the folder again. Starts no engine, writes nothing."),
    ] = False,
    out: Out = Path("results/evals"),
) -> None:
    """Run a gate and judge it against its baseline."""
    gate = resolve(name, load_gates(), when=when, of=of, limit=limit)
    try:
        if not judge_only:
            ask(gate, out)
        checks, flips = judge(gate, out)
    except (HilgateError, RunsError) as error:
        if not judge_only:
            message, labels = "; ".join(str(error).splitlines()), {"error": type(error).__name__}
            stopped = Check(id=f"{name}/accuracy", outcome=Outcome.DID_NOT_RUN, message=message, labels=labels)
            Check.write_all(out, [stopped])
        raise
    if not judge_only:
        Check.write_all(out, checks)
        if flips:
            (out / FLIPS_FILE).write_text(f"{flips}\n", encoding="utf-8", errors="backslashreplace")
    show(checks, out)
    raise typer.Exit(exit_status(checks))


@app.command("compare", context_settings={"ignore_unknown_options": True, "help_option_names": []})
def compare_runs(arguments: Annotated[list[str], typer.Argument(metavar="BEFORE AFTER")]) -> None:
    """Judge two stored runs of the same questions."""
    raise typer.Exit(compare.main(arguments))


def exit_status(checks: Sequence[Check]) -> Exit:
    """One status for all checks: a failure outranks a missing result, which outranks an inconclusive one.

    Raises:
        NothingSelectedError: there is no check at all.
    """
    if not checks:
        raise NothingSelectedError("a gate without checks", remedy="report it with this line: it is a bug in hileval")
    return EXIT_STATUS[worst(check.outcome for check in checks)]


def show(checks: Sequence[Check], out: Path) -> None:
    """Print one line per check."""
    for check in checks:
        colour = COLOURS[check.outcome]
        console.print(f"[{colour}]{check.outcome.value:<12}[/] {check.id}: ", end="", highlight=False)
        console.print(check.message, markup=False, highlight=False, soft_wrap=True)
    written = [*sorted(out.glob("*.jsonl")), *sorted(out.glob("*.json.gz"))]
    console.print(", ".join(map(str, written)) or f"nothing in {out}", highlight=False, soft_wrap=True)


Trusted = Annotated[
    str,
    typer.Option(
        "--attention-backend", help="Trusted attention backend by vLLM's name; `vllm` means vLLM's own choice."
    ),
]
Alternative = Annotated[EngineName | None, typer.Option("--engine", help="Engine for models that vLLM cannot serve.")]


@app.command("record")
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
    """Record a proposed baseline on a trusted backend.

    All questions of the gate are asked K times.

    Each run has its own process, order and batches: K runs of one process would only repeat one run. Finished runs and
    answers are kept, so the same command continues after a crash.
    """
    gate = find_gate(name, load_gates())
    if second is not None and runs < 2:
        raise MisuseError("--second is the last of several runs", where=name, remedy="record at least two")
    recorded = []
    for number in range(runs):
        backend = second if second is not None and number == runs - 1 else attention_backend
        options = [] if engine is None else ["--engine", engine]
        words = ("run", name, "--number", str(number), "--attention-backend", backend, *options)
        in_its_own_process(f"run {number + 1} of {runs}", *words)
        recorded.append(RecordedRun.model_validate_json(recorded_path(name, number).read_bytes()))
        share = f"{recorded[-1].run.correct(gate.filter)}/{len(recorded[-1].run.samples)}"
        typer.echo(f"run {number + 1} of {runs}: {share} right on {recorded[-1].setting.attention_backend}", err=True)
    backends = ", ".join(dict.fromkeys(each.setting.attention_backend for each in recorded))
    baseline = make_baseline(
        name,
        [each.run for each in recorded],
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
    typer.echo(str(path))
    show_proposal(name, gate, baseline)
    typer.echo(f"review it, then: hileval accept {name} --by NAME")


@app.command("accept")
def accept(
    name: Name,
    by: Annotated[
        str | None,
        typer.Option(help="Person who reviewed the proposal and answers for it (default: show it and change nothing)."),
    ] = None,
) -> None:
    """Show what a proposal changes; --by accepts it."""
    gate = find_gate(name, load_gates())
    if by is not None and not by.strip():
        raise MisuseError("--by is empty", where=name, remedy="name a person or a team that can be asked")
    proposal = Baseline.read(proposal_path(gate))
    show_proposal(name, gate, proposal)
    if by is None:
        typer.echo(f"nothing is accepted yet: hileval accept {name} --by NAME")
        return
    path = gate.path(gate.baseline)
    proposal.model_copy(update={"accepted_by": by.strip()}).write(path)
    proposal_path(gate).unlink()
    typer.echo(f"accepted: {path}")


def show_proposal(name: str, gate: Gate, proposed: Baseline) -> None:
    """Print a proposal, and what it changes: identity, setting, exact match and single questions.

    Raises:
        RecordsError: It shares no question with the baseline.
    """
    setting, where = proposed.setting, proposed.environment
    typer.echo(f"proposed  {summary(proposed, gate)}")
    typer.echo(f"recorded {proposed.recorded} on {setting.engine}, {setting.attention_backend}, {where.device}")
    typer.echo(f"reason: {proposed.reason}")
    if proposed.identity.revision:
        typer.echo(f"revision: {proposed.identity.revision}, which the gate is pinned to once this is accepted")
    path = gate.path(gate.baseline)
    if not path.exists():
        typer.echo("no baseline yet")
        return
    now = Baseline.read(path)
    typer.echo(f"now       {summary(now, gate)}\nrecorded {now.recorded}; accepted by {now.accepted_by}")
    for line in proposed.identity.differences(now.identity):
        typer.echo(f"identity: {line}")
    for line in setting.differences(now.setting):
        typer.echo(f"setting: {line}")
    stored = {question.doc_hash: question for question in now.questions}
    both = [question.doc_hash for question in proposed.questions if question.doc_hash in stored]
    if not both:
        raise RecordsError("the two share no question", where=name, remedy="compare runs of one task")
    if len(both) < max(now.n, proposed.n):
        typer.echo(f"{len(both)} questions are in both")
    before, after = now.outcomes(gate.filter, both), proposed.outcomes(gate.filter, both)
    flipped = abs(after.mean(axis=0) - before.mean(axis=0)) >= FLIPPED
    typer.echo(f"{int(flipped.sum())} questions flip; p of no drop {statistics.drop_p(before, after):.3g}")
    for doc_hash in itertools.compress(both, flipped):
        question = stored[doc_hash]
        typer.echo(f"  question {question.doc_id}: was {getattr(question, gate.filter)}")


def proposal_path(gate: Gate) -> Path:
    """File of a recorded baseline that nobody has accepted yet."""
    path = gate.path(gate.baseline)
    return path.with_name(path.stem + ".proposed.json")


def summary(baseline: Baseline, gate: Gate) -> str:
    """Exact match under the gated filter with its interval, K, how many of them differ, n and d on one line."""
    right = baseline.outcomes(gate.filter)
    low, high = statistics.interval(int(right.sum()), right.size, 0.01)
    noise = baseline.d(gate.filter)
    d = "" if noise is None else f", d = {noise:.2%}"
    runs = f"{baseline.runs} runs ({baseline.distinct(gate.filter)} distinct) of {baseline.n} questions{d}"
    return f"{right.mean():.2%} [{low:.2%}, {high:.2%}] in {runs}"


@app.command("steps")
def list_steps(
    write: Annotated[
        bool, typer.Option("--write", help="Write the steps of the gates to ci/areas/accuracy*.yaml as well.")
    ] = False,
) -> None:
    """List the gates, with the smallest drop each can see."""
    declared = load_gates()
    for name, gate in (declared.gates | declared.of_backends).items():
        attention = f", attention by {gate.attention_backend}" if gate.attention_backend else ""
        where = f" on {', '.join(gate.arch)}" if gate.arch else ""
        floor = "no floor" if gate.floor is None else f"floor {gate.floor:.0%}"
        typer.echo(f"{name}: {gate.title}\n  {gate.engine}{attention}{where}, {floor}")
        if gate.paired_with and not gate.path(gate.baseline).exists():
            unpinned = ", revision not pinned" if gate.weights == "hub" and not gate.revision else ""
            typer.echo(f"  beside {gate.paired_with} in the same job until a baseline is recorded{unpinned}")
        typer.echo(f"  {sight(gate, declared)}")
    for name, drift in declared.drifts.items():
        second = f" and {drift.second}" if drift.second else ""
        typer.echo(f"{name}: drift of {drift.of}\n  beside {drift.peer}{second}, no baseline")
    if write:
        for path, text in areas_of(declared).items():
            path.write_text(text, encoding="utf-8")
            typer.echo(str(path))


SEEN = 0.9
"""Probability that one look fails the drop which `steps` names."""
ASSUMED_D, GSM8K_QUESTIONS = 0.02, 1319
"""Noise and size of a gate that has no baseline yet."""


def sight(gate: Gate, declared: Gates) -> str:
    """The drop that each rule of a gate fails nine times in ten, by one look at all of its questions."""
    path = gate.path(gate.baseline)
    baseline = Baseline.read(path) if path.exists() else None
    d = None if baseline is None else baseline.d(gate.filter)
    noise = ASSUMED_D if d is None else d
    n = GSM8K_QUESTIONS if baseline is None else baseline.n
    drops = []
    for when in gate.rules:
        rule = declared.rules[gate.rule_at(when)]
        stored = baseline.runs if baseline else 1 if gate.paired_with else rule.baseline_runs
        asked = rule.noisy_runs if rule.noisy_d is not None and noise > rule.noisy_d else 1
        look = rule.plan(n)[-1]
        drop = statistics.smallest_drop(look, stored, asked, noise, rule.alpha / declared.sharing(gate, when), SEEN)
        drops.append(f"{100 * drop:.1f} points of {look:,} questions ({when})")
    assumed = " assumed" if d is None else ""
    return f"sees a drop of {', '.join(drops)}; d {noise:.1%}{assumed}"
