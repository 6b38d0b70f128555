"""`python -m hileval power`: what each gate can and cannot see, from the noise of its own baseline."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from pydantic import Field

from hileval.baseline import Baseline
from hileval.declare import Gate, Gates, Occasion, find_gate, load_gates
from hileval.power import Plan, simulate, smallest_drop
from hileval.rule import first_share
from hilgate.errors import RecordsError
from hilgate.model import Noun

DROPS = (0.0, 0.02, 0.03, 0.05, 0.10)
GSM8K_QUESTIONS = 1319
"""Of the test set, for models without a baseline of their own."""


class Row(Noun):
    """One rule of one gate under one true drop; shares of simulated merges."""

    gate: str
    rule: Occasion
    accuracy: float
    d: float
    baseline_runs: int
    drop: float
    failed: float
    passed: float
    undecided: float
    questions: float
    replays: int
    smallest_drop: float = Field(ge=0)
    """That one look at all questions of the rule fails 9 times in 10 (`power.smallest_drop`)."""


def power(
    names: Annotated[list[str] | None, typer.Argument(metavar="[GATE]...", help="By default every gate.")] = None,
    replays: Annotated[int, typer.Option(min=10, help="Simulated merges per figure.")] = 1000,
    d: Annotated[float | None, typer.Option(min=0, max=0.5, help="Assume this d, not the baseline's.")] = None,
    seed: Annotated[int, typer.Option(help="Of the simulation.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """Share of merges that each rule fails, passes or leaves open, and how many questions that takes."""
    declared = load_gates()
    rows: list[Row] = []
    for name in names or declared.gates:
        gate = find_gate(name, declared)
        for when in gate.rules:
            found = table(name, gate, when, declared, d=d, replays=replays, seed=seed)
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


def table(
    name: str, gate: Gate, when: Occasion, declared: Gates, *, d: float | None, replays: int, seed: int
) -> list[Row]:
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
        hashes = [question.doc_hash for question in baseline.questions]
        accuracy = float(baseline.outcomes(gate.filter, hashes).mean())
        noise, runs, n = (baseline.d or 0.0) if d is None else d, baseline.runs, baseline.n
    noise = min(noise, accuracy, 1 - accuracy)
    looks = rule.plan(n)
    new_runs = rule.noisy_runs if rule.noisy_d is not None and noise > rule.noisy_d else 1
    plan = Plan(looks, rule.alpha * first_share(rule, new_runs), rule.margin, rule.beta)
    rows = []
    for drop in DROPS:
        seen = simulate(
            plan, accuracy=accuracy, d=noise, drop=drop, base_runs=runs, new_runs=new_runs, replays=replays, seed=seed
        )
        rows.append(
            Row(
                gate=name,
                rule=when,
                accuracy=accuracy,
                d=noise,
                baseline_runs=runs,
                drop=drop,
                failed=seen.fail,
                passed=seen.passed,
                undecided=seen.inconclusive,
                questions=seen.questions * new_runs,
                replays=replays,
                smallest_drop=smallest_drop(looks[-1], runs, new_runs, noise, rule.alpha, 0.9),
            )
        )
    return rows
