"""`python -m hileval baseline ...`: stored runs that later runs are paired with."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import typer

from hileval.baseline import make_baseline
from hileval.declare import find_gate, load_gates
from hileval.environment import environment
from hileval.records import Run, Setting
from hileval.served import served_by
from hileval.start import starter
from hilgate.errors import MisuseError
from hilgate.model import Outcome

app = typer.Typer(no_args_is_help=True, help="Stored runs that later runs are paired with.")


@app.command("record")
def record(
    name: Annotated[str, typer.Argument(help="A gate of evals/gates.yaml.")],
    reason: Annotated[str, typer.Option(help="Why: it is stored in the baseline and read in review.")],
    by: Annotated[str, typer.Option(help="Who accepts it.")],
    runs: Annotated[int, typer.Option(min=1, help="K: how often all questions are asked.")] = 5,
    attention_backend: Annotated[
        Literal["vllm", "pagedkv"], typer.Option(help="Which attention to trust; vllm is the engine's own.")
    ] = "vllm",
) -> None:
    """Record the baseline of a gate: all its questions, K times, on an attention that is trusted."""
    from hileval.harness import TaskQuestions

    gate = find_gate(name, load_gates())
    if gate.engine == "vllm":
        gate = gate.model_copy(update={"attention_backend": attention_backend})
    questions = TaskQuestions(gate, starter(gate, gate.engine))
    everything = list(range(questions.available))
    recorded = []
    for number in range(runs):
        began = time.monotonic()
        samples = tuple(questions.ask(everything, number))
        recorded.append(Run(identity=questions.identity, samples=samples, seconds=time.monotonic() - began))
        typer.echo(f"run {number + 1} of {runs}: {recorded[-1].strict_correct}/{len(samples)} right", err=True)
    served = served_by(name, gate.attention_backend, questions.engine)
    if served is not None and served.outcome is not Outcome.PASS:
        raise MisuseError(f"not recorded: {served.message}", where=name)
    assert questions.engine is not None
    setting = Setting(
        engine=questions.engine.name,
        attention_backend=served.labels["backend"] if served else gate.engine,
        arguments=dict(gate.engine_args),
    )
    baseline = make_baseline(
        name, recorded, floor=gate.floor, setting=setting, environment=environment(), reason=reason, by=by
    )
    path = gate.path(gate.baseline)
    baseline.write(path)
    d = "" if baseline.d is None else f", d = {baseline.d:.1%}"
    typer.echo(f"{path}: {runs} runs of {baseline.n} questions{d}")
