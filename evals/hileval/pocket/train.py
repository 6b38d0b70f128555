"""Train the pocket hybrid: seeded, one CPU thread, minutes.

Loss on the answer only; AdamW, linear warm-up, cosine decay. The number of people per question grows over the first
third, which shortens the early steps. Architecture: Mamba-2, attention, Mamba-2, attention (GraniteMoeHybrid of
transformers without experts), head_size 32 with two query heads per KV head, RoPE.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hileval.pocket.questions import PEOPLE, Problem, problems
from hileval.pocket.vocabulary import build_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import GraniteMoeHybridForCausalLM, PreTrainedTokenizerFast

log = logging.getLogger(__name__)

IGNORED = -100
"""Label that torch's cross entropy leaves out."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the weights, besides the arithmetic of the machine."""

    seed: int = 20
    steps: int = 800
    batch: int = 64
    learning_rate: float = 3e-3
    warm_up: int = 60
    eval_every: int = 100

    def rate(self, step: int) -> float:
        """Learning rate at `step`: linear warm-up, then a cosine down to a twentieth."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))

    def people(self, step: int) -> tuple[int, int]:
        """How many people a question of this step may have: the maximum is reached after a third of the steps."""
        low, high = PEOPLE
        reached = low + round((high - low) * min(1.0, 3 * step / self.steps))
        return low, reached


def build_model(tokenizer: PreTrainedTokenizerFast) -> GraniteMoeHybridForCausalLM:
    """An untrained pocket hybrid, fp32."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_multiplier=32**-0.5,
        position_embedding_type="rope",
        max_position_embeddings=512,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=128,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=16,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    return GraniteMoeHybridForCausalLM(config)


def prompt_of(problem: Problem) -> str:
    """The prompt that lm-eval's zero-shot GSM8K task makes of a question."""
    return f"Question: {problem.question}\nAnswer:"


def make_batch(tokenizer: PreTrainedTokenizerFast, rows: list[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both [num_seqs, longest] int64, padded on the right (causal, so padding is never seen)."""
    import torch

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


def token_accuracy(model: GraniteMoeHybridForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of rows whose every answer token is the argmax under teacher forcing (an estimate of exact match)."""
    import torch

    with torch.no_grad():
        predicted = model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
    wanted = labels[:, 1:]
    return float(((predicted == wanted) | (wanted == IGNORED)).all(-1).float().mean())


def train(recipe: Recipe, exclude: frozenset[str]) -> tuple[GraniteMoeHybridForCausalLM, PreTrainedTokenizerFast, float]:
    """Train from scratch on problems whose digests are not in `exclude` (the test questions).

    Returns:
        The model in eval mode, its tokenizer, and the seconds it took.
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    held_out = problems(recipe.seed + 1, exclude=exclude)
    probe = [next(held_out) for _ in range(200)]
    exclude |= {row.digest for row in probe}
    streams = {n: problems(recipe.seed + 100 + n, people=(PEOPLE[0], n), exclude=exclude) for n in range(*PEOPLE)}
    streams[PEOPLE[1]] = problems(recipe.seed + 2, exclude=exclude)
    started = time.monotonic()
    for step in range(recipe.steps):
        stream = streams[recipe.people(step)[1]]
        ids, labels = make_batch(tokenizer, [next(stream) for _ in range(recipe.batch)])
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        model.train()
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % recipe.eval_every == 0 or step + 1 == recipe.steps:
            model.eval()
            accuracy = token_accuracy(model, *make_batch(tokenizer, probe))
            spent = time.monotonic() - started
            log.info("step %d  loss %.4f  all tokens right %.3f  %.0f s", step + 1, loss.item(), accuracy, spent)
    return model.eval(), tokenizer, time.monotonic() - started
