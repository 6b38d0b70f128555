# SPDX-License-Identifier: Apache-2.0
"""Lint the repository (linters, house rules about files): `python ci/lint.py`.

Linters know neither JUnit nor findings; here each becomes one check with its command, so a failure can be pasted back.
Under the runner (`HILGATE_OUT` set) the checks are also written to `findings.jsonl`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hilgate.buildkite.lint import FLOWS, lint_files
from hilgate.declare import yaml
from hilgate.declare.imports import build as build_imports
from hilgate.declare.load import find_root, load, load_project
from hilgate.declare.protected import PROTECTED_FILE, ProtectedList, unprotected_imports, unread_code
from hilgate.errors import Exit, NothingSelectedError, Parser, ending
from hilgate.git import tracked_files
from hilgate.model.record import Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

TIMEOUT_SECONDS = 400
MESSAGE_LINES = 25
"""Most lines of a linter's output; the rest is one pasted command away."""

HOOKS = ("environment", "post-checkout", "pre-command", "post-command", "pre-exit")
"""Shell scripts without a suffix."""

SCRIPTS = (".sh", ".ci/run", "ci/bin/hilgate", *(f"ci/hooks/{name}" for name in HOOKS))
"""How the names of shell scripts end."""

LICENSE = "# SPDX-License-Identifier: Apache-2.0"
"""First line of every Python file, and of a script below its `#!`."""


@dataclass(frozen=True)
class Linter:
    """A tool that exits 0 when it has nothing to say."""

    id: str
    command: str
    """`python -m <module>` or a program beside the interpreter or on the path."""
    suffixes: tuple[str, ...] = ()
    """When given: the tracked files with these endings are appended, and without any the linter has no work."""
    takes_files: bool = True
    """Whether they are appended."""


LINTERS = (
    Linter("ruff-check", "python -m ruff check --quiet ."),
    Linter("ruff-format", "python -m ruff format --check --quiet ."),
    Linter("mypy", "python -m mypy --no-error-summary"),
    Linter("mypy-workflow", "python -m mypy --no-error-summary .github/rerun.py"),
    Linter("import-contracts", "lint-imports --no-logo"),
    Linter("yamllint", "python -m yamllint --strict", (".yaml", ".yml")),
    Linter("shellcheck", "shellcheck", SCRIPTS),
    Linter("hadolint", "hadolint", ("Dockerfile",)),
    Linter("reference", "python docs/reference.py", ("docs/reference.py",), takes_files=False),
    Linter("site", "python -m mkdocs build --strict", ("mkdocs.yml",), takes_files=False),
)

FOLDERS = ("kernels", "ci", "evals", "tests", "docker")
"""Folders that are no packages: `kernels/__init__.py` would shadow the `kernels` package that transformers imports."""

FORBIDDEN = {
    "no-machine-path": (
        re.compile(r"(?<![\w.$}~-])/(?:home|Users|work)/\w[\w./-]*"),
        "is a path of one machine; make it relative to the repository",
    ),
    "no-package-index": (
        re.compile(
            r"https?://[^\s/\"']*(?:pypi|artifactory|jfrog|nexus|devpi)[^\s\"']*|--(?:extra-)?index-url[= ]\S+",
            re.IGNORECASE,
        ),
        "names a package index; leave that to pip's configuration",
    ),
}
"""Check id -> what no line of any file may hold, and why."""

MOST_COLUMNS = 88
"""Columns of a code block in a page."""

_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)\s#]+)")
_BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```$|^    ([^\n]*)$", re.MULTILINE | re.DOTALL)
_PINNED = re.compile(r"^([\w.-]+)==([^\s;]+)(.*(?:\n[ #].*)*)", re.MULTILINE)
"""A package of a lock: its name, its version, and its hashes with uv's comment about what asks for it."""
_VIA = re.compile(r"# (?:via|  ) ?-r (\S+)")
"""An input in that comment: `# via -r x.in`, or `#   -r x.in` in a list."""


def folder_packages(texts: Mapping[str, str]) -> list[str]:
    """`__init__.py` directly in a top folder, or anywhere under tests/."""
    paths = [PurePosixPath(name) for name in texts if name.endswith("__init__.py")]
    packages = [path for path in paths if str(path.parent) in FOLDERS or path.parts[0] == "tests"]
    return [f"{path}: makes a package of a top folder; delete it" for path in packages]


def licenses(texts: Mapping[str, str]) -> list[str]:
    """Python files and scripts that do not begin with their license; an empty file needs none."""
    return [
        f"{name}:1: the license is missing; begin it with {LICENSE!r}, a script below #!"
        for name, text in texts.items()
        if text and name.endswith((".py", *SCRIPTS)) and LICENSE not in text.splitlines()[: 1 + text.startswith("#!")]
    ]


