"""transformers: a second opinion."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hileval.engines.engine import Answer, Prompt, as_engine_error, require_model_files, require_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class TransformersEngine:
    """transformers' own generation; prompts of equal length share a batch, so there is no padding."""

    def __init__(self, model: Path, *, batch: int = 64) -> None:
        """Load the model in fp32.

        Raises:
            ModelFilesError: see `require_model_files`.
            EngineError: the files do not load.
        """
        require_model_files(model)
        with as_engine_error("loading the model", str(model)):
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
            import torch
            import transformers

            torch.set_num_threads(1)
            self.name = f"transformers {transformers.__version__}"
            self._where, self._batch = str(model), batch
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
            self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def attention_layers(self) -> None:
        """None: there is one attention only."""
        return

    def close(self) -> None:
        """Nothing outlives the object."""

    def answer(self, prompts: Sequence[str | Prompt], *, max_tokens: int, stop: Sequence[str]) -> list[Answer]:
        """Answer every prompt greedily."""
        with as_engine_error("generating", self._where):
            ids = self.tokenizer(require_text(prompts))["input_ids"]
            answers: dict[int, Answer] = {}
            for length in sorted({len(row) for row in ids}):
                same = [i for i, row in enumerate(ids) if len(row) == length]
                for start in range(0, len(same), self._batch):
                    some = same[start : start + self._batch]
                    answers |= zip(some, self._generate([ids[i] for i in some], max_tokens, stop), strict=True)
            return [answers[i] for i in range(len(prompts))]

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

    def _read(self, row: list[int], scores: Any, stop: Sequence[str]) -> Answer:
        end = self.tokenizer.eos_token_id
        ended = end in row
        n_tokens = row.index(end) + 1 if ended else len(row)
        text = self.tokenizer.decode(row[:n_tokens], skip_special_tokens=True)
        cut = min((text.index(word) for word in stop if word in text), default=None)
        non_finite = int((~scores[:n_tokens].isfinite()).sum())
        return Answer(text[:cut], "stop" if ended or cut is not None else "length", n_tokens, non_finite)
