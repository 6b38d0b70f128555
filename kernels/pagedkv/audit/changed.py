# SPDX-License-Identifier: Apache-2.0
"""Which kernels have other machine code than in the merge base, or with another Triton, and what changed of each.

    python -m pagedkv.audit.changed --base main --arch gfx942
    python -m pagedkv.audit.changed --tritons 3.6.0 3.8.0 next

Each checkout lists what its own launchers compile, in a process of its own. A kernel for which the compiler is given
the same in both has the same machine code; only the others are compiled, and their code is compared as a GPU loads it
(`code_object.machine_code`). The code that lists, compiles and reads is that of the change on both sides. Of Tritons
each is compared with the one named before it, and only what it compiles worse is listed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import pagedkv
from pagedkv.errors import CannotRunHereError, CommandError, Exit, MisuseError, Parser, run_command

from .environment import check_environment, compiles_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .compile import Figures
    from .findings import Finding, Outcome

    Compile = Callable[[Sequence[str]], Mapping[str, "Code"]]
    """Compiles kernels of a checkout, by their ids."""

PACKAGE = "kernels/pagedkv"
"""Where a checkout has it."""
ASKING = ("changed", "code_object", "compile", "environment", "imports", "isolation", "machine", "objects")
"""Modules of the audit that the merge base's kernels are asked with: the change's, so that both are asked the same."""
FIGURES = (
    *("instructions", "mfma", "vgpr", "sgpr", "lds_bytes", "vgpr_spills", "sgpr_spills", "scratch_bytes"),
    *("waves_per_simd", "loop_instructions", "loop_moves"),
)
"""What is said of a kernel, before and after; of the loop, what a turn of the first one with products issues."""
WORSE = {"waves_per_simd": "fewer waves", "vgpr_spills": "spills", "scratch_bytes": "scratch", "loop_moves": "moves"}
"""Figures by which another Triton compiles a kernel worse -> what that is called. More waves are better, the rest is
worse where there is more of it."""
TRITONS = Path(".triton")
"""Where Tritons beside the environment's own are installed, a folder each."""
MOST_NAMED = 3
"""Kernels in the sentence about all; each has a finding of its own."""

Change = Literal["changed", "new", "gone", "broken"]


class BaseUnreadableError(CommandError):
    """The kernels of the merge base cannot be listed, so nothing can be said of what changed."""

    exit_status = Exit.INCONCLUSIVE


@dataclass(frozen=True)
class Code:
    """One kernel of one checkout, as far as it was asked."""

    problem: str = ""
    """Why there is no machine code."""
    same: str = ""
    """Equal where a GPU is given the same: machine code, LDS, waves."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Figures by the names of `FIGURES`."""


@dataclass(frozen=True)
class KernelListing:
    """What a checkout launches on one arch: id -> what the compiler is given (`given_key`), or a problem."""

    keys: Mapping[str, str]
    problems: Mapping[str, str]


@dataclass(frozen=True)
class ChangedKernel:
    """A kernel that is not what it was."""

    ids: tuple[str, ...]
    """Configurations that launch it, as `<arch>/<source>/<case>/<kernel>`."""
    change: Change
    before: Code
    after: Code

    def text(self, figures: Sequence[str] = FIGURES) -> str:
        """What changed of it, in a few words; of its numbers those of `figures`."""
        if self.change == "broken":
            return f"compiled before and does not now: {self.after.problem}"
        if self.change == "new":
            return f"new, did not compile before: {self.before.problem}" if self.before.problem else "new"
        if self.change == "gone":
            return "gone"
        pairs = [(name, self.before.numbers[name], self.after.numbers[name]) for name in figures]
        moved = [f"{name} {before:g} -> {after:g}" for name, before, after in pairs if before != after]
        return ", ".join(moved) or "other instructions, the same figures"

    @property
    def worse(self) -> tuple[str, ...]:
        """Names of `WORSE` for what is worse than before; nothing of a kernel that compiles on one side alone."""
        was, now = self.before.numbers, self.after.numbers
        if self.change != "changed":
            return ()
        return tuple(
            called
            for name, called in WORSE.items()
            if (now[name] < was[name] if name == "waves_per_simd" else now[name] > was[name])
        )


