"""`python -m pagedkv.audit`: compile every kernel configuration for every CDNA arch, and judge the code objects."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .environment import check_environment
from .errors import AuditError, CannotRunHereError, Exit, MisuseError, NothingSelectedError
from .machine import ARCHES

if TYPE_CHECKING:
    from collections.abc import Sequence

_EPILOG = """\
exit status: 0 all pass; 1 a budget or a comparison failed, or a kernel does not compile; 2 misuse; 4 nothing was
selected or compiled; 5 this machine cannot do it (no AMD compiler, another Triton than asked for); 6 inconclusive.
"""


def main(
    arguments: Sequence[str] | None = None, *, program: str = "pagedkv.audit", audit: str = "pagedkv.audit.audit"
) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program; None takes this process's.
        program: Module that is run, for the help.
        audit: Module that selects, compiles and judges; imported after this machine has been looked at.

    Returns:
        Exit status.
    """
    options = _parse(program, arguments)
    try:
        return int(_run(options, audit))
    except AuditError as error:
        sys.stderr.write(f"audit: {error}\n")
        return int(error.exit_status)


def _parse(program: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description="Compile the kernels for AMD GPUs, without a GPU, and judge what the compiler made of them.",
        epilog=_EPILOG,
    )
    parser.add_argument("--arch", nargs="+", default=list(ARCHES), metavar="GFX", help=f"default: {' '.join(ARCHES)}")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose id contains TEXT")
    parser.add_argument("--triton", metavar="VERSION", help="refuse to run with another Triton than this")
    parser.add_argument("--list", action="store_true", help="print the ids and stop; compiles nothing")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where findings.jsonl goes; default: $HILGATE_OUT")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time; default: all cores")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="SECONDS", help="for one launch; default: 180")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace, module: str) -> Exit:
    started = time.monotonic()
    if unknown := [arch for arch in options.arch if arch not in ARCHES]:
        raise MisuseError(f"unknown arch {', '.join(unknown)}; known: {', '.join(ARCHES)}")
    if options.jobs < 1 or options.timeout <= 0:
        raise MisuseError(f"--jobs and --timeout must be above 0, got {options.jobs} and {options.timeout:g}")
    version = check_environment(options.triton)
    try:
        audit = importlib.import_module(module)
    except ImportError as error:
        raise CannotRunHereError(f"the audit cannot be imported with Triton {version}: {error}") from error

    cases = audit.select(options.only, options.arch)
    if not cases:
        raise NothingSelectedError(f"no case matches --only {options.only!r}\n  to do: see --list")
    if options.list:
        sys.stdout.writelines(f"{name}\n" for name in audit.ids(cases))
        return Exit.PASS
    findings, compiled = audit.run(cases, version=version, jobs=options.jobs, timeout=options.timeout)
    if out := options.out or os.environ.get("HILGATE_OUT"):
        audit.write_findings(Path(out) / "findings.jsonl", findings)
    status = audit.exit_status(findings, compiled=compiled)
    sys.stdout.write(audit.format_report(findings, status=status, seconds=time.monotonic() - started))
    return status
