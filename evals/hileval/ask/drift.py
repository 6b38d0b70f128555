# SPDX-License-Identifier: Apache-2.0
"""Ask ours and the engine's own attention for distributions, each in its own process: the sides of a drift gate."""

from __future__ import annotations

import gzip
import subprocess
import sys
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hileval.ask.drawn import write_tokenizer
from hileval.engines import EngineError, Rows
from hileval.gates.drift import Compared, Drift, Floor, judge_drift
from hileval.gates.judge import check_backend
from hilgate.errors import RecordsError
from hilgate.model import StrictModel
from hilgate.model.record import Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hileval.gates.declare import DriftGate, EngineName
    from hileval.gates.resolve import ResolvedGate

BLOCK = 16
"""Tokens that the positive control replaces."""
KEPT = 512
"""Last places of a long sequence that are compared: the contexts are longest there. Short sequences hold the others."""
SideName = Literal["ours", "peer", "second"]


class Side(StrictModel):
    """What one engine said."""

    name: str
    """Engine and version."""
    served: Check | None
    read: Rows
    """After each token of each sequence but the first."""
    asked: list[list[int]]
    """Prompts of the sequences: the token ids that each begins with."""
    written: list[list[int]]
    """Token ids that the engine generated after each prompt."""
    wrote: Rows
    """Distributions from which the generated tokens were drawn."""
    read_again: dict[SideName, Rows] = Field(default_factory=dict)
    """Of the peer: the places of what each side wrote, itself included, where it is given all tokens at once."""
    read_alone: Rows = Field(default_factory=list)
    """Of the peer: `read` again with each sequence alone, so that matrix products have another shape."""
    changed: Rows = Field(default_factory=list)
    """Of the peer: `read` again after one block of each sequence was replaced."""

    def pack(self, file: Path) -> None:
        """Write it, packed."""
        file.write_bytes(gzip.compress(self.model_dump_json().encode(), mtime=0))

    @classmethod
    def unpack(cls, file: Path) -> Side:
        """Read it.

        Raises:
            RecordsError: It is missing or not what was written.
        """
        try:
            return cls.model_validate_json(gzip.decompress(file.read_bytes()))
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise RecordsError(
                f"not the answers of a drift gate: {type(error).__name__}",
                where=str(file),
                remedy="name the folder that `gate` wrote",
            ) from error


def sequences_of(gate: ResolvedGate, drift: DriftGate) -> list[list[int]]:
    """Fixed sequences of token ids: questions with their right answers, one each or joined to a length.

    Raises:
        RecordsError: The task holds too little text, or the model's tokenizer cannot be loaded.
    """
    from hileval.ask.harness import documents_of

    encode = _encoder(gate)
    texts = (f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in documents_of(gate))
    tokens = map(encode, texts)
    found: list[list[int]] = []
    for length, times in drift.lengths.items():
        for _ in range(times):
            one: list[int] = []
            while not one or len(one) < length:
                if (more := next(tokens, None)) is None:
                    what = f"too little text for {times} sequences of {length} tokens"
                    remedy = "ask for fewer or shorter sequences (`lengths` of the drift gate), or name a longer task"
                    raise RecordsError(what, where=gate.declared.task, remedy=remedy)
                one += more
            found.append(one[: length or None])
    return found


def _encoder(gate: ResolvedGate) -> Callable[[str], list[int]]:
    """The model's tokenizer.

    transformers is asked only where there is no plain file: it imports Triton, which must not happen before an engine
    has said whether kernels are interpreted.
    """
    folder = gate.folder
    if gate.declared.weights == "drawn":
        write_tokenizer(folder)
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
        plain.no_truncation()
        return lambda text: list(plain.encode(text, add_special_tokens=False).ids)
    from transformers import AutoTokenizer

    try:
        trusted = bool(gate.declared.engine_args.get("trust_remote_code", False))
        slow = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    except (OSError, ValueError, ImportError) as error:
        raise RecordsError(
            f"no tokenizer: {str(error).splitlines()[0]}", where=gate.declared.model, remedy="fetch the whole model"
        ) from error
    return lambda text: list(slow.encode(text, add_special_tokens=False))