@dataclass(frozen=True)
class CodeComparison:
    """Both checkouts on one arch."""

    arch: str
    kernels: int
    """Kernels of the change and of the merge base; configurations with one machine code are one kernel."""
    changed: tuple[ChangedKernel, ...]

    def sentence(self) -> str:
        """`3 of 88 kernels changed for gfx942`."""
        counts = Counter(kernel.change for kernel in self.changed)
        text = f"{counts['changed']} of {self.kernels} kernels changed for {self.arch}"
        others: tuple[Change, ...] = ("new", "gone", "broken")
        text += "".join(f", {counts[change]} {change}" for change in others if counts[change])
        named = [f"{kernel.ids[0].partition('/')[2]} ({kernel.text()})" for kernel in self.changed[:MOST_NAMED]]
        rest = len(self.changed) - len(named)
        return text + (f": {'; '.join(named)}" if named else "") + (f"; and {rest} more" if rest else "")


def compare(
    arch: str, before: KernelListing, after: KernelListing, compile_before: Compile, compile_after: Compile
) -> CodeComparison:
    """Compare what two checkouts launch.

    Args:
        arch: A gfx name.
        before: Of the merge base.
        after: Of the change.
        compile_before: Compiles kernels of the merge base: ids -> `Code` by id.
        compile_after: The same of the change.
    """
    groups: dict[tuple[str | None, str | None], list[str]] = {}
    for name in sorted({*before.keys, *after.keys}):
        groups.setdefault((before.keys.get(name), after.keys.get(name)), []).append(name)
    differing = {pair: names for pair, names in groups.items() if pair[0] != pair[1]}
    firsts = [names[0] for names in differing.values()]
    codes_before = compile_before([name for name in firsts if name in before.keys])
    codes_after = compile_after([name for name in firsts if name in after.keys])
    changed = []
    for names in differing.values():
        was = codes_before.get(names[0], Code(before.problems.get(names[0], "")))
        now = codes_after.get(names[0], Code(after.problems.get(names[0], "")))
        if change := _change(was, now):
            changed.append(ChangedKernel(tuple(names), change, was, now))
    launched = {*before.keys, *after.keys}
    changed += [  # their launchers raise, and did not
        ChangedKernel((name,), "broken", Code(), Code(after.problems[name]))
        for name in sorted(after.problems.keys() - launched - before.problems.keys())
    ]
    return CodeComparison(arch, len(groups), tuple(changed))


def _change(was: Code, now: Code) -> Change | None:
    if was.same and now.same:
        return None if was.same == now.same else "changed"
    if now.same:
        return "new"
    if now.problem:
        return "broken" if was.same else None  # of one that never compiled, the audit says so
    return "gone"


def findings_of(comparison: CodeComparison, commit: str) -> list[Finding]:
    """One finding for the arch, which reports show where anything changed, and one for each kernel."""
    from .findings import Finding

    changes = [kernel.change for kernel in comparison.changed]
    sentence = comparison.sentence()
    labels = {"arch": comparison.arch, "compared_with": commit[:12]}
    caveat = {"passed_but": f"{sentence}. Only a GPU can time them"} if changes else {}
    outcome: Outcome = "fail" if "broken" in changes else "pass"
    numbers: dict[str, float] = {"kernels": comparison.kernels}
    numbers |= {change: changes.count(change) for change in ("changed", "new", "gone")}
    findings = [Finding(f"changed/{comparison.arch}", outcome, 0.0, sentence, labels | caveat, numbers)]
    for kernel in comparison.changed:
        fails = kernel.change == "broken"
        findings.append(_of_kernel(kernel, kernel.text(), f"changed/{kernel.ids[0]}", labels, fails=fails))
    return findings


