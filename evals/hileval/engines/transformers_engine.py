# SPDX-License-Identifier: Apache-2.0
"""transformers as a second opinion: of decoders, and of speech models, where faults of cross attention are planted."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hileval.distances import ASKED, Rows
from hileval.engines import (
    SAMPLING_RATE,
    Answer,
    EngineError,
    Prompt,
    as_engine_error,
    require_model_files,
    require_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


BATCH = 64
"""Prompts that are answered at once."""
FP8_CODES = ("fp8", "fp8_e4m3")
"""Words of vLLM for a cache of float8_e4m3fn."""
CODED = "fp8_codes"
"""Name of the attention with codes in transformers' registers."""


def _register_codes() -> None:
    """Torch's own attention, over keys and values that were rounded to e4m3fn as a cache of such codes has them."""
    import torch
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    most = torch.finfo(torch.float8_e4m3fn).max

    def attention(module: Any, query: Any, key: Any, value: Any, *others: Any, **named: Any) -> Any:
        key, value = (side.clamp(-most, most).to(torch.float8_e4m3fn).to(side.dtype) for side in (key, value))
        return plain(module, query, key, value, *others, **named)

    ALL_ATTENTION_FUNCTIONS.register(CODED, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(CODED, sdpa_mask)


class TransformersEngine:
    """transformers' own generation, greedy; prompts of equal length share a batch, so there is no padding."""

    auto_class = "AutoModelForCausalLM"

    def __init__(self, model: Path, *, kv_cache_dtype: str = "auto") -> None:
        """Load the model in fp32.

        Args:
            model: Its folder.
            kv_cache_dtype: vLLM's word for what keys and values are rounded to: `auto` is not at all, `fp8` and
                `fp8_e4m3` are e4m3fn without a scale.

        Raises:
            ModelFilesError: see `require_model_files`.
            EngineError: the files do not load, or K and V cannot be rounded so.
        """
        require_model_files(model)
        with as_engine_error("loading the model", str(model)):
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
            import torch
            import transformers

            torch.set_num_threads(1)
            self.name = f"transformers {transformers.__version__}"
            self._where = str(model)
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
            loader = getattr(transformers, self.auto_class)
            self.model = loader.from_pretrained(model, dtype=torch.float32).eval()
        if kv_cache_dtype != "auto":
            if kv_cache_dtype not in FP8_CODES:
                raise EngineError(
                    f"kv_cache_dtype {kv_cache_dtype!r} is not known here",
                    where=self._where,
                    remedy=f"take auto, {', '.join(FP8_CODES)}, or another peer",
                )
            _register_codes()
            self.model.set_attn_implementation(CODED)

    def attention_layers(self) -> None:
        """None: there is one attention only."""
        return

    def close(self) -> None:
        """Nothing outlives the object."""

    def answer(
        self, prompts: Sequence[str | list[int] | Prompt], *, max_tokens: int, stop: Sequence[str]
    ) -> list[Answer]:
        """Answer every prompt greedily."""
        with as_engine_error("generating", self._where):
            ids = self.tokenizer(require_text(prompts))["input_ids"]
            answers: dict[int, Answer] = {}
            for length in sorted({len(row) for row in ids}):
                same = [i for i, row in enumerate(ids) if len(row) == length]
                for start in range(0, len(same), BATCH):
                    some = same[start : start + BATCH]
                    answers |= zip(some, self._generate([ids[i] for i in some], max_tokens, stop), strict=True)
            return [answers[i] for i in range(len(prompts))]

    def read(self, sequences: Sequence[Sequence[int]]) -> Rows:
        """The ASKED likeliest tokens before each token but the first, with log-probabilities; all tokens are given."""
        import torch

        with as_engine_error("reading", self._where), torch.no_grad():
            return [as_rows(self.model(torch.tensor([list(tokens)])).logits[0, :-1]) for tokens in sequences]

    def write(self, asked: Sequence[Sequence[int]], tokens: int) -> tuple[list[list[int]], Rows]:
        """Write that many tokens after each beginning, greedily; returns them and the distributions they came from."""
        import torch

        with as_engine_error("writing", self._where), torch.no_grad():
            out = [
                self.model.generate(
                    input_ids=torch.tensor([list(prompt)]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=tokens,
                    min_new_tokens=tokens,
                    eos_token_id=None,
                    do_sample=False,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
                for prompt in asked
            ]
            written = [each.sequences[0, -tokens:].tolist() for each in out]
            return written, [as_rows(torch.cat(each.logits)) for each in out]

    def _generate(self, ids: list[list[int]], max_tokens: int, stop: Sequence[str]) -> list[Answer]:
        import torch

        tokens = torch.tensor(ids)
        with torch.no_grad():
            out = self.model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_tokens,
                do_sample=False,
                output_scores=True,
                return_dict_in_generate=True,
            )
        written = out.sequences[:, tokens.shape[1] :]
        scores = torch.stack(out.scores, 1).log_softmax(-1).gather(-1, written[..., None])[..., 0]
        return [self._read(row, score, stop) for row, score in zip(written.tolist(), scores, strict=True)]

    def _read(self, row: list[int], scores: Any, stop: Sequence[str] = ()) -> Answer:
        """The answer of a row of token ids, with the log-probability of each, [tokens]."""
        end = self.tokenizer.eos_token_id
        ended = end in row
        n_tokens = row.index(end) + 1 if ended else len(row)
        text = self.tokenizer.decode(row[:n_tokens], skip_special_tokens=True)
        cut = min((text.index(word) for word in stop if word in text), default=None)
        non_finite = int((~scores[:n_tokens].isfinite()).sum())
        return Answer(text[:cut], "stop" if ended or cut is not None else "length", n_tokens, non_finite)


def as_rows(logits: Any) -> list[dict[int, float]]:
    """Log-probabilities of the likeliest words at each place, from logits [places, vocabulary]."""
    best = logits.double().log_softmax(-1).topk(min(ASKED, logits.shape[-1]))
    return [
        dict(zip(tokens, values, strict=True))
        for tokens, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


class SpeechEngine(TransformersEngine):
    """Greedy decoding, one forward pass per token, of many sounds at once."""

    auto_class = "AutoModelForSpeechSeq2Seq"

    def __init__(self, model: Path) -> None:
        """Load the model and its extractor of features; see the base class."""
        super().__init__(model)
        with as_engine_error("loading the feature extractor", self._where):
            import transformers

            self._features = transformers.AutoFeatureExtractor.from_pretrained(model)

    def answer(
        self, prompts: Sequence[str | list[int] | Prompt], *, max_tokens: int, stop: Sequence[str]
    ) -> list[Answer]:
        """Transcribe the audio of every prompt.

        Raises:
            EngineError: A prompt without audio, prompts with different texts, or an option that this engine lacks.
        """
        sounds = [prompt for prompt in prompts if isinstance(prompt, Prompt) and prompt.modality == "audio"]
        if (
            len(sounds) < len(prompts)
            or stop
            or {(sound.text, sound.repetition_penalty) for sound in sounds} - {(sounds[0].text, 1.0)}
        ):
            raise EngineError(
                "only audio whose prompts begin alike, without stop words or penalty",
                where=self._where,
                remedy="use vLLM",
            )
        with as_engine_error("generating", self._where):
            start = self.tokenizer(sounds[0].text, add_special_tokens=False)["input_ids"]
            answers: list[Answer] = []
            for first in range(0, len(sounds), BATCH):
                media = [sound.media for sound in sounds[first : first + BATCH]]
                answers += self._transcribe(media, start, max_tokens)
            return answers

    def _transcribe(self, media: list[Any], start: list[int], max_tokens: int) -> list[Answer]:
        import torch

        features = self._features(media, sampling_rate=SAMPLING_RATE, return_tensors="pt").input_features
        end = self.tokenizer.eos_token_id
        with torch.no_grad():
            frames = self.model.get_encoder()(features)
            tokens, cache = torch.tensor([start] * len(media)), None
            written: list[torch.Tensor] = []
            scores: list[torch.Tensor] = []
            while len(written) < max_tokens and not (written and (torch.stack(written) == end).any(0).all()):
                shown = {"encoder_outputs": frames, "past_key_values": cache}
                out = self.model(decoder_input_ids=tokens, use_cache=True, **shown)
                cache = out.past_key_values
                best = out.logits[:, -1].log_softmax(-1).max(-1)
                written.append(best.indices)
                scores.append(best.values)
                tokens = best.indices[:, None]
        rows = zip(torch.stack(written, 1).tolist(), torch.stack(scores, 1), strict=True)
        return [self._read(row, score) for row, score in rows]
