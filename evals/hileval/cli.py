# SPDX-License-Identifier: Apache-2.0
"""The command line: `gates`, `import`, `gate`, `baseline record|diff|accept|show`, `power`.

`gate` leaves `findings.jsonl` (one check per line) and `samples.jsonl` (one answer per line) in the output folder and
exits with the status that the worst check has.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from pydantic import Field
from rich.console import Console

from hileval.ask.evaluation import check_backend
from hileval.ask.loop import Heading, Journal, ask_until_decided, code_fingerprint
from hileval.ask.task import questions_of
from hileval.gates import statistics
from hileval.gates.declare import EVALS, EngineName, Occasion, engine_factory, find_gate, load_gates, occasion
from hileval.gates.foreign import as_yaml, read_foreign
from hileval.gates.judge import diff_answers, exit_status, judge, side_by_side
from hileval.gates.power import Power, simulate, smallest_drop
from hileval.gates.rule import first_share, shared
from hileval.records.baseline import Baseline, environment, make_baseline
from hileval.records.records import Run, Setting
from hilgate.errors import Exit, HilgateError, MisuseError, RecordsError
from hilgate.model import Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hileval.ask.evaluation import Evaluation
    from hileval.gates.declare import Gate, Gates
    from hileval.gates.rule import Rule


app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
console = Console()
stderr = Console(stderr=True)

COLOURS = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.INCONCLUSIVE: "yellow", Outcome.DID_NOT_RUN: "yellow"}
JOURNALS = Path("results/journals")
"""Where answers are kept until their gate has spoken."""
When = Annotated[
    Occasion | None, typer.Option("--when", help="Which of the gate's rules applies; by default what the plan is for.")
]
Limit = Annotated[int | None, typer.Option(help="Ask only the first N questions; too few are inconclusive.")]
Out = Annotated[Path, typer.Option(envvar="HILGATE_OUT", help="Folder of findings.jsonl and samples.jsonl.")]


@app.command("gates")
def list_gates() -> None:
    """List the declared gates."""
    for name, gate in load_gates().gates.items():
        attention = f", attention by {gate.attention_backend}" if gate.attention_backend else ""
        where = f" on {', '.join(gate.arch)}" if gate.arch else ""
        floor = "no floor" if gate.floor is None else f"floor {gate.floor:.0%}"
        typer.echo(f"{name}: {gate.title}\n  {gate.engine}{attention}{where}, {floor}")


@app.command("import")
def import_config(
    files: Annotated[list[Path], typer.Argument(help="Accuracy configurations of vLLM (either format).")],
    gpus: Annotated[int, typer.Option(min=1, help="Tensor-parallel size where a file does not say.")] = 1,
) -> None:
    """Print them as entries of gates.yaml."""
    for file in files:
        typer.echo(as_yaml(*read_foreign(file, gpus)), nl=False)


@app.command("gate")
def run_gate(
    name: Annotated[str, typer.Argument(help="A gate of evals/gates.yaml, or an accuracy configuration of vLLM.")],
    when: When = None,
    limit: Limit = None,
    of: Annotated[
        int, typer.Option(min=1, envvar="HILEVAL_GATES", help="How many gates decide together; they share alpha.")
    ] = 1,
    engine: Annotated[EngineName | None, typer.Option(help="Another engine than declared: never a pass.")] = None,
    out: Out = Path("results/evals"),
) -> None:
    """Run a gate and judge it against its baseline."""
    declared = load_gates()
    if name.endswith((".yaml", ".yml")):
        name, gate = read_foreign(Path(name))
    else:
        gate = find_gate(name, declared)
    rule = shared(declared.rule(gate, when or occasion(os.environ)), of)
    path = gate.path(gate.baseline)
    baseline = Baseline.read(path) if path.exists() or gate.weights == "repository" else None
    try:
        asked, served = measure(name, gate, rule, baseline, engine or gate.engine, limit)
        checks = judge(name, gate, rule, asked, baseline, served)
    except HilgateError as error:
        (out / "samples.jsonl").unlink(missing_ok=True)
        Check.write_all(out, [did_not_run(name, error)])
        raise
    Check.write_all(out, checks)
    samples = "".join(f"{sample.model_dump_json()}\n" for sample in asked.samples)
    (out / "samples.jsonl").write_text(samples, encoding="utf-8")
    if baseline is not None:
        (out / "flips.md").write_text(side_by_side(diff_answers(asked, baseline, gate.filter), 10**6), encoding="utf-8")
    show(checks, out)
    raise typer.Exit(exit_status(checks))


def measure(
    name: str, gate: Gate, rule: Rule, baseline: Baseline | None, engine: EngineName, limit: int | None
) -> tuple[Evaluation, Check | None]:
    """Ask a gate's questions and who served them.

    Raises:
        HilgateError: the declaration, the model, the engine or lm-eval stopped it; nothing was measured.
    """
    questions = questions_of(gate, engine_factory(gate, engine))
    code = code_fingerprint(EVALS.parent / "kernels", EVALS / "hileval")
    heading = Heading(gate=name, identity=questions.identity, engine=engine, code=code)
    journal = Journal(questions, JOURNALS / f"{name}.jsonl", heading)
    if journal.resumed:
        stderr.print(f"{journal.resumed} answers of an interrupted run are kept", highlight=False)
    try:
        asked = ask_until_decided(gate, rule, baseline, journal, ProgressPrinter(), limit)
        served = check_backend(name, gate, questions.engine)
    finally:
        if questions.engine is not None:
            questions.engine.close()
    journal.finish()
    return asked, served


class ProgressPrinter:
    """A line per batch on stderr: how far, how right, how long still."""

    def __init__(self) -> None:
        self._began, self._run = time.monotonic(), 0

    def asked(self, run: int, done: int, most: int, right: int) -> None:
        """See `hileval.ask.loop.Listener`."""
        if run != self._run:
            self._run, self._began = run, time.monotonic()
        spent = time.monotonic() - self._began
        left = f", at most {spent / done * (most - done):.0f} s more" if done < most else ""
        stderr.print(f"run {run + 1}: {done}/{most} asked, {right} right, {spent:.0f} s{left}", highlight=False)


def did_not_run(name: str, error: HilgateError) -> Check:
    """The finding of a gate that was stopped by an error: it says so instead of being absent."""
    message = "; ".join(str(error).splitlines())
    return Check(
        id=f"{name}/accuracy", outcome=Outcome.DID_NOT_RUN, message=message, labels={"error": type(error).__name__}
    )


def show(checks: Sequence[Check], out: Path) -> None:
    """Print one line per check."""
    for check in checks:
        colour = COLOURS[check.outcome]
        console.print(f"[{colour}]{check.outcome.value:<12}[/] {check.id}: ", end="", highlight=False)
        console.print(check.message, markup=False, highlight=False, soft_wrap=True)
    console.print(f"{out}/findings.jsonl, {out}/samples.jsonl", highlight=False)


def run(command: typer.Typer) -> NoReturn:
    """Run a command line; every mistake is a few lines and an exit status, never a traceback."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        command()
    except HilgateError as error:
        stderr.print(f"[red]{type(error).__name__}[/]: ", end="", highlight=False)
        stderr.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        stderr.print("interrupted; the answers so far are kept, and the same command goes on from them")
        sys.exit(Exit.INTERRUPTED)
    sys.exit(Exit.PASS)