def _of_kernel(kernel: ChangedKernel, text: str, name: str, labels: Mapping[str, str], *, fails: bool) -> Finding:
    from .findings import Finding

    figures = {f"{key}_before": value for key, value in kernel.before.numbers.items()} | dict(kernel.after.numbers)
    about = {
        "kernel": kernel.ids[0].rpartition("/")[2],
        "change": kernel.change,
        "configurations": " ".join(kernel.ids),
    }
    return Finding(name, "fail" if fails else "pass", 0.0, text, {**labels, **about}, figures)


def triton_findings(comparison: CodeComparison, before: str, after: str) -> list[Finding]:
    """One finding about two Tritons for the arch, and one for each kernel that the second compiles worse or not at all.

    Args:
        comparison: Of what both make of the same kernels.
        before: Version of the first.
        after: Version of the second.
    """
    from .findings import Finding

    shown = [kernel for kernel in comparison.changed if kernel.worse or kernel.change in {"broken", "gone"}]
    both = [kernel for kernel in comparison.changed if kernel.change == "changed"]
    ratios = [kernel.after.numbers["instructions"] / kernel.before.numbers["instructions"] for kernel in both]
    counts = {called: sum(called in kernel.worse for kernel in shown) for called in WORSE.values()}
    counts["no code"] = sum(not kernel.worse for kernel in shown)
    place = f"{before}-{after}/{comparison.arch}"
    sentence = f"{comparison.arch}, Triton {before} -> {after}: {len(shown)} of {comparison.kernels} kernels worse"
    sentence += "".join(f", {called} {count}" for called, count in counts.items() if count)
    if ratios:
        sentence += f"; instructions x {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}"
    labels = {"arch": comparison.arch, "tritons": f"{before} -> {after}"}
    caveat = {"passed_but": sentence} if shown else {}
    outcome: Outcome = "fail" if counts["no code"] else "pass"
    numbers: dict[str, float] = {"kernels": comparison.kernels}
    findings = [Finding(f"changed/{place}", outcome, 0.0, sentence, labels | caveat, numbers)]
    for kernel in shown:
        text, name = kernel.text((*WORSE, "loop_instructions")), f"changed/{before}-{after}/{kernel.ids[0]}"
        about = labels | {"worse": ", ".join(kernel.worse) or "no code"}
        findings.append(_of_kernel(kernel, text, name, about, fails=not kernel.worse))
    return findings


# Git.


def git(root: Path, *words: str) -> bytes | None:
    """Output of a git command; None where it failed, or where git is not installed."""
    try:
        done = subprocess.run(
            ("git", "--no-replace-objects", "-C", str(root), *words), capture_output=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def merge_base(root: Path, base: str) -> str:
    """Full sha of the merge base of HEAD and `base`.

    Args:
        root: A checkout.
        base: A branch or commit. Empty takes the default branch: of `upstream`, of `origin`, or `main` beside another.

    Raises:
        CannotRunHereError: No checkout, no such commit, no default branch, or no common history.
    """
    here = (git(root, "symbolic-ref", "--quiet", "HEAD") or b"").decode().strip()
    usual = [f"refs/remotes/{remote}/{branch}" for remote in ("upstream", "origin") for branch in ("HEAD", "main")]
    usual += ["refs/heads/main"] if here != "refs/heads/main" else []
    for name in [base] if base else usual:
        if name.startswith("-") or git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}") is None:
            continue
        if found := git(root, "merge-base", name, "HEAD"):
            return found.decode().strip()
        raise CannotRunHereError(
            f"{name} and HEAD share no history here\n  to do: in a shallow clone run git fetch --unshallow"
        )
    what = f"git knows no commit {base!r} in {root}" if base else f"{root} has no default branch to compare with"
    raise CannotRunHereError(f"{what}\n  to do: name a branch or commit of this clone with --base, or fetch it")


