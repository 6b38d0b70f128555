# SPDX-License-Identifier: Apache-2.0
"""Parts of gates that need a process of their own: internal, started by `python -m hileval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from hileval.ask.recording import record_beside, record_run
from hileval.ask.sides import ask_side
from hileval.command import run
from hileval.gates.declare import EngineName, Occasion, load_gates
from hileval.gates.resolve import resolve, resolve_pair, without_baseline
from hileval.records.answers import Side, SideName

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False, rich_markup_mode=None)
Name = Annotated[str, typer.Argument(help="Gate of evals/gates.yaml.")]
Backend = Annotated[str, typer.Option("--attention-backend", help="Trusted attention backend by vLLM's name.")]


@app.command("run")
def one_run(
    name: Name,
    number: Annotated[int, typer.Option(min=0, help="Number of the run, from 0 to K - 1.")],
    attention_backend: Backend = "vllm",
    engine: Annotated[EngineName | None, typer.Option(help="Engine for models that vLLM cannot serve.")] = None,
) -> None:
    """Make one run of a baseline."""
    gate = without_baseline(name, load_gates(), engine)
    record_run(gate.using(attention_backend=None if gate.engine == "transformers" else attention_backend), number)


@app.command("beside")
def one_beside(
    name: Name,
    when: Annotated[Occasion, typer.Option(help="Occasion whose rule draws the questions.")],
    file: Annotated[Path, typer.Option(help="File for the run.")],
    limit: Annotated[int | None, typer.Option(help="Ask only the first N questions.")] = None,
) -> None:
    """Ask the attention beside which a gate without a baseline is judged."""
    record_beside(resolve_pair(name, load_gates(), when, limit), file)


@app.command("side")
def one_side(
    name: Annotated[str, typer.Argument(help="Drift gate.")],
    which: Annotated[SideName, typer.Argument(help="Engine to ask.")],
    file: Annotated[Path, typer.Option(help="File for the answers.")],
    given: Annotated[
        list[str] | None, typer.Option(help="SIDE=FILE: answers of another engine, which the peer reads.")
    ] = None,
) -> None:
    """Run one of the engines of a drift gate."""
    sides = {side: Side.unpack(Path(path)) for side, _, path in (word.partition("=") for word in given or ())}
    ask_side(which, resolve(name, load_gates()), cast("dict[SideName, Side]", sides)).pack(file)


run(app)