baseline_app = typer.Typer(no_args_is_help=True, help="Stored runs that later runs are paired with.")
app.add_typer(baseline_app, name="baseline")
NOBODY = "nobody yet"
Name = Annotated[str, typer.Argument(help="A gate of evals/gates.yaml.")]


@baseline_app.command("record")
def record(
    name: Name,
    reason: Annotated[str, typer.Option(help="Why: it is stored in the baseline and read in review.")],
    runs: Annotated[int, typer.Option(min=1, help="K: how often all questions are asked.")] = 5,
    attention_backend: Annotated[
        Literal["vllm", "pagedkv"], typer.Option(help="Which attention to trust; vllm is the engine's own.")
    ] = "vllm",
    engine: Annotated[
        EngineName | None, typer.Option(help="Another engine, where vLLM cannot serve the class.")
    ] = None,
) -> None:
    """Ask all questions of a gate K times on an attention that is trusted, and leave a proposal."""
    gate = find_gate(name, load_gates())
    chosen = engine or gate.engine
    trusted = {"vllm": attention_backend, "transformers": None}.get(chosen, gate.attention_backend)
    gate = gate.model_copy(update={"engine": chosen, "attention_backend": trusted})
    questions = questions_of(gate, engine_factory(gate, chosen))
    everything = list(range(questions.available))
    recorded = []
    for number in range(runs):
        began = time.monotonic()
        samples = tuple(questions.ask(everything, number))
        recorded.append(Run(identity=questions.identity, samples=samples, seconds=time.monotonic() - began))
        typer.echo(f"run {number + 1} of {runs}: {recorded[-1].strict_correct}/{len(samples)} right", err=True)
    served = check_backend(name, gate, questions.engine)
    if served is not None and served.outcome is not Outcome.PASS:
        raise MisuseError(f"not recorded: {served.message}", where=name)
    assert questions.engine is not None
    setting = Setting(
        engine=questions.engine.name,
        attention_backend=served.labels["backend"] if served else gate.engine,
        arguments=dict(gate.engine_args),
    )
    baseline = make_baseline(
        name, recorded, floor=gate.floor or 0.0, setting=setting, environment=environment(), reason=reason, by=NOBODY
    )
    path = proposal_path(gate)
    baseline.write(path)
    typer.echo(
        f"{path}\n{summary(baseline)}\nlook at it (baseline diff {name}), then: baseline accept {name} --by NAME"
    )


