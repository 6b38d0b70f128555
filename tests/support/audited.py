# SPDX-License-Identifier: Apache-2.0
"""Read the AMD machine code of every audited kernel: nothing unread or unknown, waits and wait states as they must be.

    TRITON_INTERPRET=0 PYTHONPATH=tests python -m support.audited --triton 3.6.0 --objects .triton/.codeobjects

What the audit compiles is compiled, or taken from its store, and handed to amdgcn's reader and static checks; gfx942
and gfx950 are translated too, so every mnemonic has a meaning and with it an oracle (tests/amdgcn/test_oracles.py),
and each `s_nop` is taken out in turn: without it there must be a hazard, or a listed reason (support/nops.py).
Of a kernel that does not compile the audit says whether that is known; here it is no finding.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections import Counter
from pathlib import Path

from support.nops import kept_for_nothing

from amdgcn.errors import UnknownInstructionError, UnreadableTextError
from amdgcn.launch import ARCHES
from amdgcn.text import parse
from amdgcn.translate import translate
from amdgcn.wait_states import check_wait_states
from amdgcn.waits import check_waits
from pagedkv.audit.__main__ import check_environment, compiles_all
from pagedkv.audit.cases import SOURCES, select
from pagedkv.audit.compile import Specialisation, compile_kernel, start_compiler
from pagedkv.audit.isolation import run_isolated
from pagedkv.audit.machine import LDS_GRANULES
from pagedkv.audit.objects import ObjectStore, object_key
from pagedkv.audit.runner import make_plan


def check(text: str) -> tuple[int, str]:
    """Instructions of a text, and what is wrong with it in words."""
    try:
        program = parse(text)
        hazards, nops = [*check_waits(program), *check_wait_states(program)], list[str]()
        if program.arch in ARCHES:
            translate(program)
            nops = kept_for_nothing(program)
    except (UnreadableTextError, UnknownInstructionError) as error:
        return 0, str(error)
    return len(program.instructions), "; ".join(map(str, [*hazards, *nops]))


def find_or_check(wanted: Specialisation, store: ObjectStore | None) -> tuple[int, str]:
    """The same of a kernel, compiled unless the store has it."""
    key = object_key(wanted) if store else ""
    compiled = store.get(key) if store else None
    if compiled is None:
        compiled = compile_kernel(wanted)
        if store:
            store.put(key, compiled)
    return check(compiled.text)


def main() -> int:
    """Print a line for each arch and what is wrong; exit status 1 where anything is."""
    parser = argparse.ArgumentParser(prog="support.audited", description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", nargs="+", choices=tuple(LDS_GRANULES), default=tuple(LDS_GRANULES))
    parser.add_argument("--source", nargs="+", choices=tuple(SOURCES), default=["ours", "vllm"])
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT")
    parser.add_argument("--triton", required=True, metavar="VERSION")
    parser.add_argument("--objects", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, default=os.environ.get("HILGATE_OUT"), help="folder for findings.jsonl")
    options = parser.parse_args()
    check_environment(options.triton)
    start_compiler()
    plan = make_plan(select(options.only, options.arch, options.source))
    store = ObjectStore(options.objects) if options.objects and not compiles_all(os.environ) else None
    kernels, findings, totals = list(plan.kernels), [], Counter[str]()
    calls = [functools.partial(find_or_check, kernel, store) for kernel in kernels]
    for index, result, _ in run_isolated(calls, jobs=max(1, (os.cpu_count() or 1) - 1), timeout=300):
        arch, name = kernels[index].arch, plan.kernels[kernels[index]]
        if not isinstance(result, tuple):
            totals[f"{arch} that do not compile"] += 1
            continue
        count, wrong = result
        totals[f"{arch} kernels"] += 1
        totals[f"{arch} instructions"] += count
        totals[f"{arch} wrong"] += bool(wrong)
        findings.append(
            {
                "id": name,
                "outcome": "fail" if wrong else "pass",
                "message": wrong,
                "labels": {"arch": arch, "kernel": kernels[index].kernel},
                "numbers": {"instructions": count},
            }
        )
        if wrong:
            print(f"{name}: {wrong}", flush=True)  # noqa: T201
    for arch in options.arch:
        words = ("kernels", "instructions", "wrong", "that do not compile")
        counts = ", ".join(f"{totals[f'{arch} {what}']} {what}" for what in words)
        print(f"{arch}, Triton {options.triton}: {counts}")  # noqa: T201
    if options.out:
        Path(options.out).mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(each) + "\n" for each in findings)
        (Path(options.out) / "findings.jsonl").write_text(lines)
    return int(not findings or any(each["outcome"] == "fail" for each in findings))


if __name__ == "__main__":
    sys.exit(main())
