# SPDX-License-Identifier: Apache-2.0
"""Ask ours and the engine's own attention for distributions, each in its own process: the sides of a drift gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hileval.gates.served import check_backend
from hileval.records.answers import Side
from hilgate.errors import RecordsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hileval.distances import Rows
    from hileval.gates.declare import DriftGate, EngineName
    from hileval.gates.resolve import ResolvedGate
    from hileval.records.answers import SideName

BLOCK = 16
"""Tokens that the positive control replaces."""
KEPT = 512
"""Last places of a long sequence that are compared: the contexts are longest there. Short sequences hold the others."""


def sequences_of(gate: ResolvedGate, drift: DriftGate) -> list[list[int]]:
    """Fixed sequences of token ids: questions with their right answers, one each or joined to a length.

    Raises:
        RecordsError: The task holds too little text, or the model's tokenizer cannot be loaded.
    """
    from hileval.ask.harness import documents_of

    texts = (f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in documents_of(gate))
    tokens = _encoded(texts, gate)
    sequences: list[list[int]] = []
    for length, times in drift.lengths.items():
        for _ in range(times):
            sequence: list[int] = []
            while not sequence or len(sequence) < length:
                if (text := next(tokens, None)) is None:
                    what = f"too little text for {times} sequences of {length} tokens"
                    remedy = "ask for fewer or shorter sequences (`lengths` of the drift gate), or name a longer task"
                    raise RecordsError(what, where=gate.declared.task, remedy=remedy)
                sequence += text
            sequences.append(sequence[: length or None])
    return sequences


def _encoded(texts: Iterable[str], gate: ResolvedGate) -> Iterator[list[int]]:
    """Token ids of each text, by the model's tokenizer.

    transformers is asked only where there is no plain file: it imports Triton, which must not happen before an engine
    has said whether kernels are interpreted.
    """
    folder = gate.folder
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
        plain.no_truncation()
        for text in texts:
            yield list(plain.encode(text, add_special_tokens=False).ids)
        return
    from transformers import AutoTokenizer

    try:
        trusted = bool(gate.declared.engine_args.get("trust_remote_code", False))
        slow = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    except (OSError, ValueError, ImportError) as error:
        raise RecordsError(
            f"no tokenizer: {str(error).splitlines()[0]}", where=gate.declared.model, remedy="fetch the whole model"
        ) from error
    for text in texts:
        yield list(slow.encode(text, add_special_tokens=False))


def ask_side(which: SideName, gate: ResolvedGate, given: Mapping[SideName, Side]) -> Side:
    """Ask one engine of a drift gate everything; the peer, which is `given` the others, about what they wrote too."""
    from hileval.engines.transformers_engine import TransformersEngine
    from hileval.engines.vllm_engine import VllmEngine

    drift = gate.drift
    assert drift is not None
    chosen: EngineName = "transformers" if which == "peer" and drift.peer == "transformers" else "vllm"
    backends = {"ours": gate.declared.attention_backend, "peer": drift.peer, "second": drift.second}
    arguments = gate.declared.engine_args | drift.engine_args
    gate = replace(gate, engine=chosen).using(
        attention_backend=backends[which] if chosen == "vllm" else None,
        env=gate.declared.env if which == "ours" else {},
        engine_args=arguments,
    )
    sequences = sequences_of(gate, drift)
    asked = [tokens[: max(2, len(tokens) * 3 // 5)] for tokens in sequences]
    engine = (
        TransformersEngine(gate.folder, kv_cache_dtype=str(arguments.get("kv_cache_dtype", "auto")))
        if chosen == "transformers"
        else gate.start()
    )
    assert isinstance(engine, (VllmEngine, TransformersEngine))
    try:
        read = _kept(engine.read(sequences))
        written, wrote = engine.write(asked, drift.written)
        side = Side(
            name=engine.name,
            served=check_backend(gate, engine),
            read=read,
            asked=asked,
            written=written,
            wrote=wrote,
        )
        if which != "peer":
            return side
        replaced = [changed(tokens, sequences[i - 1]) for i, tokens in enumerate(sequences)]
        rows = engine.read([tokens for tokens, _ in replaced])
        return side.model_copy(
            update={
                "read_again": {
                    writer: _last(engine.read(_joined(other)), other)
                    for writer, other in {**given, which: side}.items()
                },
                "read_alone": _kept([engine.read([tokens])[0] for tokens in sequences]),
                "changed": [row[after - 1 :] for row, (_, after) in zip(rows, replaced, strict=True)],
            }
        )
    finally:
        engine.close()


def changed(tokens: list[int], other: list[int]) -> tuple[list[int], int]:
    """A sequence with one block in its middle, or near its end, taken from another one; and the place after it."""
    size = min(BLOCK, len(tokens) // 3)
    begin = max((len(tokens) - size) // 2, len(tokens) - KEPT // 2)
    taken = [(other * (begin + size))[begin + i] for i in range(size)]
    return [*tokens[:begin], *taken, *tokens[begin + size :]], begin + size


def _kept(rows: Rows) -> Rows:
    return [row[-KEPT:] for row in rows]


def _joined(side: Side) -> list[list[int]]:
    return [[*asked, *written] for asked, written in zip(side.asked, side.written, strict=True)]


def _last(rows: Rows, side: Side) -> Rows:
    """The places at which the written tokens were chosen; `read` gives the row before each token but the first."""
    return [row[len(asked) - 1 :] for row, asked in zip(rows, side.asked, strict=True)]
