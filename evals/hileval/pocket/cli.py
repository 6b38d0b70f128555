"""`python -m hileval.pocket`: make the questions, train the model, measure it and its sensitivity to planted faults."""

from __future__ import annotations

import itertools
import json
import logging
from typing import Annotated, Literal

import typer

from hileval import stats
from hileval.declare import EVALS
from hileval.pocket.questions import Problem, problems, read_jsonl, write_jsonl

TEST_FILE = EVALS / "pocket/data/test.jsonl"
MODELS = EVALS / "pocket"
TEST_SEED, FRESH_SEED = 7, 8
TEST_QUESTIONS = 400

Name = Annotated[
    Literal["hybrid", "window", "latent", "packed"], typer.Argument(help="Which pocket model (architectures.py).")
]

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)


@app.command("questions")
def questions() -> None:
    """Write the test questions (deterministic)."""
    TEST_FILE.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(TEST_FILE, list(itertools.islice(problems(TEST_SEED), TEST_QUESTIONS)))
    typer.echo(f"{TEST_FILE}: {TEST_QUESTIONS} questions, seed {TEST_SEED}")


@app.command("train")
def train_model(name: Name = "hybrid") -> None:
    """Train from scratch on questions that are not test questions, and write the model folder."""
    import torch

    from hileval.pocket.train import RECIPES, train

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    test = frozenset(row.digest for row in read_jsonl(TEST_FILE))
    model, tokenizer, seconds = train(RECIPES[name], test)
    model.generation_config.update(do_sample=False, max_new_tokens=32, _from_model_config=False)
    folder = MODELS / name
    model.to(getattr(torch, RECIPES[name].stored)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    typer.echo(f"{folder}: {sum(p.numel() for p in model.parameters())} parameters in {seconds:.0f} s")


@app.command("measure")
def measure(
    name: Name = "hybrid",
    n: Annotated[int, typer.Option(help="Fresh questions (neither training nor test).")] = 1000,
    damaged: Annotated[int, typer.Option("--faults", help="Questions per planted fault; 0 leaves them out.")] = 200,
) -> None:
    """Exact match on fresh questions, intact and under planted cache faults (`hileval.pocket.corrupt`)."""
    from hileval.engines.transformers_engine import TransformersEngine
    from hileval.pocket.corrupt import faults, plant

    test = frozenset(row.digest for row in read_jsonl(TEST_FILE))
    rows = list(itertools.islice(problems(FRESH_SEED, exclude=test), max(n, damaged)))
    engine = TransformersEngine(MODELS / name)
    report("intact", exact_match(engine, rows[:n]), n)
    for fault in faults(engine.model) if damaged else ():
        remove = plant(engine.model, fault)
        report(fault, exact_match(engine, rows[:damaged]), damaged)
        remove()


def exact_match(engine: object, rows: list[Problem]) -> int:
    """How many rows an engine answers with the right `#### N`."""
    from hileval.pocket.train import prompt_of

    answers = engine.answer([prompt_of(row) for row in rows], max_tokens=32, stop=["Question:"])  # type: ignore[attr-defined]
    return sum(answer.text.endswith(f"#### {row.number}") for answer, row in zip(answers, rows, strict=True))


def report(what: str, correct: int, n: int) -> None:
    """Print one line of JSON."""
    low, high = stats.interval(correct, n, 0.05)
    typer.echo(json.dumps({"what": what, "n": n, "exact_match": correct / n, "ci95": [round(low, 4), round(high, 4)]}))
