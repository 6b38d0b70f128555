# SPDX-License-Identifier: Apache-2.0
"""Compile any Triton kernel for AMD archs, without a GPU, and judge it: `python -m pagedkv.audit FILE.py::KERNEL`.

It needs Triton, and neither torch nor anything else of ours. The signature is that of Triton's own ahead-of-time
compiler (`triton.tools.compile`): an entry for each parameter, in order.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedkv.errors import CannotRunHereError, Exit, MisuseError, Parser, run_command

from .environment import check_environment
from .machine import ANY_MACHINE, any_limits, waves_per_simd

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from types import ModuleType

    from .compile import MachineCode, Specialisation

_TYPES = (
    *("i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"),
    *("fp16", "bf16", "fp32", "fp64", "fp8e4nv", "fp8e4b8", "fp8e5", "fp8e5b16"),
)
_TYPED = re.compile(rf"(?P<type>\*?(?:{'|'.join(_TYPES)}))(?::(?P<hint>16|1))?")
_LITERALS = {"True": True, "False": False, "None": None}
_BUDGETS = {"lds": "bytes", "vgprs": "", "spills": "", "scratch": "bytes", "waves": "at least"}
"""What can be limited. All but waves are upper bounds."""
MOST_THREADS = 1024
"""Most threads of a workgroup, on every AMD arch (HSA runtime: HSA_AGENT_INFO_WORKGROUP_MAX_SIZE)."""
_EPILOG = """\
signature: an entry for each parameter, separated by commas: a type (i32, fp32, a pointer as *bf16), with :16 where
its value is a multiple of 16 (an aligned pointer, a stride) and :1 where it is 1; a number, True, False or None for a
compile-time constant.
exit status: 0 all within the budget; 1 not so, or it does not compile; 2 misuse; 5 this machine cannot do it (no AMD
compiler); 6 out of time.
"""


@dataclass(frozen=True)
class ArchResult:
    """What became of the kernel on one arch."""

    arch: str
    figures: dict[str, float]
    """Figures by the names of `_BUDGETS`; the LDS alone where it is too much to compile on."""
    exceeded: str = ""
    """What is wrong; empty within the budget."""
    timed_out: bool = False


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    return run_command(lambda: _run(_parse(arguments)))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m pagedkv.audit",
        description="Compile a Triton kernel for AMD GPUs, without a GPU, and judge LDS, registers, spills and waves.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("kernel", metavar="FILE.py::KERNEL", help="A kernel of a file, or of a module that Python finds.")
    add("--arch", nargs="+", required=True, metavar="NAME", help=f"Some of {', '.join(ANY_MACHINE)}.")
    add("--signature", required=True, metavar="TEXT", help="Types and constants of the parameters; see below.")
    add("--options", nargs="+", default=[], metavar="NAME=N", help="num_warps=4 num_stages=2 waves_per_eu=0 ...")
    add(
        "--budget",
        nargs="+",
        default=[],
        metavar="NAME=N",
        help=f"Limits of {', '.join(_BUDGETS)} (default: the arch's LDS, spills=0 scratch=0).",
    )
    add("--timeout", type=float, default=180.0, metavar="SECONDS", help="Time limit of an arch (default: 180).")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.arch if name not in ANY_MACHINE]:
        raise MisuseError(f"--arch: got {', '.join(unknown)}; expected some of {', '.join(ANY_MACHINE)}")
    if not options.timeout > 0:
        raise MisuseError(f"--timeout: got {options.timeout:g}; expected more than 0")
    options.budget = _numbers("--budget", options.budget, list(_BUDGETS))
    return options


def _numbers(option: str, words: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    found = {}
    for word in words:
        name, _, number = word.partition("=")
        if name not in names or not number.isdecimal():
            raise MisuseError(f"{option}: got {word}; expected NAME=NUMBER with a name of {', '.join(names)}")
        found[name] = int(number)
    return found


def _run(options: argparse.Namespace) -> Exit:
    version = check_environment(None)
    try:
        from .compile import Specialisation
    except ImportError as error:
        raise CannotRunHereError(
            f"Triton {version} cannot be used: {error}\n  to do: pip install 'pagedkv[audit]'"
        ) from error
    from triton.backends.amd.compiler import HIPOptions
    from triton.compiler import ASTSource

    tuned = [field.name for field in fields(HIPOptions) if type(field.default) is int and field.name != "warp_size"]
    chosen = _numbers("--options", options.options, tuned)
    function = _find(options.kernel)
    source = ASTSource(function, *_signature(function, options.signature))
    constants = tuple((str(name), str(value)) for name, value in source.constants.items())
    rows = []
    for arch in dict.fromkeys(options.arch):
        wanted = Specialisation(function.__name__, arch, f"{arch} {options.signature}", constants, source, chosen)
        rows.append(_judged(wanted, options.budget, options.timeout))
    sys.stdout.write(_table(rows, f"{function.__name__}, Triton {version}"))
    if any(row.exceeded and not row.timed_out for row in rows):
        return Exit.FAIL
    return Exit.INCONCLUSIVE if any(row.timed_out for row in rows) else Exit.PASS


def _find(place: str) -> Any:
    """The kernel of `FILE.py::KERNEL`, without an autotuner around it."""
    from triton.runtime.jit import JITFunction

    where, separator, name = place.partition("::")
    module = _import(where)
    kernels = [key for key, value in vars(module).items() if isinstance(_bare(value), JITFunction)]
    found = _bare(getattr(module, name, None))
    if not isinstance(found, JITFunction):
        wrong = "there is no such kernel" if separator else "expected FILE.py::KERNEL"
        raise MisuseError(f"{place}: {wrong}; {where} has {', '.join(kernels) or 'none'}")
    return found


def _bare(value: Any) -> Any:
    """A kernel without the autotuner and the heuristics around it."""
    while hasattr(value, "fn") and hasattr(value, "arg_names") and not hasattr(value, "params"):
        value = value.fn
    return value


def _import(where: str) -> ModuleType:
    """The module of a file, or by its name."""
    if where.endswith(".py") and not Path(where).is_file():
        raise MisuseError(f"{where}: there is no such file")
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = Path(where).resolve()
        sys.path.insert(0, str(path.parent))  # as `python FILE` does
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        what = " ".join(str(error).split())
        raise MisuseError(f"{where} cannot be imported: {type(error).__name__}: {what}") from error
    return module


def _signature(function: Any, text: str) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """What Triton's `ASTSource` takes: types by parameter, constants by parameter, and what is known of values."""
    entries = [entry.strip() for entry in text.split(",")]
    names = [f"{param.name} (constant)" if param.is_constexpr else param.name for param in function.params]
    if len(entries) != len(names):
        raise MisuseError(f"--signature: got {len(entries)} entries; expected {len(names)}, for {', '.join(names)}")
    types, constants, hints = {}, {}, {}
    for index, (param, entry) in enumerate(zip(function.params, entries, strict=True)):
        typed = _TYPED.fullmatch(entry)
        if typed and param.is_constexpr:
            raise MisuseError(f"--signature: got {entry} for {param.name}, a compile-time constant; expected its value")
        if typed and typed["hint"] != "1":
            types[param.name] = typed["type"]
            if typed["hint"]:
                hints[index,] = [["tt.divisibility", 16]]
        else:
            types[param.name] = "constexpr"
            constants[param.name] = 1 if typed else _literal(param.name, entry)
    return types, constants, hints


