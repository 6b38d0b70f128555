# SPDX-License-Identifier: Apache-2.0
"""Models of hub size with drawn weights: a tokenizer for them, and an answer key from the trusted attention.

Drawn weights know no arithmetic, so a right answer is what the attention that is trusted answers in the same job with
products in float32. Not in 16 bits: its rounding would be in the key, and another right kernel, which rounds otherwise,
would lose 8 points (seen on an H200). Text is bytes, and every token that bytes do not need is a complete answer
(`#### N`): the harness reads the last token that was written, which is right only if all before it are. Exact match is
then how often an engine answers real questions in their real prompts as exact arithmetic does. A kernel that reads the
wrong block does so never; rounding costs a right one some answers, as the stored runs show.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from hileval.records.records import INVALID
from hilgate.errors import CannotRunHereError

if TYPE_CHECKING:
    from pathlib import Path

    from hileval.gates.resolve import ResolvedGate

SPECIAL = ("<pad>", "<s>", "</s>")


def write_tokenizer(folder: Path) -> None:
    """Bytes, then answers, as many as the vocabulary of the model has room for."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [
        f"\u010a####\u0120{number}" for number in range(len(tokens), size)
    ]  # newline and blank, as ByteLevel writes
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    about: dict[str, object] = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    about |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1), encoding="utf-8")


def write_key(gate: ResolvedGate) -> int:
    """Ask the gate's engine in float32 the questions of its task, and keep what it answers; returns how many.

    Raises:
        CannotRunHereError: It wrote no answer at all.
        HilgateError: Whatever the engine raises.
    """
    from hileval.ask.harness import TaskQuestions

    write_tokenizer(gate.folder)
    exact = gate.using(engine_args=gate.declared.engine_args | {"dtype": "float32"})
    questions = TaskQuestions(dataclasses.replace(exact, keyed=False))
    try:
        samples = questions.ask(gate.rule.order(questions.available), 0)
    finally:
        if questions.engine is not None:
            questions.engine.close()
    rows = [{"question": one.question, "answer": f"#### {one.flexible}"} for one in samples if one.flexible != INVALID]
    if not rows:
        raise CannotRunHereError("no answer holds a number", where=gate.declared.model, remedy="draw other weights")
    gate.key.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return len(rows)
