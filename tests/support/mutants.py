# SPDX-License-Identifier: Apache-2.0
"""Mutation testing of machine code: seeded changes of one instruction, and how many of them are noticed, by class.

    TRITON_INTERPRET=0 PYTHONPATH=tests python -m support.mutants support.launches --arch gfx942 --count 200

A module names its launches in `CASES`: kernel -> functions without arguments that launch it on CPU tensors and say what
is wrong with the result (nothing: it is right). All launches of a kernel have the same machine code and other data. A
change is noticed by the static checks, by a fault, or by a result that some launch calls wrong. A survivor that leaves
every register as it was, at each execution, is no change and counts in no rate; the others are absorbed later.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from amdgcn import machine
from amdgcn.errors import LaunchError, ProgramFault, UnknownInstructionError, UnreadableTextError
from amdgcn.launch import ARCHES, amdgcn
from amdgcn.text import parse
from amdgcn.translate import Probe, translate
from amdgcn.wait_states import check_wait_states
from amdgcn.waits import check_waits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amdgcn.text import Instruction, Program
    from amdgcn.translate import Translated

    Case = Callable[[], str]

SHARES = {"waits": 0.15, "barriers": 0.05, "offsets": 0.15, "registers": 0.2, "drops": 0.45}
"""Kind of a change -> share of them."""
CLASSES = {"waits and barriers": 0.95, "offsets and registers": 0.85, "drops": 0.8}
"""What of each must be noticed."""
_LINE = re.compile(r"\t[a-z]")
_MEMORY = re.compile(r"\t(?:ds_(?!swizzle|b?permute)|global_|buffer_|s_load)")
_VECTOR = re.compile(r"\t(?:v_|ds_|global_|buffer_)[^,]*,.*\bv\d+\b")
_CONTROL = re.compile(r"\ts_(?:nop|waitcnt|barrier|branch|cbranch|endpgm|setprio|sleep)")


@dataclass(frozen=True)
class Mutant:
    """One change and what became of it."""

    kernel: str
    kind: str
    instruction: str
    change: str
    noticed: str
    """By what; empty if by nothing."""
    matters: bool = True
    """Whether a register was ever another; false of a survivor that is no change for these launches."""


def sites(text: str, executed: Callable[[int], bool]) -> dict[str, list[int]]:
    """Class -> lines that can be changed so, of the instructions that are executed."""
    lines, found = text.splitlines(), {name: list[int]() for name in SHARES}
    code = [k for k, line in enumerate(lines) if _LINE.match(line)]
    for index, k in enumerate(code):
        line = lines[k]
        if not executed(index):
            continue
        if line.startswith("\ts_waitcnt"):
            found["waits"].append(k)
        elif line.startswith("\ts_barrier"):
            found["barriers"].append(k)
        elif not _CONTROL.match(line):
            found["drops"].append(k)
        if _MEMORY.match(line):
            found["offsets"].append(k)
        if _VECTOR.match(line):
            found["registers"].append(k)
    return found


def change(line: str, kind: str, rng: random.Random) -> str:
    """The line with its offset or one of its source registers changed; nothing for the other classes."""
    if kind == "offsets":
        if "s_load" in line:
            return re.sub(r"0x([0-9a-f]+)\s*$", lambda found: hex(int(found[1], 16) + 4), line)
        pair = re.match(r"\tds_(?:read|write)2", line)
        found = re.search(r"offset[01]:(\d+)" if pair else r"offset:(\d+)", line)
        if found:
            return f"{line[: found.start(1)]}{int(found[1]) + (1 if pair else 16)}{line[found.end(1) :]}"
        return f"{line} offset0:1" if pair else f"{line} offset:16"
    if kind == "registers":
        head, tail = line.split(",", 1)
        found = rng.choice(list(re.finditer(r"\bv(\d+)\b", tail)))
        number = abs(int(found[1]) + rng.choice((-1, 1)))
        return f"{head},{tail[: found.start(1)]}{number}{tail[found.end(1) :]}"
    return ""


def run(arch: str, kernel: str, cases: Sequence[Case], count: int, seed: int) -> list[Mutant]:
    """Change a kernel `count` times.

    Raises:
        LaunchError: The launches do not run the kernel, run more than one version of it, or are wrong without a change.
    """
    texts: set[str] = set()

    def seen(name: str, text: str) -> str:
        if name == kernel:
            texts.add(text)
        return text

    with amdgcn(arch, mutate=seen) as session:
        wrong = [why for case in cases if (why := case())]
    if wrong or len(texts) != 1:
        raise LaunchError(f"{kernel}: {len(texts)} versions of machine code, {len(wrong)} wrong results {wrong[:1]}")
    (text,) = texts
    program = parse(text)
    ran = {one.index for block in session.ran[kernel] for one in program.blocks[block].instructions}
    end = text.index(".amdhsa_kernel")
    places, rng = sites(text[:end], ran.__contains__), random.Random(f"{seed} {kernel}")
    lines, found = text.splitlines(), list[Mutant]()
    machine.LIMIT = 4 * max(launch.wave_instructions for launch in session.launches)
    for kind, share in SHARES.items():
        wanted = rng.sample(places[kind], min(len(places[kind]), max(1, round(count * share))))
        for k in wanted:
            new = change(lines[k], kind, rng)
            mutated = "\n".join([*lines[:k], new, *lines[k + 1 :]]) + "\n"
            noticed = _noticed(arch, kernel, text, mutated, cases)
            one = program.instructions[sum(bool(_LINE.match(each)) for each in lines[:k])]
            other = parse(mutated).instructions[one.index] if new and not noticed else None
            matters = bool(noticed) or _matters(arch, program, one, other, cases)
            found.append(Mutant(kernel, kind, str(one), " ".join(new.split()), noticed, matters))
    return found


def _matters(arch: str, program: Program, one: Instruction, other: Instruction | None, cases: Sequence[Case]) -> bool:
    """Whether a change of `one` ever leaves other registers, in the program without the change."""
    if not one.mnemonic.startswith(("v_", "s_")) or one.mnemonic.startswith(("s_load", "s_wait", "s_barrier")):
        return True
    probe = Probe(one.index, other)
    code = [each.text for each in program.instructions]

    def probing(each: Program) -> Translated:
        return translate(each, probe if [one.text for one in each.instructions] == code else None)

    with mock.patch("amdgcn.launch.translate", probing), amdgcn(arch, mutate=lambda _, text: text):
        for case in cases:
            case()
    return probe.differs


def _noticed(arch: str, kernel: str, text: str, mutated: str, cases: Sequence[Case]) -> str:
    def mutate(name: str, old: str) -> str:
        return mutated if name == kernel and old == text else old

    try:
        program = parse(mutated)
        if check_waits(program) or check_wait_states(program):
            return "static check"
        with amdgcn(arch, mutate=mutate):
            for case in cases:
                if case():
                    return "wrong result"
    except (UnreadableTextError, UnknownInstructionError, LaunchError):
        return "refused"
    except ProgramFault as fault:
        return re.split(r":| of | used as ", str(fault))[0]
    except (IndexError, AssertionError, ValueError, RuntimeError) as error:
        return type(error).__name__
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Print rates by class and the survivors; exit status 1 where a class is below its share."""
    parser = argparse.ArgumentParser(prog="support.mutants", description="Are changes of machine code noticed?")
    parser.add_argument("module", help="that has CASES, e.g. support.launches")
    parser.add_argument("--arch", choices=sorted(ARCHES), default="gfx942")
    parser.add_argument("--count", type=int, default=200, help="changes of each kernel")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--kernel", action="append", help="these alone; may be repeated")
    parser.add_argument("--out", type=Path, default=os.environ.get("HILGATE_OUT"), help="folder for findings.jsonl")
    options = parser.parse_args(arguments)
    cases: dict[str, Sequence[Case]] = importlib.import_module(options.module).CASES
    found = list[Mutant]()
    for kernel in options.kernel or cases:
        mine = run(options.arch, kernel, cases[kernel], options.count, options.seed)
        found += mine
        noticed = sum(bool(each.noticed) for each in mine)
        print(f"{kernel}: {noticed} of {len(mine)} noticed, {len(cases[kernel])} launches", flush=True)  # noqa: T201
    findings = []
    for kind, least in CLASSES.items():
        mine = [each for each in found if each.kind in kind and each.matters]
        by = Counter(each.noticed for each in mine)
        survived = by.pop("", 0)
        rate = (len(mine) - survived) / len(mine) if mine else 0.0
        words = ", ".join(f"{what} {times}" for what, times in by.most_common())
        print(f"{kind:22} {len(mine) - survived:4} of {len(mine):4} {rate:6.1%}, at least {least:.0%}: {words}")  # noqa: T201
        findings.append(
            {
                "id": f"mutants {options.arch} {kind}",
                "outcome": "pass" if rate >= least else "fail",
                "message": f"{len(mine) - survived} of {len(mine)} noticed, at least {least:.0%} must be",
                "labels": {"arch": options.arch, "class": kind, "noticed_by": words},
                "numbers": {"noticed": len(mine) - survived, "mutants": len(mine), "rate": rate, "rate_least": least},
            }
        )
    for reason, matters in (("no change: every register is the same each time", False), ("absorbed", True)):
        survivors = [each for each in found if not each.noticed and each.matters is matters]
        print(f"{len(survivors)} survivors, {reason}")  # noqa: T201
        for each in survivors:
            print(f"  {each.kernel} {each.kind}: {each.instruction} -> {each.change or 'gone'}")  # noqa: T201
    if options.out:
        options.out = Path(options.out)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "findings.jsonl").write_text("".join(json.dumps(each) + "\n" for each in findings))
    return int(any(each["outcome"] == "fail" for each in findings))


if __name__ == "__main__":
    sys.exit(main())
