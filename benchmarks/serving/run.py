# SPDX-License-Identifier: Apache-2.0
"""Whole models in vLLM, our attention beside TRITON_ATTN, in one run: `python -m benchmarks.serving.run` on a GPU.

Both engines live beside each other and take turns. Weights are drawn, the same in both. Tokens that were timed are then
checked: where the answers of two engines part, their distributions may differ by what rounding does to the peer alone,
the tokens must be a tie within it, and the same rule must notice when a block of each prompt is replaced.

Exit status: 0 all ran and are right, 1 answers of ours are wrong, 2 misuse, 5 no GPU here, or a model that did not run.
"""

# ruff: noqa: T201  a command line prints

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..run import commit_of, facts
from . import engine, judge
from .models import CASES, MODELS, SMOKE, Model, ServingCase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm import LLM

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 3
"""The first compiles what these shapes need, and is not counted."""
CHECKED = 4
"""Requests of a case whose distributions are compared."""


class UnservedModelError(Exception):
    """An engine that should run our attention runs another, or the other way round."""


def measure(model: Model, cases: Sequence[ServingCase], *, gpu: bool) -> tuple[judge.ServingVerdict, list[judge.Speed]]:
    """Start both engines, time the cases in turns, compare."""
    with contextlib.ExitStack() as stack:
        both = []
        for own in (True, False):
            both.append(engine.start(model.folder(tiny=not gpu), ours=own, gpu=gpu))
            stack.callback(both[-1].llm_engine.engine_core.shutdown)
        return _measured(model, cases, both)


def _measured(
    model: Model, cases: Sequence[ServingCase], both: list[LLM]
) -> tuple[judge.ServingVerdict, list[judge.Speed]]:
    vocabulary = both[0].llm_engine.vllm_config.model_config.get_vocab_size()
    block = both[0].llm_engine.vllm_config.cache_config.block_size
    speeds: list[judge.Speed] = []
    asked_again, answers, changed, parted = [], [], [], []
    for number, case in enumerate(cases):
        asked = engine.prompts(case, vocabulary, number)
        drives: list[list[engine.Drive]] = [[], []]
        for _ in range(ROUNDS):
            for which, llm in enumerate(both):
                drives[which].append(engine.drive(llm, asked, case.answers))
        drives = [taken[1:] for taken in drives]
        tokens = case.requests * case.prompt
        places = [judge.parting(a, b) for a, b in zip(drives[0][-1].tokens, drives[1][-1].tokens, strict=True)]
        speeds.append(
            judge.Speed(
                case.name,
                (judge.decode(drives[0]), judge.decode(drives[1])),
                (judge.prefill(drives[0], tokens), judge.prefill(drives[1], tokens)),
                case.requests,
                places.count(None),
            )
        )
        print(f"{model.name} {speeds[-1]}", file=sys.stderr, flush=True)
        other = engine.prompts(case, vocabulary, 1000 + number)
        for index in range(min(CHECKED, case.requests)):
            place = places[index]
            answer = list(drives[0][-1].tokens[index][: -1 if place is None else place])
            begin = min(block, case.prompt // 2) // 2
            end = begin + min(block, case.prompt // 4)
            asked_again.append(asked[index])
            answers.append(answer)
            parted.append(None if place is None else tuple(side[-1].tokens[index][place] for side in drives))
            changed.append([*asked[index][:begin], *other[index][begin:end], *asked[index][end:], *answer])
    _require(both)
    sequences = [[*prompt, *answer] for prompt, answer in zip(asked_again, answers, strict=True)]
    want = engine.ranked(both[1], sequences, judge.ASKED)
    others = (
        engine.stepped(both[0], asked_again, answers, judge.ASKED),
        engine.stepped(both[1], asked_again, answers, judge.ASKED),
        engine.ranked(both[1], changed, judge.ASKED),
    )
    ours, rounding, control = (judge.Distances.between(rows, want) for rows in others)
    lead = max([0.0, *(judge.lead(row, *pair) for row, pair in zip(want, parted, strict=True) if pair)])
    return judge.ServingVerdict(model.name, model.layers, block, ours, rounding, control, lead), speeds


def _require(both: list[LLM]) -> None:
    """That each engine ran the attention it is here for."""
    from pagedkv.vllm_plugin.inspect import OURS, served_layers

    for llm, own in zip(both, (True, False), strict=True):
        backends = {layer["backend"] for layer in served_layers(llm)}
        if not backends or any((backend in OURS) != own for backend in backends):
            raise UnservedModelError(
                f"the engine with {'ours' if own else 'the peer'} ran {', '.join(sorted(backends))}"
            )


def main(arguments: list[str] | None = None) -> int:
    """Read the command line, run, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.run", description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=list(MODELS), help="run only this model; may be repeated")
    parser.add_argument(
        "--case", action="append", choices=[case.name for case in CASES], help="run only this case; may be repeated"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results" / "serving.jsonl", help="file for the results (JSON lines)"
    )
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="serve tiny models on a CPU and compare the answers; the times mean nothing",
    )
    given = parser.parse_args(arguments)
    import torch

    if not given.smoke and not torch.cuda.is_available():
        print("needs a GPU\n  to do: run it on one, or --smoke here", file=sys.stderr)
        return 5
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    cases = SMOKE if given.smoke else [case for case in CASES if not given.case or case.name in given.case]
    about = facts(commit_of(given.commit), gpu=not given.smoke)
    rows: list[dict[str, Any]] = []
    missing = 0
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", encoding="utf-8") as file:
        for name in given.model or MODELS:
            try:
                verdict, speeds = measure(MODELS[name], cases, gpu=not given.smoke)
            except Exception as error:  # noqa: BLE001  of the other models more can be learned
                print(f"{name} did not run: {type(error).__name__}: {error}"[:600], file=sys.stderr, flush=True)
                missing += 1
                continue
            print(verdict, file=sys.stderr, flush=True)
            for row in judge.records(verdict, speeds, about):
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
    print(judge.table(rows))
    if not all(row["right"] for row in rows):
        return 1
    return 5 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
