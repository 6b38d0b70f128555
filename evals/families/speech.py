# SPDX-License-Identifier: Apache-2.0
"""A tiny speech model (encoder and decoder): its checkpoint with a processor, the audio it hears, its reference.

The decoder attends to itself and to the encoder's output: two KV cache groups of one pool in vLLM.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

if TYPE_CHECKING:
    from pathlib import Path

SAMPLING_RATE = 16_000  # of a second: 100 frames, which the encoder halves


def save(config: WhisperConfig, folder: Path, dtype: torch.dtype) -> None:
    """Write the model with the processor that vLLM asks for; the same seed gives the same weights everywhere."""
    torch.manual_seed(3)
    WhisperForConditionalGeneration(config).to(dtype).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    letters = ["<|endoftext|>", "<|startoftranscript|>", *map(chr, range(33, 123))]
    files = {name: folder / name for name in ("vocab.json", "merges.txt")}
    files["vocab.json"].write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    files["merges.txt"].write_text("#version: 0.2\n")
    WhisperTokenizer(*map(str, files.values())).save_pretrained(folder)


def audio(seed: int) -> np.ndarray:
    """One second of noise, [SAMPLING_RATE] float32."""
    return np.random.default_rng(seed).standard_normal(SAMPLING_RATE).astype(np.float32)


def load(
    folder: Path, dtypes: tuple[torch.dtype, ...]
) -> tuple[WhisperForConditionalGeneration | WhisperFeatureExtractor, ...]:
    """The checkpoint in each dtype, and last what makes features of sound."""
    read = WhisperForConditionalGeneration.from_pretrained
    models = (read(folder, dtype=dtype, attn_implementation="eager").eval() for dtype in dtypes)
    return (*models, WhisperFeatureExtractor.from_pretrained(folder))
