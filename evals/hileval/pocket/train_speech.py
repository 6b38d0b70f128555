"""Train the pocket speech model: seeded, one CPU thread, two minutes. No curriculum: the task is found at once."""

from __future__ import annotations

import itertools
import logging
import time
from typing import TYPE_CHECKING, Any

import torch
import transformers

from hileval.documents import sound
from hileval.pocket.architectures import MEL_BINS, build
from hileval.pocket.speech import SAMPLING_RATE, documents, speak
from hileval.pocket.train import IGNORED, Recipe, all_right
from hileval.pocket.vocabulary import build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

log = logging.getLogger(__name__)

RECIPE = Recipe("speech", steps=1500, batch=64)


def extractor() -> Any:
    """Turns one second of sound into a spectrogram, [MEL_BINS, 100]."""
    return transformers.WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=1, sampling_rate=SAMPLING_RATE)


def make_batch(
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
        features, given, labels = make_batch(tokenizer, hear, list(itertools.islice(stream, RECIPE.batch)))
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
            log.info(
                "step %d  loss %.4f  documents right %.3f  %.0f s",
                *(step + 1, out.loss.item(), right, time.monotonic() - started),
            )
    return model.eval(), tokenizer, time.monotonic() - started
