# SPDX-License-Identifier: Apache-2.0
"""Make and train the pocket models: small models that answer the questions of the local gates."""

from __future__ import annotations

import itertools
import logging
from typing import Annotated, Literal

import typer

from hileval.ask.documents import read_documents
from hileval.gates.declare import EVALS, read_document_task
from hileval.pocket.data import documents, problems, read_jsonl, write_documents, write_jsonl

TEST_FILE = EVALS / "pocket/data/test.jsonl"
SPEECH_TASK = EVALS / "tasks/pocket_speech.yaml"
SPEECH_FILE = EVALS / "pocket/data/speech.jsonl"
MODELS = EVALS / "pocket"
TEST_SEED = 7
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


def reserved_documents() -> frozenset[str]:
    """Texts of the test documents."""
    return frozenset(document.text for document in read_documents(read_document_task(SPEECH_TASK), SPEECH_TASK))