def _literal(name: str, entry: str) -> bool | int | float | None:
    if entry in _LITERALS:
        return _LITERALS[entry]
    try:
        return float(entry) if re.search(r"[.e]", entry) else int(entry)
    except ValueError:
        expected = f"a number, True, False, None, or one of {', '.join(_TYPES)}, with * for a pointer to it"
        raise MisuseError(f"--signature: got {entry!r} for {name}; expected {expected}") from None


def _judged(wanted: Specialisation, budget: dict[str, int], timeout: float) -> ArchResult:
    """Compile in a process of its own, which MLIR may end, and compare with the budget."""
    from .compile import LdsExceededError, compile_kernel
    from .isolation import Crash, run_isolated

    limit = any_limits(wanted.arch).lds_bytes
    ((_, result, _),) = run_isolated([functools.partial(compile_kernel, wanted)], jobs=1, timeout=timeout)
    if isinstance(result, LdsExceededError):
        return ArchResult(wanted.arch, {"lds": result.lds_bytes}, f"LDS: {limit} at most")
    if isinstance(result, (Exception, Crash)):
        timed_out = isinstance(result, Crash) and result.timed_out
        lines = [line.strip() for line in str(result).splitlines() if line.strip()] or [type(result).__name__]
        # Triton's first line of an error in a kernel is its place, "at 3:11:", from the kernel's `def` on.
        place = f" {lines[0].rstrip(':')}" if lines[0].startswith("at ") else ""
        why = lines[0] if isinstance(result, Crash) else f"{type(result).__name__}{place}: {lines[-1]}"
        return ArchResult(wanted.arch, {}, why if timed_out else f"does not compile: {why}", timed_out)
    figures = _figures(wanted.arch, result)
    limits = {"lds": limit, "spills": 0, "scratch": 0} | budget
    above = [f"{name}: {most} at most" for name, most in limits.items() if name != "waves" and figures[name] > most]
    if figures["waves"] < (least := limits.get("waves", 0)) or not figures["waves"]:
        above.append(f"waves: {max(1, least)} at least")
    if (threads := result.num_waves * any_limits(wanted.arch).lanes) > MOST_THREADS:
        above.append(f"{threads} threads: {MOST_THREADS} at most, so num_warps is too large")
    return ArchResult(wanted.arch, figures, "; ".join(above))


def _figures(arch: str, compiled: MachineCode) -> dict[str, float]:
    from .code_object import read_code_object

    code, lds = read_code_object(compiled.code), compiled.lds_bytes
    waves = waves_per_simd(arch, vgpr=code.vgpr, sgpr=code.sgpr, lds_bytes=lds, num_waves=compiled.num_waves)
    spills = code.vgpr_spills + code.sgpr_spills
    return {"lds": lds, "vgprs": code.vgpr, "spills": spills, "scratch": code.scratch_bytes, "waves": waves}


def _table(rows: Sequence[ArchResult], title: str) -> str:
    lines = [title, "  ".join([f"{'arch':<8}", *(f"{name:>7}" for name in _BUDGETS), "verdict"])]
    for row in rows:
        cells = [f"{row.figures[name]:>7g}" if name in row.figures else f"{'-':>7}" for name in _BUDGETS]
        verdict = f"{'inconclusive' if row.timed_out else 'fail'}, {row.exceeded}" if row.exceeded else "pass"
        lines.append("  ".join([f"{row.arch:<8}", *cells, verdict]))
    return "\n".join(lines) + "\n"
