# SPDX-License-Identifier: Apache-2.0
"""Launch-size search without a GPU: compile cases under a grid of tuning data and rank it by the compiler's figures.

    python -m pagedkv.audit.sweep gfx942 prefill.block_m=64,128 prefill.waves=4,8 --only prefill-bfloat16-q32kv8-d128

A key is `<table>.<key>` of `tuning/<arch>.toml`; what is not named stays as it is there. A point of the grid that
spills, does not fit, or has waves compute the same ranks after all that do not; then more useful FLOP of a SIMD in a
cycle rank first (geometric mean of the cases), by the model of throughput.py. That counts waves a SIMD, barriers, LDS,
and vector instructions beside matrix ones; FLOP for each instruction, which is printed too, does not.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from pagedkv.arch import limits
from pagedkv.attention import launch as attention_launch
from pagedkv.errors import Exit, InvalidFileError, MisuseError, Parser, run_command
from pagedkv.launch import tuning
from pagedkv.mla import launch as mla_launch

from .budgets import load_budgets
from .cases import select
from .compile import Figures, specialisations, start_compiler
from .environment import check_environment, compiles_all
from .isolation import run_isolated
from .machine import MACHINES
from .objects import ObjectStore, find_or_compile
from .throughput import useful_flop_per_cycle

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from pagedkv.launch import Tuning

    from .budgets import Budgets
    from .cases import Case
    from .compile import Specialisation

HEAD = (
    f"{'FLOP/cycle':>10}{'FLOP/instr':>11}{'worst':>6}{'loop':>6}{'MFMA':>6}{'waves':>6}{'VGPR':>6}{'LDS':>7}{'spill':>6}"
    "  setting"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; `arguments` without the program, None takes this process's."""
    parser = Parser(prog="python -m pagedkv.audit.sweep", description=__doc__.partition("\n")[0])
    parser.add_argument("arch", choices=list(MACHINES))
    parser.add_argument("grid", nargs="*", metavar="TABLE.KEY=N,N", help="values to try of a key of tuning data")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="cases whose id contains one of these texts"
    )
    parser.add_argument("--objects", type=Path, metavar="DIR", help="keep code objects there, as the audit does")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time; default: all cores")
    options = parser.parse_args(arguments)
    return run_command(lambda: _run(options))


def _run(options: argparse.Namespace) -> Exit:
    if not (options.grid and options.only):
        raise MisuseError("expected TABLE.KEY=N,N and --only")
    axes = [_axis(text) for text in options.grid]
    check_environment(None)
    cases = [case for _, case in select(options.only, [options.arch], ["ours"])]
    settings = [dict(point) for point in itertools.product(*axes)]
    start_compiler()
    budgets = load_budgets()
    planned = [
        (setting, wanted)
        for setting in settings
        for case in cases
        for wanted in _plan(options.arch, setting, case, budgets)
    ]
    if not planned:
        raise MisuseError(f"no case with products matches --only {options.only!r}\n  to do: see `pagedkv.audit --list`")
    kernels = list(dict.fromkeys(wanted for _, wanted in planned if wanted))
    store = ObjectStore(options.objects) if options.objects and not compiles_all(os.environ) else None
    calls = [functools.partial(find_or_compile, wanted, store) for wanted in kernels]
    compiled = run_isolated(calls, jobs=options.jobs, timeout=300)
    results: dict[Specialisation | None, object] = {None: None}
    results |= {kernels[index]: result for index, result, _ in compiled}
    groups = itertools.groupby(planned, key=lambda each: each[0])
    lines = [_line(setting, [(wanted, results[wanted]) for _, wanted in group], budgets) for setting, group in groups]
    sys.stdout.write("\n".join([HEAD, *(text for _, text in sorted(lines))]) + "\n")
    return Exit.PASS


def _axis(text: str) -> list[tuple[str, int]]:
    key, _, values = text.partition("=")
    if key.count(".") != 1 or not all(value.isdecimal() for value in values.split(",")):
        raise MisuseError(f"got {text!r}; expected TABLE.KEY=N,N, such as prefill.waves=4,8")
    return [(key, int(value)) for value in values.split(",")]


def _plan(arch: str, setting: Mapping[str, int], case: Case, budgets: Budgets) -> list[Specialisation | None]:
    """What a case launches under other tuning data, of kernels with products; None where no tile fits."""
    changed = tuning(arch)
    for key, value in setting.items():
        table, _, name = key.partition(".")
        try:
            changed = replace(changed, **{table: replace(getattr(changed, table), **{name: value})})
        except (AttributeError, TypeError) as error:
            raise MisuseError(f"tuning data have no {key}: {error}") from error
    return [
        wanted for wanted in _planned(arch, changed, case) if wanted is None or budgets.kernels[wanted.kernel].channels
    ]


def _planned(arch: str, changed: Tuning, case: Case) -> list[Specialisation | None]:
    """What a case launches under other tuning data; None where no tile fits."""
    with ExitStack() as patches:
        for module in (attention_launch, mla_launch):
            patches.enter_context(mock.patch.object(module, "tuning", return_value=changed))
            patches.callback(module.choose.cache_clear)
            module.choose.cache_clear()
        try:
            return list(specialisations(arch, case.launch))
        except InvalidFileError:
            return [None]


def _line(
    setting: Mapping[str, int], results: list[tuple[Specialisation | None, object]], budgets: Budgets
) -> tuple[tuple[float, ...], str]:
    """Rank and text of a point of the grid."""
    name = " ".join(f"{key}={value}" for key, value in setting.items())
    good = []
    for wanted, each in results:
        if wanted and isinstance(each, Figures) and each.lds_bytes <= limits(each.arch).lds_bytes:
            numbers = budgets.loop_numbers(each, dict(wanted.constants))
            if numbers:
                good.append((each, numbers, useful_flop_per_cycle(each, numbers, wanted.options["num_stages"])))
    if len(good) < len(results):
        return (2, 0), f"{len(results) - len(good)} of {len(results)} do not compile or fit".rjust(64) + f"  {name}"
    flop = [numbers["flop_per_instruction"] for _, numbers, _ in good]
    share = min(numbers["mfma_needed"] / numbers["mfma_issued"] for _, numbers, _ in good)
    spills = sum(each.code.vgpr_spills + each.code.scratch_bytes for each, *_ in good)
    score = statistics.geometric_mean(score for *_, score in good)
    mean, waves = statistics.geometric_mean(flop), min(each.waves_per_simd for each, *_ in good)
    loop = max(numbers["loop_instructions"] for _, numbers, _ in good)
    vgpr, lds = max(each.code.vgpr for each, *_ in good), max(each.lds_bytes for each, *_ in good)
    text = f"{score:>10.1f}{mean:>11.0f}{min(flop):>6.0f}{loop:>6}{share:>6.0%}{waves:>6g}{vgpr:>6}{lds:>7}{spills:>6}"
    return (spills > 0, share < 1, -score), f"{text}  {name}"


if __name__ == "__main__":
    sys.exit(main())