def pipelines(texts: Mapping[str, str]) -> list[str]:
    """Problems of the files of `.buildkite`: by Buildkite's schema, and what it cannot see."""
    paths = {name: f".buildkite/{name}" for name in FLOWS}
    found = {name: texts[path] for name, path in paths.items() if path in texts}
    return lint_files(found, load(find_root(Path.cwd()))) if found else []


def links(texts: Mapping[str, str]) -> list[str]:
    """Links of pages to files that are not in git. MkDocs checks docs/ alone, and there anchors too."""
    known = {str(folder) for name in texts for folder in (PurePosixPath(name), *PurePosixPath(name).parents)}
    return [
        f"{name}: links to {target}, which is not in git"
        for name, text in texts.items()
        if name.endswith(".md")
        for target in _LINK.findall(_BLOCK.sub("", text))
        if os.path.normpath(PurePosixPath(name).parent / target) not in known
    ]


def wide_blocks(texts: Mapping[str, str]) -> list[str]:
    """Lines of code blocks that a page of usual width cuts off."""
    return [
        f"{name}: {len(line)} columns in a code block, at most {MOST_COLUMNS}: {line.strip()[:40]}..."
        for name, text in texts.items()
        if name.endswith(".md") and not name.startswith("benchmarks/results/")
        for fenced, indented in _BLOCK.findall(text)
        for line in (*fenced.splitlines(), indented)
        if len(line) > MOST_COLUMNS
    ]


def stale_locks(texts: Mapping[str, str]) -> list[str]:
    """Packages by which a lock (`x.txt`) differs from its inputs: `x.in`, and what that includes."""
    found = []
    for name in texts:
        lock = f"{name.removesuffix('.in')}.txt"
        if not name.endswith(".in") or lock not in texts:
            continue
        folder, versions, locked_for = PurePosixPath(name).parent, dict[str, str](), set[tuple[str, str]]()
        remedy = f"run {folder}/lock.sh"
        for package, version, comments in _PINNED.findall(texts[lock]):
            versions[package] = version
            locked_for |= {(os.path.normpath(folder / source), package) for source in _VIA.findall(comments)}
        asked_for = set()
        for source, requirement in _requirements(name, texts):
            package = str(canonicalize_name(requirement.name))
            asked_for.add((source, package))
            version = versions.get(package, "")
            if not version or not requirement.specifier.contains(version, prereleases=True):
                found.append(f"{lock}: {source} asks for {requirement}, it has {version or 'none'}; {remedy}")
        for source, package in sorted(locked_for - asked_for):
            found.append(f"{lock}: {source} no longer asks for {package}, it has {versions[package]}; {remedy}")
    return found


def _requirements(name: str, texts: Mapping[str, str]) -> Iterator[tuple[str, Requirement]]:
    """Each requirement of an input, and of the files that it includes with `-r`, after the name of its file."""
    for line in texts.get(name, "").splitlines():
        words = line.partition("#")[0].strip()
        if words.startswith("-r "):
            yield from _requirements(os.path.normpath(PurePosixPath(name).parent / words[3:]), texts)
        elif words:
            yield name, Requirement(words)


def forbidden(texts: Mapping[str, str], pattern: re.Pattern[str], why: str) -> list[str]:
    """Lines that match a pattern."""
    found = []
    for name, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            match = pattern.search(line)
            found += [f"{name}:{number}: {match[0]} {why}"] if match else []
    return found


def local_hooks(texts: Mapping[str, str]) -> list[str]:
    """Hooks where an agent looks for a repository's own: with `no-local-hooks` it would then run no job at all."""
    found = [name for name in texts if name.startswith(".buildkite/hooks/")]
    return [f"{name}: an agent with no-local-hooks refuses every job; hooks belong to ci/hooks" for name in found]


def unread(texts: Mapping[str, str]) -> list[str]:
    """Code that Python runs and a reader does not see; agents plan no change that adds it."""
    why = unread_code(texts, texts)
    return [f"{name}: {words}; delete it, or give it another name" for name, words in why.items()]


def protected_imports(texts: Mapping[str, str]) -> list[str]:
    """Modules that a protected module imports and that anybody may change: they decide as much as it does."""
    if PROTECTED_FILE not in texts:
        return []
    root = find_root(Path.cwd())
    listed = yaml.parse(texts[PROTECTED_FILE].encode(), PROTECTED_FILE, ProtectedList)
    imports = build_imports(root, load_project(root).python_path)
    if listed.value is None or imports.graph is None:
        why = imports.problem or "it cannot be read"
        return [f"{PROTECTED_FILE}: it is unknown what protected modules import: {why}"]
    return [
        f"{path}: {importer} is protected and imports it; protect it too, or name it in `tested` of {PROTECTED_FILE}"
        for path, importer in unprotected_imports(listed.value, imports, texts).items()
    ]


