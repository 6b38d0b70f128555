# SPDX-License-Identifier: Apache-2.0
"""Train a pocket model: seeded, one CPU thread, minutes; AdamW, and loss on the answer only.

Word problems have a curriculum that starts with three people per question; the speech model finds its task at once.
"""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

from hileval.ask.documents import sound
from hileval.engines import SAMPLING_RATE
from hileval.pocket.data import NAMES, PEOPLE, Problem, documents, problems, speak
from hileval.pocket.models import MEL_BINS, build, build_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerFast


log = logging.getLogger(__name__)

Batch = dict[str, torch.Tensor]
"""Arguments of a model by name."""
IGNORED = -100
"""Label that torch's cross entropy leaves out."""


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """Everything that decides the weights, besides the arithmetic of the machine."""

    architecture: str = "hybrid"
    seed: int = 20
    steps: int = 650
    batch: int = 48
    learning_rate: float = 1e-3
    """Higher is slower here: at 3e-3 looking up a name often had not emerged after 900 steps, at 1e-3 it takes 200."""
    warm_up: int = 60
    decay_from: float = 0.5
    """Share of the steps after which the learning rate falls linearly to a fiftieth."""
    first_people: int = 3
    """People per question at the start; with twelve from the start the look-up does not emerge."""
    first_names: int = 6
    """Names in use while there are fewer than five people per question; a small vocabulary is matched sooner."""
    promote_at: float = 0.8
    """Running share of questions with every token right at which one more person is allowed."""
    stored: str = "float32"
    """Type of the weights in the folder; they are trained and served in float32."""

    def rate(self, step: int) -> float:
        """Learning rate at `step`."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        left = (self.steps - step) / (self.steps * (1 - self.decay_from))
        return self.learning_rate * max(0.02, min(1.0, left))


@dataclass(slots=True)
class Curriculum:
    """Number of people in a training question: one more each time the model nearly masters the last number."""

    people: int
    promote_at: float
    share: float = 0.0
    """Running mean (weight 0.1) of the share of questions with every token right."""

    def update(self, all_right: float) -> None:
        """Take in the share of the last batch."""
        self.share = 0.9 * self.share + 0.1 * all_right
        if self.share > self.promote_at and self.people < PEOPLE[1]:
            self.people += 1
            self.share = 0.5


def prompt_of(problem: Problem) -> str:
    """The prompt that lm-eval's zero-shot GSM8K task makes of a question."""
    return f"Question: {problem.question}\nAnswer:"