@contextlib.contextmanager
def kernels_at(root: Path, commit: str, *more: str) -> Iterator[Path]:
    """A folder to import `pagedkv` from as it is in a commit, for the duration of the block; `more` lies beside it.

    Raises:
        BaseUnreadableError: The commit has no such package.
    """
    archive = git(root, "archive", "--format=tar", commit, PACKAGE, *more)
    if archive is None:
        names = " and ".join((PACKAGE, *more))
        raise BaseUnreadableError(f"commit {commit[:12]} has no {names}, so there is nothing to compare with")
    with tempfile.TemporaryDirectory(prefix="merge-base-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder)  # noqa: S202 - git made it; Python 3.11.2 knows no filter
        yield Path(folder, PACKAGE).parent


def asked_with_ours(kernels: Path) -> None:
    """Put our modules that list and compile into the audit of another checkout."""
    audit = kernels / "pagedkv" / "audit"
    if not (audit / "cases.py").is_file():
        raise BaseUnreadableError("the merge base has no audit, so its kernels cannot be listed")
    for name in ASKING:
        (audit / f"{name}.py").write_bytes(Path(__file__).with_name(f"{name}.py").read_bytes())


# A process that lists and compiles the kernels of one checkout.


def answers_alone() -> IO[str]:
    """Standard output for answers alone: what a launcher or a compiler prints goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(options: argparse.Namespace, requests: IO[str], answers: IO[str]) -> Exit:
    """Answer requests, a JSON document a line: {"list": arch} and {"compile": [ids]}."""
    from .cases import select
    from .compile import specialisations, start_compiler
    from .objects import ObjectStore, given_key

    wanted: dict[str, Any] = {}
    if options.triton:
        check_environment(options.triton)
    store = ObjectStore(options.objects) if options.objects else None
    answers.write(json.dumps(pagedkv.__file__) + "\n")
    answers.flush()
    for line in requests:
        request = json.loads(line)
        if "list" in request:
            problems: dict[str, str] = {}
            listed: dict[str, str] = {}
            for arch, case in select(options.only, [request["list"]], options.source):
                try:
                    for each in specialisations(arch, case.launch):
                        name = case.id(arch, each.kernel)
                        while name in listed:
                            name += "+"  # a launcher that compiles one function twice
                        listed[name], wanted[name] = given_key(each), each
                except CannotRunHereError:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever a launcher raises is a finding about it
                    problems[case.id(arch, "+".join(case.kernels))] = f"{type(error).__name__}: {error}"
            answer: Any = [listed, problems]
        else:
            if request["compile"]:
                start_compiler()
            answer = _compile([(name, wanted[name]) for name in request["compile"]], options, store)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if store:
        store.prune()
    return Exit.PASS


def _compile(named: Sequence[tuple[str, Any]], options: argparse.Namespace, store: Any) -> dict[str, Any]:
    from .isolation import run_isolated
    from .objects import find_or_compile

    calls = [functools.partial(find_or_compile, wanted, store) for _, wanted in named]
    return {
        named[index][0]: _described(result)
        for index, result, _ in run_isolated(calls, jobs=options.jobs, timeout=options.timeout)
    }


def _described(result: Any) -> dict[str, Any]:
    from .compile import Figures

    if not isinstance(result, Figures):
        return {"problem": f"{type(result).__name__}: {result}"}
    return {"same": f"{result.machine_code} {result.lds_bytes} {result.num_waves}", "numbers": numbers_of(result)}


def numbers_of(figures: Figures) -> dict[str, float]:
    """Figures of a kernel, by the names of `FIGURES`."""
    code, text = figures.code, figures.text
    known: dict[str, float] = {"instructions": text.instructions, "mfma": text.mfma, "lds_bytes": figures.lds_bytes}
    known["waves_per_simd"] = figures.waves_per_simd
    known["loop_instructions"] = text.loops[0].instructions if text.loops else 0
    known["loop_moves"] = text.loops[0].moves if text.loops else 0
    return {name: known[name] if name in known else getattr(code, name) for name in FIGURES}


class Checkout:
    """A process that imports `pagedkv` from a folder, and its answers. The first one is where it found the package.

    Args:
        kernels: The folder.
        arguments: Of the module's `--serve`.
        module: What answers.
        ahead: Folders of packages that come before the environment's.
    """

    def __init__(
        self,
        kernels: Path,
        arguments: Sequence[str],
        module: str = "pagedkv.audit.changed",
        ahead: Sequence[Path] = (),
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        given = [str(Path(each).resolve()) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "--serve", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=kernels.parent,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(kernels), *map(str, ahead), *given])},
        )
        self._compiled: dict[str, Code] = {}
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._check(Path(self._answer()), kernels)
            stack.pop_all()

    @staticmethod
    def _check(found: Path, kernels: Path) -> None:
        if not found.is_relative_to(kernels.resolve()):
            raise BaseUnreadableError(f"python imports pagedkv from {found.parent}, not from {kernels}")

    def ask(self, request: Mapping[str, object]) -> Any:
        """Answer to a request (`serve`)."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # dead: then there is no answer
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            last_line = self._log.read().strip().splitlines()[-1:] or ["it said nothing"]
            raise BaseUnreadableError(f"its kernels cannot be asked: {last_line[0]}")
        return json.loads(line)

    def listing(self, arch: str) -> KernelListing:
        """What it launches on an arch."""
        return KernelListing(*self.ask({"list": arch}))

    def compile(self, ids: Sequence[str]) -> dict[str, Code]:
        """Machine code of kernels that it has listed."""
        wanted = [name for name in ids if name not in self._compiled]
        self._compiled |= {name: Code(**found) for name, found in self.ask({"compile": wanted}).items()}
        return {name: self._compiled[name] for name in ids}

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()
        self._log.close()


# The command.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; `arguments` without the program, None takes this process's."""
    from .cases import SOURCES
    from .machine import CDNA, MACHINES

    parser = Parser(prog="python -m pagedkv.audit.changed", description=__doc__.partition("\n")[0])
    parser.add_argument("--base", metavar="REV", help="what to compare with; default: $HILGATE_BASE")
    parser.add_argument(
        "--tritons",
        nargs="+",
        metavar="TRITON",
        help="compare no commits but these Tritons, each with the one before: the environment's own or a folder of "
        f"{TRITONS}, by version or by the folder's name",
    )
    parser.add_argument("--arch", nargs="+", choices=list(MACHINES), default=CDNA, help="default: CDNA")
    parser.add_argument("--source", nargs="+", choices=tuple(SOURCES), default=["ours"], help="whose; default: ours")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="only ids that contain one of these")
    parser.add_argument("--objects", type=Path, metavar="DIR", help="where the audit keeps code objects")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="compilers at a time")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="SECONDS", help="for one kernel; default: 180")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where findings.jsonl goes; default: $HILGATE_OUT")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--triton", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        answers = answers_alone()
        return run_command(lambda: serve(options, sys.stdin, answers))
    return run_command(lambda: _run(options))


