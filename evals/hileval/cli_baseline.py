"""`python -m hileval baseline ...`: stored runs that later runs are paired with.

record    ask all questions K times on a trusted attention; leaves a proposal beside the baseline
diff      what the proposal (or another file) changes, question by question
accept    make the proposal the baseline, with the name of who looked at it
show      what a baseline holds
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hileval import stats
from hileval.baseline import Baseline, make_baseline
from hileval.declare import find_gate, load_gates
from hileval.environment import environment
from hileval.records import Run, Setting
from hileval.served import served_by
from hileval.start import EngineName, starter
from hilgate.errors import MisuseError, RecordsError
from hilgate.model import Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from hileval.declare import Gate

app = typer.Typer(no_args_is_help=True, help="Stored runs that later runs are paired with.")
NOBODY = "nobody yet"
Name = Annotated[str, typer.Argument(help="A gate of evals/gates.yaml.")]


@app.command("record")
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
    from hileval.document_questions import questions_of

    gate = find_gate(name, load_gates())
    chosen = engine or gate.engine
    trusted = {"vllm": attention_backend, "transformers": None}.get(chosen, gate.attention_backend)
    gate = gate.model_copy(update={"engine": chosen, "attention_backend": trusted})
    questions = questions_of(gate, starter(gate, chosen))
    everything = list(range(questions.available))
    recorded = []
    for number in range(runs):
        began = time.monotonic()
        samples = tuple(questions.ask(everything, number))
        recorded.append(Run(identity=questions.identity, samples=samples, seconds=time.monotonic() - began))
        typer.echo(f"run {number + 1} of {runs}: {recorded[-1].strict_correct}/{len(samples)} right", err=True)
    served = served_by(name, gate, questions.engine)
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


@app.command("accept")
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


@app.command("show")
def show(name: Name) -> None:
    """What the baseline of a gate holds."""
    gate = find_gate(name, load_gates())
    baseline = Baseline.read(gate.path(gate.baseline))
    where = baseline.environment
    typer.echo(summary(baseline))
    typer.echo(f"recorded {baseline.recorded}: {baseline.reason}; accepted by {baseline.accepted_by}")
    typer.echo(f"on {baseline.setting.engine}, {baseline.setting.attention_backend}, {where.device}")
    for field, value in baseline.identity.model_dump().items():
        typer.echo(f"  {field:<14} {value!s:.64}")


@app.command("diff")
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
    typer.echo(f"{int(changed.sum())} questions flip; p of no drop {stats.drop_p(before, after):.3g}")
    for one in (h for h, flipped in zip(both, changed, strict=True) if flipped):
        old = hashes[one]
        typer.echo(f"  question {old.doc_id}: was {getattr(old, gate.filter)}")


def proposal_path(gate: Gate) -> Path:
    """Where a recorded baseline waits to be accepted."""
    path = gate.path(gate.baseline)
    return path.with_name(path.stem + ".proposed.json")


def summary(baseline: Baseline) -> str:
    """Exact match with its interval, K, n and d on one line."""
    hashes = [question.doc_hash for question in baseline.questions]
    right = baseline.outcomes("strict", hashes)
    low, high = stats.interval(int(right.sum()), right.size, 0.01)
    d = "" if baseline.d is None else f", d = {baseline.d:.2%}"
    return f"{right.mean():.2%} [{low:.2%}, {high:.2%}] in {baseline.runs} runs of {baseline.n} questions{d}"