RULES: dict[str, Callable[[Mapping[str, str]], list[str]]] = {
    "no-folder-package": folder_packages,
    "licenses": licenses,
    "links": links,
    "wide-blocks": wide_blocks,
    "stale-locks": stale_locks,
    "pipelines": pipelines,
    "no-local-hooks": local_hooks,
    "no-unread-code": unread,
    "protected-imports": protected_imports,
    **{name: functools.partial(forbidden, pattern=one, why=why) for name, (one, why) in FORBIDDEN.items()},
}
"""Check id -> rule: text of each file to findings."""


def conclude(checks: Iterable[Check]) -> Exit:
    """Print checks as they finish, and return the exit status: 0, 1 (one failed) or 5 (one did not run).

    Under the runner (`HILGATE_OUT` set) they are also written to `findings.jsonl`, after each one: what had finished
    is there when the command is ended.
    """
    out, done = os.environ.get("HILGATE_OUT"), list[Check]()
    for check in checks:
        done.append(check)
        sys.stdout.write(f"{check.outcome.value:<12} {check.id:<32} {check.seconds:5.1f} s  {check.message}\n")
        sys.stdout.flush()
        if out:
            Check.write_all(Path(out), done)
    outcomes = {check.outcome for check in done}
    if Outcome.FAIL in outcomes:
        return Exit.FAIL
    return Exit.CANNOT_RUN_HERE if Outcome.DID_NOT_RUN in outcomes else Exit.PASS


@ending
def main() -> int:
    """Check the repository around the current folder; exit status 0, 1 (findings) or 5 (a tool is missing)."""
    return conclude(checks(find_root(Path.cwd())))


def checks(root: Path) -> Iterator[Check]:
    """One check per linter that has work and per house rule, as they finish.

    Raises:
        NothingSelectedError: git lists no file.
        CannotRunHereError: There is no git to list the files.
    """
    files = tracked_files(root)
    if not files:
        raise NothingSelectedError("git lists no file to check", where=str(root), remedy="run it in a checkout")
    for linter in LINTERS:
        work = [name for name in files if linter.suffixes and name.endswith(linter.suffixes)]
        if work or not linter.suffixes:
            yield lint(linter, work if linter.takes_files else [], root)
    texts = _texts(root)
    for name, rule in RULES.items():
        began = time.monotonic()
        found = rule(texts)
        yield Check(
            id=name,
            outcome=Outcome.FAIL if found else Outcome.PASS,
            seconds=time.monotonic() - began,
            message=_shortened(found) if found else f"{len(texts)} files",
            numbers={"findings": len(found)},
        )


def lint(linter: Linter, files: list[str], root: Path) -> Check:
    """Run one linter. Only its own exit status 0 passes; a missing, killed or endless tool did not run."""
    words = [*shlex.split(linter.command), *files]
    began = time.monotonic()

    def ended(outcome: Outcome, message: str = "") -> Check:
        seconds, labels = time.monotonic() - began, {"command": linter.command}
        return Check(id=linter.id, outcome=outcome, seconds=seconds, message=message, labels=labels)

    if not (program := _program(words)):
        return ended(Outcome.DID_NOT_RUN, f"{words[2] if words[1:2] == ['-m'] else words[0]} is not installed")
    try:
        done = subprocess.run(
            [program, *words[1:]],
            cwd=root,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return ended(Outcome.DID_NOT_RUN, f"did not finish: {error}")
    if done.returncode == 0:
        return ended(Outcome.PASS)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    outcome = Outcome.FAIL if done.returncode > 0 else Outcome.DID_NOT_RUN
    return ended(outcome, f"exit status {done.returncode}: {_shortened(lines)}")


def _program(words: list[str]) -> str:
    """The program to start: this interpreter, a program beside it, or one on the path; '' when it is missing."""
    if words[0] == "python":
        absent = words[1] == "-m" and importlib.util.find_spec(words[2].partition(".")[0]) is None
        return "" if absent else sys.executable
    beside = Path(sys.executable).with_name(words[0])
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(words[0]) or ""


def _texts(root: Path) -> dict[str, str]:
    """Text of each tracked file; empty for a binary one."""
    return {name: _text(root / name) for name in tracked_files(root)}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def _shortened(lines: list[str]) -> str:
    rest = f"\n... and {len(lines) - MESSAGE_LINES} more lines" if len(lines) > MESSAGE_LINES else ""
    return "\n".join(lines[:MESSAGE_LINES]) + rest


if __name__ == "__main__":
    Parser(prog="ci/lint.py", description=__doc__).parse_args()
    sys.exit(main())