@baseline_app.command("accept")
def accept(name: Name, by: Annotated[str, typer.Option(help="Who looked at the proposal and answers for it.")]) -> None:
    """Make the proposal the baseline."""
    gate = find_gate(name, load_gates())
    if not by.strip():
        raise MisuseError("--by is empty", where=name, remedy="name a person or a team that can be asked")
    path = proposal_path(gate)
    accepted = Baseline.read(path).model_copy(update={"accepted_by": by.strip()})
    accepted.write(gate.path(gate.baseline))
    path.unlink()
    typer.echo(f"{gate.path(gate.baseline)}\n{summary(accepted)}")


@baseline_app.command("show")
def show_baseline(name: Name) -> None:
    """What the baseline of a gate holds."""
    gate = find_gate(name, load_gates())
    baseline = Baseline.read(gate.path(gate.baseline))
    where = baseline.environment
    typer.echo(summary(baseline))
    typer.echo(f"recorded {baseline.recorded}: {baseline.reason}; accepted by {baseline.accepted_by}")
    typer.echo(f"on {baseline.setting.engine}, {baseline.setting.attention_backend}, {where.device}")
    for field, value in baseline.identity.model_dump().items():
        typer.echo(f"  {field:<14} {value!s:.64}")


@baseline_app.command("diff")
def diff(name: Name) -> None:
    """What accepting the proposal would change: identity, setting, exact match, and which questions."""
    gate = find_gate(name, load_gates())
    now, proposed = Baseline.read(gate.path(gate.baseline)), Baseline.read(proposal_path(gate))
    for line in proposed.identity.differences(now.identity):
        typer.echo(f"identity: {line}")
    for line in proposed.setting.differences(now.setting):
        typer.echo(f"setting: {line}")
    typer.echo(f"now       {summary(now)}\nproposed  {summary(proposed)}")
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


def summary(baseline: Baseline) -> str:
    """Exact match with its interval, K, n and d on one line."""
    right = baseline.outcomes("strict")
    low, high = statistics.interval(int(right.sum()), right.size, 0.01)
    d = "" if baseline.d is None else f", d = {baseline.d:.2%}"
    return f"{right.mean():.2%} [{low:.2%}, {high:.2%}] in {baseline.runs} runs of {baseline.n} questions{d}"


DROPS = (0.0, 0.02, 0.03, 0.05, 0.10)
GSM8K_QUESTIONS = 1319
"""Of the test set, for models without a baseline of their own."""


