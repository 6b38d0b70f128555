# SPDX-License-Identifier: Apache-2.0
"""Make, train and measure the pocket models: small models that answer the questions of the local gates."""

from __future__ import annotations

import itertools
import json
import logging
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hileval import statistics
from hileval.ask.documents import read_documents, sound
from hileval.engines import Prompt
from hileval.gates.declare import EVALS, read_document_task
from hileval.pocket.data import documents, problems, read_jsonl, speak, write_documents, write_jsonl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hileval.engines import Engine
    from hileval.pocket.data import Problem

TEST_FILE = EVALS / "pocket/data/test.jsonl"
SPEECH_TASK = EVALS / "tasks/pocket_speech.yaml"
SPEECH_FILE = EVALS / "pocket/data/speech.jsonl"
MODELS = EVALS / "pocket"
TEST_SEED, FRESH_SEED = 7, 8
TEST_QUESTIONS = 400

Name = Annotated[
    Literal["hybrid", "window", "latent", "packed", "speech"],
    typer.Argument(help="Name of a pocket model (pocket/models.py)."),
]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False
)


@app.command("questions")
def questions() -> None:
    """Write the test questions and documents. The same every time."""
    TEST_FILE.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(TEST_FILE, list(itertools.islice(problems(TEST_SEED), TEST_QUESTIONS)))
    typer.echo(f"{TEST_FILE}: {TEST_QUESTIONS} questions, seed {TEST_SEED}")
    write_documents(SPEECH_FILE, list(itertools.islice(documents(TEST_SEED), TEST_QUESTIONS)))
    typer.echo(f"{SPEECH_FILE}: {TEST_QUESTIONS} documents, seed {TEST_SEED}")


