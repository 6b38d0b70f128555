# SPDX-License-Identifier: Apache-2.0
"""Command line of `python -m pagedkv.audit`. Nothing heavy is imported before the machine has been looked at."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pagedkv.errors import CannotRunHereError, Exit, MisuseError, NothingSelectedError, Parser, run_command

from .cases import SOURCES, select
from .environment import check_environment, check_pins, compiles_all
from .findings import exit_status, format_report, write_findings
from .fit_table import format_table
from .machine import CDNA, MACHINES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_EPILOG = """\
exit status: 0 all pass; 1 a budget or a comparison failed, or a kernel does not compile; 2 misuse; 3 a file of
budgets or declarations is wrong; 4 nothing was selected or compiled; 5 this machine cannot do it (no AMD compiler,
another Triton than asked for); 6 inconclusive.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program; None takes this process's.

    Returns:
        Exit status.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if any("::" in word or word.endswith(".py") for word in arguments):
        from . import kernel_file

        return kernel_file.main(arguments)
    options = _parse(arguments)
    return run_command(lambda: _run(options))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m pagedkv.audit",
        description="Compile our kernels for AMD GPUs, without a GPU, and judge what the compiler made of them. "
        "Any other kernel: python -m pagedkv.audit FILE.py::KERNEL --help",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--arch", nargs="+", choices=list(MACHINES), default=CDNA, help="Architectures to compile for (default: CDNA)."
    )
    parser.add_argument(
        "--source",
        nargs="+",
        choices=tuple(SOURCES),
        default=list(SOURCES),
        help="Whose kernels to compile (default: all).",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="Compile only cases whose id contains one of these texts.",
    )
    parser.add_argument("--promised", action="store_true", help="Leave out what budgets.toml does not promise.")
    parser.add_argument("--triton", metavar="VERSION", help="Refuse to run with another Triton version.")
    parser.add_argument("--pins", type=Path, metavar="FILE", help="Refuse to run with other versions than it pins.")
    parser.add_argument("--list", action="store_true", help="List the ids of the cases, and compile nothing.")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="Folder for findings.jsonl and fit.md, the table of attention kernels (default: $HILGATE_OUT).",
    )
    jobs = max(1, (os.cpu_count() or 1) - 1)  # of two cores, other steps of a gate have one: nothing waits for imports
    parser.add_argument(
        "--jobs", type=int, default=jobs, help="Number of compilers at a time (default: one fewer than the cores)."
    )
    parser.add_argument(
        "--timeout", type=float, default=180.0, metavar="SECONDS", help="Time limit for one kernel (default: 180)."
    )
    parser.add_argument(
        "--objects",
        type=Path,
        metavar="DIR",
        help="Folder that keeps code objects, so that only new ones are compiled (default: compile all).",
    )
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> Exit:
    started = time.monotonic()
    if options.jobs < 1 or options.timeout <= 0:
        raise MisuseError(f"--jobs and --timeout must be above 0, got {options.jobs} and {options.timeout:g}")
    if options.pins:
        check_pins(options.pins)
    version = check_environment(options.triton)
    try:
        from . import runner  # imports Triton, and so do the sources
        from .budgets import load_budgets

        cases = select(options.only, options.arch, options.source)
    except ImportError as error:
        raise CannotRunHereError(
            f"our kernels cannot be imported with Triton {version}: {error}\n"
            "  to do: install torch; for a kernel of yours: python -m pagedkv.audit FILE.py::KERNEL --help"
        ) from error
    if options.promised:
        promise = load_budgets().promise
        cases = [
            (arch, case) for arch, case in cases if not all(promise(case.id(arch, k), version) for k in case.kernels)
        ]
    if not cases:
        raise NothingSelectedError(f"no case matches --only {options.only!r}\n  to do: see --list")
    if options.list:
        sys.stdout.writelines(f"{case.id(arch, '+'.join(case.kernels))}\n" for arch, case in cases)
        return Exit.PASS
    objects = None if compiles_all(os.environ) else options.objects
    findings, compiled, kept = runner.run(
        cases, version=version, jobs=options.jobs, timeout=options.timeout, objects=objects
    )
    if out := options.out or os.environ.get("HILGATE_OUT"):
        write_findings(Path(out) / "findings.jsonl", findings)
        (Path(out) / "fit.md").write_text(format_table(findings), encoding="utf-8")
    status = exit_status(findings, compiled=compiled)
    sys.stdout.write(format_report(findings, status=status, seconds=time.monotonic() - started))
    sys.stdout.write(f"{compiled} code objects read, {kept} of them compiled by an earlier run\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
