# SPDX-License-Identifier: Apache-2.0
"""Command line of `python -m pagedkv.audit`, and whether this machine's Triton can do the work.

Nothing heavy is imported before the machine has been looked at, so that refusals are quick.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pagedkv.errors import CannotRunHereError, Exit, MisuseError, NothingSelectedError, Parser, run_command

from .cases import SOURCES, select
from .findings import exit_status, format_report, write_findings
from .fit_table import format_table
from .machine import CDNA, MACHINES
from .pins import check_pins

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

_ALTERING = (
    "TRITON_INTERPRET",
    "TRITON_OVERRIDE_ARCH",
    "TRITON_KERNEL_OVERRIDE",
    "TRITON_STORE_BINARY_ONLY",
    "TRITON_DISABLE_LINE_INFO",
    "TRITON_DEFAULT_FP_FUSION",
    "AMDGCN_USE_BUFFER_OPS",
)
"""Settings of Triton that change the machine code, or keep us from reading it."""

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


def compiles_all(env: Mapping[str, str]) -> bool:
    """Return whether code objects of earlier runs do not count: on agents and before a release.

    `env` has hilgate's HILGATE_PROFILE, which says what the run is for; without it the run is local.
    """
    return env.get("HILGATE_PROFILE", "gate") not in {"gate", "quick"}


def check_environment(triton: str | None) -> str:
    """Refuse machines on which the audit would mislead or crash.

    Args:
        triton: The version that the caller means to audit with; None takes what is there.

    Returns:
        The version of the Triton that will be imported.

    Raises:
        CannotRunHereError: No Triton, another version than asked for, no AMD backend, or a setting that changes the
            machine code.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise CannotRunHereError("Triton is not installed.\n  to do: pip install 'pagedkv[audit]'")
    package = Path(spec.origin).parent
    installed = list(importlib.metadata.distributions(name="triton", path=[str(package.parent)]))
    if not installed:
        raise CannotRunHereError(
            f"the Triton in {package} does not say its version.\n  to do: install it with pip, not by copying"
        )
    version = installed[0].version  # of this folder, which need not be the one that pip lists first
    if triton is not None and version != triton:
        raise CannotRunHereError(
            f"asked for Triton {triton}, but `import triton` finds {version} in {package}.\n"
            f"  to do: pip install --target .triton/{triton} --no-deps triton=={triton}, "
            f"and run with PYTHONPATH=.triton/{triton} in front"
        )
    if not (package / "backends" / "amd" / "compiler.py").is_file():
        raise CannotRunHereError(
            f"Triton {version} in {package} has no AMD backend.\n  to do: install the triton wheel from PyPI"
        )
    altering = [name for name in _ALTERING if os.environ.get(name)]
    if os.environ.get("TRITON_INTERPRET") == "0":  # how a runner says: compile
        altering.remove("TRITON_INTERPRET")
    if altering:
        raise CannotRunHereError(
            f"{', '.join(altering)} is set: the compiler would not make the code that a server runs.\n"
            f"  to do: unset {' '.join(altering)}"
        )
    return version


if __name__ == "__main__":
    sys.exit(main())