def _run(options: argparse.Namespace) -> Exit:
    """Compare two Tritons, or this tree with the merge base, on each arch, and write the findings."""
    from .findings import exit_status, write_findings

    if options.jobs < 1 or options.timeout <= 0:
        raise MisuseError(f"--jobs and --timeout must be above 0, got {options.jobs} and {options.timeout:g}")
    if options.tritons and (options.base is not None or len(options.tritons) < 2):
        raise MisuseError("--tritons takes at least two and no --base\n  to do: name them as in --tritons 3.6.0 3.8.0")
    tritons = [installed_triton(name) for name in options.tritons or ()]
    check_environment(None)
    kernels = Path(__file__).parents[2]
    shared = ["--source", *options.source, "--only", *options.only, "--jobs", str(options.jobs)]
    shared += ["--timeout", str(options.timeout)]
    objects = [] if compiles_all(os.environ) or not options.objects else ["--objects", str(options.objects.resolve())]
    if tritons:
        findings = _compare_tritons(kernels, tritons, options, [*shared, *objects])
    else:
        findings = _compare_with_base(kernels, options, shared, objects)
    _print(findings)
    if out := options.out or os.environ.get("HILGATE_OUT"):
        write_findings(Path(out) / "findings.jsonl", findings)
    return exit_status(findings, compiled=len(findings))


def _print(findings: Sequence[Finding]) -> None:
    """Print what changed; of a kernel its id, and indented what changed of it."""
    from .findings import WIDTH

    for finding in findings:
        kernel = finding.labels.get("configurations", "").partition(" ")[0]
        first, others = ("    ", "    ") if kernel else ("", "  ")
        lines = textwrap.wrap(
            finding.message, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
        )
        sys.stdout.writelines(f"{line}\n" for line in ([f"  {kernel}", *lines] if kernel else lines))