class PowerRow(Power):
    """One rule of one gate under one true drop."""

    gate: str
    rule: Occasion
    accuracy: float
    d: float
    baseline_runs: int
    drop: float
    replays: int
    smallest_drop: float = Field(ge=0)
    """That one look at all questions of the rule fails 9 times in 10 (`power.smallest_drop`)."""


@app.command("power")
def print_power(
    names: Annotated[list[str] | None, typer.Argument(metavar="[GATE]...", help="By default every gate.")] = None,
    replays: Annotated[int, typer.Option(min=10, help="Simulated merges per figure.")] = 1000,
    d: Annotated[float | None, typer.Option(min=0, max=0.5, help="Assume this d, not the baseline's.")] = None,
    seed: Annotated[int, typer.Option(help="Of the simulation.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """Share of merges that each rule fails, passes or leaves open, and how many questions that takes."""
    declared = load_gates()
    rows: list[PowerRow] = []
    for name in names or declared.gates:
        gate = find_gate(name, declared)
        for when in gate.rules:
            found = power_of_rule(name, gate, when, declared, d=d, replays=replays, seed=seed)
            if not found:
                typer.echo(f"{name}, {when}: no baseline, published figure or floor to start from", err=True)
            if found and d is not None and found[0].d < d:
                typer.echo(f"{name}, {when}: d {d:.1%} cannot be at an accuracy of {found[0].accuracy:.1%}; "
                           f"{found[0].d:.1%} is used", err=True)  # fmt: skip
            rows += found
    if as_json:
        typer.echo(json.dumps([row.model_dump() for row in rows], indent=1))
        return
    for row in rows:
        if row.drop == DROPS[0]:
            typer.echo(
                f"{row.gate}, {row.rule}: accuracy {row.accuracy:.1%}, d {row.d:.1%}, K = {row.baseline_runs}; "
                f"one look sees {100 * row.smallest_drop:.1f} points\n"
                "  true drop    fail    pass  undecided  questions"
            )
        typer.echo(f"{row.drop:>11.0%}{row.failed:>8.1%}{row.passed:>8.1%}{row.undecided:>11.1%}{row.questions:>11.0f}")


def power_of_rule(
    name: str, gate: Gate, when: Occasion, declared: Gates, *, d: float | None, replays: int, seed: int
) -> list[PowerRow]:
    """The rows of one gate and rule: from its baseline's own accuracy and noise, else from the published figure.

    No rows where there is neither a baseline nor a figure nor a floor.

    Raises:
        RecordsError: There is no baseline, and no d was given.
    """
    rule = declared.rule(gate, when)
    try:
        baseline = Baseline.read(gate.path(gate.baseline))
    except RecordsError:
        if d is None:
            raise
        known = gate.published[0].value if gate.published else gate.floor
        if known is None:
            return []
        accuracy, noise, runs, n = known, d, 5, GSM8K_QUESTIONS
    else:
        accuracy = float(baseline.outcomes(gate.filter).mean())
        noise, runs, n = (baseline.d or 0.0) if d is None else d, baseline.runs, baseline.n
    noise = min(noise, accuracy, 1 - accuracy)
    looks = rule.plan(n)
    new_runs = rule.noisy_runs if rule.noisy_d is not None and noise > rule.noisy_d else 1
    plan = statistics.Plan(looks, rule.alpha * first_share(rule, new_runs), rule.margin, rule.beta)
    rows = []
    for drop in DROPS:
        power = simulate(
            plan, accuracy=accuracy, d=noise, drop=drop, base_runs=runs, new_runs=new_runs, replays=replays, seed=seed
        )
        rows.append(
            PowerRow(
                **power.model_dump(exclude={"questions"}),
                gate=name,
                rule=when,
                accuracy=accuracy,
                d=noise,
                baseline_runs=runs,
                drop=drop,
                questions=power.questions * new_runs,
                replays=replays,
                smallest_drop=smallest_drop(looks[-1], runs, new_runs, noise, rule.alpha, 0.9),
            )
        )
    return rows