def ask_side(which: SideName, gate: ResolvedGate, drift: DriftGate, given: dict[SideName, Side] | None = None) -> Side:
    """Ask one engine everything; the peer, which is `given` the other sides, about what they wrote too."""
    from hileval.engines.transformers_engine import TransformersEngine
    from hileval.engines.vllm_engine import VllmEngine

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
                    for writer, other in ((given or {}) | {which: side}).items()
                },
                "read_alone": _kept([engine.read([tokens])[0] for tokens in sequences]),
                "changed": [row[behind - 1 :] for row, (_, behind) in zip(rows, replaced, strict=True)],
            }
        )
    finally:
        engine.close()


def changed(tokens: list[int], other: list[int]) -> tuple[list[int], int]:
    """A sequence with one block in its middle, or near its end, taken from another one; and the place behind it."""
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


def compare_sides(name: str, ours: Side, peer: Side, floor: Floor, second: Side | None = None) -> list[Check]:
    """The checks of a drift gate, and who served it."""
    reads = [Drift.rounding(peer.read_alone, peer.read)]
    writes = [Drift.rounding(peer.wrote, peer.read_again["peer"])]
    if second is not None:
        reads.append(Drift.rounding(second.read, peer.read))
        writes.append(Drift.rounding(second.wrote, peer.read_again["second"]))
    behind = [row[-len(changed_rows) :] for row, changed_rows in zip(peer.read, peer.changed, strict=True)]
    served = [side.served for side in (ours, peer, second) if side is not None and side.served is not None]
    another = _second_is_another(name, peer, second)
    checks = judge_drift(
        name,
        Compared(Drift.between(ours.read, peer.read), Drift.largest(*reads)),
        Compared(Drift.between(ours.wrote, peer.read_again["ours"]), Drift.largest(*writes)),
        Drift.between(peer.changed, behind),
        floor,
    )
    if any(check.outcome is not Outcome.PASS for check in served):
        checks = [check.model_copy(update={"outcome": Outcome.DID_NOT_RUN}) for check in checks]
    return [*served, *another, *checks]


def _second_is_another(name: str, peer: Side, second: Side | None) -> list[Check]:
    """Whether the second trusted attention is not the peer's own: from itself it differs too little."""
    if second is None or peer.served is None or second.served is None:
        return []
    backends = [side.served.labels.get("backend") for side in (peer, second) if side.served is not None]
    if None in backends or backends[0] != backends[1]:
        return []
    message = (
        f"the second trusted attention is the peer's own, {backends[0]}: what two attentions differ is not known here; "
        "name two backends, `peer` and `second`, that this machine serves differently"
    )
    return [Check(id=f"{name}/second", outcome=Outcome.INCONCLUSIVE, message=message)]


def run_drift(name: str, drift: DriftGate, out: Path) -> list[Check]:
    """Every side in a process of its own: a plugin cannot leave one that it has joined. `out` keeps their answers.

    Raises:
        EngineError: A side ended without an answer.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = side_files(drift, out)
    for which, file in files.items():
        file.unlink(missing_ok=True)
        others = [other for other in files if other != "peer"] if which == "peer" else []
        given = [word for other in others for word in ("--given", f"{other}={files[other]}")]
        command = [sys.executable, "-m", "hileval", "drift-side", name, which, "--file", str(file), *given]
        if status := subprocess.run(command, check=False).returncode:
            raise EngineError(f"{which} ended with status {status}", where=name, remedy="read what it says above")
    return judge_sides(name, drift, out)


def judge_sides(name: str, drift: DriftGate, out: Path) -> list[Check]:
    """The checks of a drift gate from the answers in a folder.

    Raises:
        RecordsError: A side is missing or damaged.
    """
    sides = {which: Side.unpack(file) for which, file in side_files(drift, out).items()}
    return compare_sides(name, sides["ours"], sides["peer"], drift.floor, sides.get("second"))


def side_files(drift: DriftGate, out: Path) -> dict[SideName, Path]:
    """Where the answers of each side are, in the order of asking: the peer reads what the others wrote."""
    names: tuple[SideName, ...] = ("ours", "second", "peer") if drift.second else ("ours", "peer")
    return {which: out / f"{which}.json.gz" for which in names}
