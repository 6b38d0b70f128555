"""Train a pocket model: seeded, one CPU thread, minutes.

Loss on the answer only; AdamW; a curriculum that starts with three people per question.

Train the pocket speech model: seeded, one CPU thread, two minutes. No curriculum: the task is found at once.
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
from hileval.pocket.data import NAMES, PEOPLE, SAMPLING_RATE, Problem, documents, problems, speak
from hileval.pocket.models import MEL_BINS, build, build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


log = logging.getLogger(__name__)

IGNORED = -100
"""Label that torch's cross entropy leaves out."""


@dataclass(frozen=True, slots=True)
class Recipe:
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
    """How many people a training question may have: one more each time the model nearly masters the last number."""

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
    "hybrid": Recipe(),
    "window": Recipe("window", steps=950),
    "latent": Recipe("latent", steps=1000, stored="bfloat16"),
    "packed": Recipe("packed", steps=700),
}
"""By architecture."""


def train(recipe: Recipe, exclude: frozenset[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, float]:
    """Train from scratch on problems whose digests are not in `exclude` (the test questions).

    Returns:
        The model in eval mode, its tokenizer, and the seconds it took.
    """
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    tokenizer = build_tokenizer()
    model = build(recipe.architecture, tokenizer).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    streams = {
        people: problems(
            recipe.seed + people,
            people=(min(people, PEOPLE[0]), people),
            names=NAMES if people > PEOPLE[0] else NAMES[: recipe.first_names],
            exclude=exclude,
        )
        for people in range(recipe.first_people, PEOPLE[1] + 1)
    }
    curriculum = Curriculum(recipe.first_people, recipe.promote_at)
    started = time.monotonic()
    for step in range(recipe.steps):
        rows = itertools.islice(streams[curriculum.people], recipe.batch)
        ids, labels = make_batch(tokenizer, list(rows))
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        out = model(input_ids=ids, labels=labels, use_cache=False)
        optimizer.zero_grad(set_to_none=True)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curriculum.update(all_right(out.logits.detach(), labels))
        if (step + 1) % 50 == 0:
            progress = (step + 1, curriculum.people, out.loss.item(), curriculum.share, time.monotonic() - started)
            log.info("step %d  people %d  loss %.4f  all tokens right %.3f  %.0f s", *progress)
    return model.eval(), tokenizer, time.monotonic() - started


log_train_speech = logging.getLogger(__name__)

RECIPE = Recipe("speech", steps=1500, batch=64)


def extractor() -> Any:
    """Turns one second of sound into a spectrogram, [MEL_BINS, 100]."""
    return transformers.WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=1, sampling_rate=SAMPLING_RATE)


def make_batch_train_speech(
    tokenizer: PreTrainedTokenizerFast, hear: Any, texts: list[str]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Spectrograms [num_seqs, MEL_BINS, frames] float32, decoder's input and labels [num_seqs, longest] int64."""
    heard = [sound(speak(text).astype("<i2").tobytes()) for text in texts]
    features = hear(heard, sampling_rate=SAMPLING_RATE, return_tensors="pt").input_features
    rows = tokenizer(texts)["input_ids"]
    longest = max(map(len, rows)) + 1
    given = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for i, row in enumerate(rows):
        given[i, : len(row) + 1] = torch.tensor([tokenizer.bos_token_id, *row])
        labels[i, : len(row) + 1] = torch.tensor([*row, tokenizer.eos_token_id])
    return features, given, labels


def train_speech(exclude: frozenset[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, float]:
    """Train from scratch on documents that are not in `exclude` (the test documents).

    Returns:
        The model in eval mode, its tokenizer, and the seconds it took.
    """
    torch.set_num_threads(1)
    torch.manual_seed(RECIPE.seed)
    tokenizer, hear = build_tokenizer("speech"), extractor()
    model = build("speech", tokenizer).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    stream = documents(RECIPE.seed, exclude=exclude)
    started = time.monotonic()
    for step in range(RECIPE.steps):
        features, given, labels = make_batch_train_speech(tokenizer, hear, list(itertools.islice(stream, RECIPE.batch)))
        for group in optimizer.param_groups:
            group["lr"] = RECIPE.rate(step)
        out = model(input_features=features, decoder_input_ids=given, labels=labels, use_cache=False)
        optimizer.zero_grad(set_to_none=True)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            ahead = torch.nn.functional.pad(labels, (1, 0), value=IGNORED)  # all_right compares with the next token
            right = all_right(torch.nn.functional.pad(out.logits.detach(), (0, 0, 0, 1)), ahead)
            log_train_speech.info(
                "step %d  loss %.4f  documents right %.3f  %.0f s",
                *(step + 1, out.loss.item(), right, time.monotonic() - started),
            )
    return model.eval(), tokenizer, time.monotonic() - started
