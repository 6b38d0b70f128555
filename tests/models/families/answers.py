"""What an engine is asked, in vLLM's words, and what it answered, in ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from models.families.schedule import Request
    from vllm import RequestOutput


@dataclass(frozen=True)
class Answer:
    """What one request got."""

    tokens: tuple[int, ...]
    rows: torch.Tensor | None
    """Log-probabilities [positions, tokens] float64, of the last positions; None where not asked for."""
    gaps: tuple[float, ...]
    """By how much each token was better than the second best, in nats; empty where not asked for."""
    cached: int
    """Prompt tokens that a prefix cache had."""
    ids: torch.Tensor | None = None
    """The tokens that `rows` are of, [positions, tokens] int64, the likeliest first; None where they are all."""


def as_vllm(request: Request) -> dict[str, Any]:
    """A request as vLLM takes it."""
    if request.speech is None:
        return {"prompt_token_ids": list(request.prompt)}
    from models.tiny_whisper import SAMPLING_RATE, audio

    heard = {"prompt": "", "multi_modal_data": {"audio": (audio(request.speech), SAMPLING_RATE)}}
    return {"encoder_prompt": heard, "decoder_prompt": {"prompt_token_ids": list(request.prompt)}}


def answer_of(output: RequestOutput, *, rows: bool, best: int | None) -> Answer:
    """What vLLM's output says; `rows` and `best` as they were asked for."""
    made = output.outputs[0]
    table = [*(output.prompt_logprobs or [None])[1:], *made.logprobs]
    both = [sorted((entry.logprob for entry in row.values()), reverse=True)[:2] for row in made.logprobs]
    kept = ids = None
    if rows:
        # vLLM gives the best ones, and beside them the prompt's own token where it is none of them.
        order = [range(len(row)) if best is None else sorted(row, key=lambda t: row[t].rank)[:best] for row in table]
        kept = torch.tensor(
            [[row[t].logprob for t in tokens] for row, tokens in zip(table, order, strict=True)]
        ).double()
        ids = None if best is None else torch.tensor(order)
    return Answer(
        tokens=tuple(made.token_ids),
        rows=kept,
        gaps=tuple(first - second for first, second in both),
        cached=output.num_cached_tokens or 0,
        ids=ids,
    )