def make_batch(tokenizer: PreTrainedTokenizerFast, rows: list[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both [num_seqs, longest] int64, padded on the right (causal, so padding is never seen)."""
    end = tokenizer.eos_token_id
    prompts = tokenizer([prompt_of(row) for row in rows])["input_ids"]
    answers = tokenizer([f" {row.answer}" for row in rows])["input_ids"]
    longest = max(len(p) + len(a) + 1 for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        text = torch.tensor([*prompt, *answer, end])
        ids[i, : len(text)] = text
        labels[i, len(prompt) : len(text)] = text[len(prompt) :]
    return ids, labels


def all_right(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of rows whose every labelled token is the argmax under teacher forcing (an estimate of exact match).

    Args:
        logits: [num_seqs, longest, vocabulary].
        labels: [num_seqs, longest].
    """
    wanted = labels[:, 1:]
    return float(((logits[:, :-1].argmax(-1) == wanted) | (wanted == IGNORED)).all(-1).float().mean())


RECIPES = {
    "hybrid": TrainingRecipe(),
    "window": TrainingRecipe("window", steps=950),
    "latent": TrainingRecipe("latent", steps=1000, stored="bfloat16"),
    "packed": TrainingRecipe("packed", steps=700),
    "speech": TrainingRecipe("speech", steps=1500, batch=64),
}
"""Recipes by architecture."""

Trained = tuple["PreTrainedModel", "PreTrainedTokenizerFast", float]
"""The model in eval mode, its tokenizer, and the seconds it took."""


def fit(
    model: PreTrainedModel,
    recipe: TrainingRecipe,
    batches: Iterator[Batch],
    after: Callable[[torch.Tensor, Batch], str],
) -> float:
    """Train in place.

    Args:
        model: In train mode.
        recipe: Its steps and rates.
        batches: Arguments of the model, `labels` among them; one is drawn before each step.
        after: Called after each step with the logits and the batch; what it returns is logged.

    Returns:
        Seconds it took.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    for step, batch in enumerate(itertools.islice(batches, recipe.steps)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        out = model(**batch, use_cache=False)
        optimizer.zero_grad(set_to_none=True)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress = after(out.logits.detach(), batch)
        if (step + 1) % 50 == 0:
            spent = time.monotonic() - started
            log.info("step %d  loss %.4f  %s  %.0f s", step + 1, out.loss.item(), progress, spent)
    model.eval()
    return time.monotonic() - started


def train(recipe: TrainingRecipe, exclude: frozenset[str]) -> Trained:
    """Train from scratch on problems whose digests are not in `exclude` (the test questions)."""
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    tokenizer = build_tokenizer()
    model = build(recipe.architecture, tokenizer).train()
    curriculum = Curriculum(recipe.first_people, recipe.promote_at)
    streams = {
        people: problems(
            recipe.seed + people,
            people=(min(people, PEOPLE[0]), people),
            names=NAMES if people > PEOPLE[0] else NAMES[: recipe.first_names],
            exclude=exclude,
        )
        for people in range(recipe.first_people, PEOPLE[1] + 1)
    }

    def batches() -> Iterator[Batch]:
        while True:
            rows = list(itertools.islice(streams[curriculum.people], recipe.batch))
            ids, labels = make_batch(tokenizer, rows)
            yield {"input_ids": ids, "labels": labels}

    def after(logits: torch.Tensor, batch: Batch) -> str:
        people = curriculum.people
        curriculum.update(all_right(logits, batch["labels"]))
        return f"people {people}  all tokens right {curriculum.share:.3f}"

    seconds = fit(model, recipe, batches(), after)
    return model, tokenizer, seconds


def extractor() -> Any:
    """Turns one second of sound into a spectrogram, [MEL_BINS, 100]."""
    return transformers.WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=1, sampling_rate=SAMPLING_RATE)


def make_speech_batch(tokenizer: PreTrainedTokenizerFast, extract: Any, texts: list[str]) -> Batch:
    """Spectrograms [num_seqs, MEL_BINS, frames] float32, decoder's input and labels [num_seqs, longest] int64."""
    sounds = [sound(speak(text).astype("<i2").tobytes()) for text in texts]
    features = extract(sounds, sampling_rate=SAMPLING_RATE, return_tensors="pt").input_features
    rows = tokenizer(texts)["input_ids"]
    longest = max(map(len, rows)) + 1
    given = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for i, row in enumerate(rows):
        given[i, : len(row) + 1] = torch.tensor([tokenizer.bos_token_id, *row])
        labels[i, : len(row) + 1] = torch.tensor([*row, tokenizer.eos_token_id])
    return {"input_features": features, "decoder_input_ids": given, "labels": labels}


def train_speech(exclude: frozenset[str]) -> Trained:
    """Train from scratch on documents that are not in `exclude` (the test documents)."""
    recipe = RECIPES["speech"]
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    tokenizer, extract = build_tokenizer("speech"), extractor()
    model = build("speech", tokenizer).train()
    stream = documents(recipe.seed, exclude=exclude)

    def batches() -> Iterator[Batch]:
        while True:
            yield make_speech_batch(tokenizer, extract, list(itertools.islice(stream, recipe.batch)))

    def after(logits: torch.Tensor, batch: Batch) -> str:
        ahead = torch.nn.functional.pad(
            batch["labels"], (1, 0), value=IGNORED
        )  # all_right compares with the next token
        return f"documents right {all_right(torch.nn.functional.pad(logits, (0, 0, 0, 1)), ahead):.3f}"

    seconds = fit(model, recipe, batches(), after)
    return model, tokenizer, seconds