@app.command("train")
def train_model(name: Name = "hybrid") -> None:
    """Train from scratch on questions that are not test questions, and write the model folder."""
    import torch

    from hileval.pocket.train import RECIPES, extractor, train, train_speech

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = MODELS / name
    recipe = RECIPES[name]
    if name == "speech":
        model, tokenizer, seconds = train_speech(reserved_documents())
        extractor().save_pretrained(folder)
    else:
        model, tokenizer, seconds = train(recipe, frozenset(row.digest for row in read_jsonl(TEST_FILE)))
    model.generation_config.update(do_sample=False, max_new_tokens=32, _from_model_config=False)
    model.to(getattr(torch, recipe.stored)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    typer.echo(f"{folder}: {sum(p.numel() for p in model.parameters())} parameters in {seconds:.0f} s")


@app.command("measure")
def measure(
    name: Name = "hybrid",
    n: Annotated[int, typer.Option(help="Number of fresh questions, in neither the training nor the test set.")] = 1000,
    damaged: Annotated[
        int, typer.Option("--faults", help="Number of questions per injected fault; 0 measures no faults.")
    ] = 200,
) -> None:
    """Measure exact match on fresh questions: as trained, and with injected cache faults (`hileval.pocket.damage`)."""
    from hileval.engines.transformers_engine import SpeechEngine, TransformersEngine
    from hileval.pocket.damage import faults, plant

    rows: Sequence[Any]
    if name == "speech":
        count: Callable[..., int] = transcribed
        rows = list(itertools.islice(documents(FRESH_SEED, exclude=reserved_documents()), max(n, damaged)))
        engine: TransformersEngine = SpeechEngine(MODELS / name)
    else:
        count = exact_match
        test = frozenset(row.digest for row in read_jsonl(TEST_FILE))
        rows = list(itertools.islice(problems(FRESH_SEED, exclude=test), max(n, damaged)))
        engine = TransformersEngine(MODELS / name)
    report("intact", count(engine, rows[:n]), n)
    for fault in faults(engine.model) if damaged else ():
        remove = plant(engine.model, fault)
        report(fault, count(engine, rows[:damaged]), damaged)
        remove()


@app.command("rounding")
def print_rounding(
    name: Name = "hybrid",
    replays: Annotated[
        int, typer.Option(min=1, help="Number of simulated gates for each of the 120 assignments of roles.")
    ] = 100,
    drawn: Annotated[int, typer.Option(min=1, help="Number of sequences that a gate reads.")] = 10,
) -> None:
    """Measure how often a drift gate fails a correct attention, by dtype, with six correct ones in all roles."""
    import numpy as np

    from hileval.ask.sides import sequences_of
    from hileval.gates.declare import load_gates
    from hileval.gates.resolve import without_baseline
    from hileval.pocket.rounding import DTYPES, ask, false_alarms

    declared = load_gates()
    drift = declared.drifts[f"pocket-{name}-drift"].model_copy(update={"lengths": {0: 24, 140: 8}})
    sequences = sequences_of(without_baseline(f"pocket-{name}", declared), drift)
    for dtype in DTYPES:
        said = ask(MODELS / name, sequences, dtype, np.random.default_rng(1))
        row = false_alarms(said, dtype, drawn=drawn, replays=replays, seed=1)
        typer.echo(
            f"{row.dtype}: fails {row.alone:.2%} by the peer's own rounding, {row.beside:.2%} with a second attention; "
            f"more than 1 % in {row.often} of {row.roles} roles, at most {row.worst:.1%} (ours {row.worst_role[0]}, "
            f"peer {row.worst_role[1]}, second {row.worst_role[2]}: {row.ours}, rounding {row.rounding} nats); "
            f"a replaced block is not noticed in {row.unnoticed:.2%}"
        )


VECTORS = EVALS.parent / "tests/evals/gates/vectors.json"
RUNS: dict[str, tuple[float, float, int]] = {
    "greedy": (0.0, 0.0, 0),
    "warm 1": (0.5, 0.0, 1),
    "warm 2": (0.5, 0.0, 2),
    "hot": (1.5, 0.0, 3),
    "near checkpoint": (0.0, 0.01, 4),
    "far checkpoint": (0.0, 0.12, 5),
}
"""Temperature, noise on every weight as a share of its tensor's standard deviation, and seed."""


@app.command("vectors")
def record_vectors(
    fresh: Annotated[
        int, typer.Option(help="Number of fresh questions that measure the true accuracy of each.")
    ] = 2000,
) -> None:
    """Record which test questions the hybrid answers right at two temperatures and as two further checkpoints."""
    import torch

    from hileval.engines.transformers_engine import TransformersEngine

    asked = read_jsonl(TEST_FILE)
    others = list(itertools.islice(problems(FRESH_SEED, exclude=frozenset(row.digest for row in asked)), fresh))
    found = {}
    for name, (temperature, noise, seed) in RUNS.items():
        engine = TransformersEngine(MODELS / "hybrid", temperature=temperature)
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in engine.model.parameters():
                weight.add_(noise * weight.std() * torch.randn_like(weight))
        right = "".join("1" if one else "0" for one in which_match(engine, asked))
        found[name] = {"right": right, "really": round(exact_match(engine, others) / fresh, 4)}
        report(name, right.count("1"), len(right))
    VECTORS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def reserved_documents() -> frozenset[str]:
    """Texts of the test documents."""
    return frozenset(document.text for document in read_documents(read_document_task(SPEECH_TASK), SPEECH_TASK))


def transcribed(engine: Engine, texts: Sequence[str]) -> int:
    """How many documents an engine writes down without a mistake."""
    from hileval.pocket.models import START

    prompts = [Prompt(START, "audio", sound(speak(text).astype("<i2").tobytes())) for text in texts]
    answers = engine.answer(prompts, max_tokens=32, stop=[])
    return sum(answer.text == text for answer, text in zip(answers, texts, strict=True))


def exact_match(engine: Engine, rows: Sequence[Problem]) -> int:
    """How many rows an engine answers with the right `#### N`."""
    return sum(which_match(engine, rows))


def which_match(engine: Engine, rows: Sequence[Problem]) -> list[bool]:
    """Which they are."""
    from hileval.pocket.train import prompt_of

    answers = engine.answer([prompt_of(row) for row in rows], max_tokens=32, stop=["Question:"])
    return [answer.text.endswith(f"#### {row.number}") for answer, row in zip(answers, rows, strict=True)]


def report(what: str, correct: int, n: int) -> None:
    """Print one line of JSON."""
    low, high = statistics.interval(correct, n, 0.05)
    typer.echo(json.dumps({"what": what, "n": n, "exact_match": correct / n, "ci95": [round(low, 4), round(high, 4)]}))