def _compare_with_base(
    kernels: Path, options: argparse.Namespace, shared: Sequence[str], objects: Sequence[str]
) -> list[Finding]:
    """Findings about each arch; one alone where there is no merge base, or its kernels cannot be listed."""
    from .findings import Finding

    base = os.environ.get("HILGATE_BASE", "") if options.base is None else options.base
    try:
        commit = merge_base(kernels.parent, base)
    except CannotRunHereError as error:
        if base or os.environ.get("BUILDKITE") == "true":
            raise
        why = f"compared with nothing: {error}".partition("\n")[0]
        return [Finding("changed", "pass", 0.0, why, {"passed_but": why})]
    findings = []
    with contextlib.ExitStack() as stack:
        try:
            ours = stack.enter_context(contextlib.closing(Checkout(kernels, [*shared, *objects])))
            listed = {arch: ours.listing(arch) for arch in options.arch}
        except BaseUnreadableError as error:
            raise CommandError(str(error)) from error  # ours: that is a failure
        try:
            folder = stack.enter_context(kernels_at(kernels.parent, commit))
            asked_with_ours(folder)
            theirs = stack.enter_context(contextlib.closing(Checkout(folder, shared)))
            for arch, after in listed.items():
                comparison = compare(arch, theirs.listing(arch), after, theirs.compile, ours.compile)
                _check_selected(comparison, after, options.only)
                findings += findings_of(comparison, commit)
        except BaseUnreadableError as error:
            return [Finding("changed", "inconclusive", 0.0, f"merge base {commit[:12]}: {error}")]
    return findings


def _check_selected(comparison: CodeComparison, listing: KernelListing, only: Sequence[str]) -> None:
    # Not above: a merge base reads this file beside an errors.py of its own, which may lack it.
    from pagedkv.errors import NothingSelectedError

    if not comparison.kernels and not listing.problems:
        raise NothingSelectedError(f"no case matches --only {only!r}\n  to do: see --list")


def installed_triton(name: str) -> tuple[str, Path]:
    """Version of a Triton, and the folder that it is installed in.

    Args:
        name: Of a folder of `TRITONS`, or the version of one there or of the environment's own.

    Raises:
        CannotRunHereError: There is none.
    """
    folders = [TRITONS / name, *sorted(TRITONS.glob("[!.]*")), *map(Path, sys.path)]
    found = []
    for folder in folders:
        for each in importlib.metadata.distributions(name="triton", path=[str(folder)]):
            if name in (each.version, folder.name):
                return each.version, folder.resolve()
            found.append(each.version)
    raise CannotRunHereError(
        f"no Triton {name!r} is installed here or in {TRITONS}; there are {', '.join(sorted(set(found)))}\n"
        f"  to do: pip install --target {TRITONS}/{name} --no-deps triton=={name} (of the next one: make next)"
    )


def _compare_tritons(
    kernels: Path, tritons: Sequence[tuple[str, Path]], options: argparse.Namespace, shared: Sequence[str]
) -> list[Finding]:
    """Findings about each Triton and the one before it, arch by arch."""
    findings: list[Finding] = []
    with contextlib.ExitStack() as stack:
        try:
            sides = []
            for version, folder in tritons:
                side = Checkout(kernels, [*shared, "--triton", version], ahead=[folder])
                sides.append((version, stack.enter_context(contextlib.closing(side))))
            for arch in options.arch:
                listed = [(version, side, side.listing(arch)) for version, side in sides]
                for (old, was, before), (new, now, after) in itertools.pairwise(listed):
                    comparison = compare(arch, before, after, was.compile, now.compile)
                    _check_selected(comparison, after, options.only)
                    findings += triton_findings(comparison, old, new)
        except BaseUnreadableError as error:
            raise CannotRunHereError(f"Tritons {' '.join(options.tritons)}: {error}") from error
    return findings


if __name__ == "__main__":
    sys.exit(main())
