# SPDX-License-Identifier: Apache-2.0
"""Record which files each step reads, and hold the selection against it: `python -m hilgate.checks.reads`.

An independent check of the selection, which is declared: a step must be selected by every file that it was seen to
read. `ci/reads.json` has what was seen, and the step `selection` holds every name of it against the plan. The nightly
step `reads` runs every step of a local run with the hook of `hilgate.checks.watch`. It is red where a step reads a file
that does not select it, and where a step rests on something outside of the repository and does not say `reuse: false`.
It writes the new `reads.json`. What other programs read (git, a compiler) is not seen.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import socket
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import Field, TypeAdapter, ValidationError

from hilgate.checks.watch import CONNECTION, GIT
from hilgate.declare import imports
from hilgate.declare.load import find_root, load
from hilgate.errors import CannotRunHereError, DeclarationError, Exit, HilgateError, RecordsError, ending
from hilgate.evidence import KINDS
from hilgate.git import tracked_files
from hilgate.model import StrictModel, first_problem
from hilgate.model.declaration import CPU
from hilgate.model.record import Check, Outcome
from hilgate.plan.make import plan_alone
from hilgate.plan.select import select
from hilgate.run.reuse import may_be_reused, own_path
from hilgate.run.runner import run_plan

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from hilgate.declare.load import Declarations
    from hilgate.model import Key
    from hilgate.model.declaration import Area, Step
    from hilgate.model.plan import PlannedStep

READS_FILE: Final = "ci/reads.json"
RECORD_IT: Final = "record it with `python -m hilgate.checks.reads {}`"
SHOWN: Final = 5
"""Files that a message names."""

SYSTEM: Final = ("/bin/", "/dev/", "/etc/", "/lib/", "/lib32/", "/lib64/", "/proc/", "/sbin/", "/sys/", "/usr/")
"""Folders of the system that a machine is known by (`run.reuse.machine_digest`)."""

_READS = TypeAdapter(dict[str, tuple[str, ...]])
_NO_INPUT: Final = ("*.pytest_cache/*", "*__pycache__/*", ".hypothesis/constants/*", ".git", f"{GIT}ls-files")
"""What chooses tests by options alone that no step has; bytecode; constants of a module, by the hash of its text;
the link of a worktree; and the names of all files, which the key of a pass holds."""
_LISTENS: Final = "0A"
"""The state of a listening socket in /proc/net/tcp."""
_TEST_FILE = re.compile(r"(?:.*/)?test_[^/]*\.py")
_SITE: Final = """{watch}

watch({folder!r}, {root!r}, {held!r}, {began!r})
# The next sitecustomize of the path, which this file stands before.
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
_spec = PathFinder.find_spec("sitecustomize", sys.path[sys.path.index({folder!r}) + 1 :])
if _spec and _spec.loader:
    _spec.loader.exec_module(module_from_spec(_spec))
"""


class Weightless(StrictModel):
    """Reads that can break no step, with the reason."""

    steps: tuple[str, ...] = Field(min_length=1)
    """Declared steps that read them."""
    why: str = Field(min_length=1)


_WEIGHTLESS = TypeAdapter(dict[str, Weightless])


@ending
def main(arguments: list[str] | None = None) -> int:
    """Record the named steps, by default all that the local gate runs on a cpu and that a change may leave out.

    With `--check` the record goes to `$HILGATE_OUT`, and findings say what does not select its reader.
    """
    parser = argparse.ArgumentParser(prog="python -m hilgate.checks.reads", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="steps to record; the others keep their record")
    parser.add_argument("--check", action="store_true", help="write findings and the record to $HILGATE_OUT")
    options = parser.parse_args(arguments)
    root = find_root(Path.cwd())
    declarations = load(root)
    chosen = options.steps or [step.key for area, step in declarations.steps() if is_recorded(area, step)]
    path = root / READS_FILE
    declared = {step.key for _, step in declarations.steps()}
    known = {key: files for key, files in read(path).items() if key in declared} if path.exists() else {}
    folder = Path(os.environ.get("HILGATE_OUT", "results/reads")) if options.check else None
    target = folder / path.name if folder else path
    target.parent.mkdir(parents=True, exist_ok=True)
    failed: list[Check] = []
    seen: dict[Key, Seen] = {}
    for key in chosen:
        try:
            seen[key] = record(root, key)
        except HilgateError as error:
            if not folder:
                raise
            failed.append(Check(id=f"reads of {key}", outcome=Outcome.DID_NOT_RUN, message=error.what))
            known.pop(key, None)
            continue
        known[key] = seen[key].files
        target.write_text(text_of(known), encoding="utf-8")
        sys.stdout.write(f"{key}: {len(known[key])} files\n")
        sys.stdout.flush()
    reused = list(rests(root, declarations, seen))
    if folder is None:
        wrong = [check for check in reused if check.outcome is Outcome.FAIL]
        sys.stderr.writelines(f"{check.id}: {check.message}\n" for check in wrong)
        return Exit.FAIL if wrong else Exit.PASS
    lost = {check.id for check in failed}
    found = [*failed, *(check for check in held(root, declarations, known) if check.id not in lost), *reused]
    Check.write_all(folder, found)
    return Exit.FAIL if any(check.outcome is Outcome.FAIL for check in found) else Exit.PASS


def is_recorded(area: Area, step: Step) -> bool:
    """Whether a change may leave a step out of the local gate on a machine without a GPU, so that its reads count."""
    return not area.always and "gate" in step.profiles and CPU in step.devices


@dataclass(frozen=True)
class Seen:
    """What one run of a step was seen to rest on.

    Attributes:
        files: Tracked files that its Python processes read, sorted.
        outside: What else they read or listed that was there before, below the repository's root by their names there,
            and where they connected to, and what they asked git; sorted.
    """

    files: tuple[str, ...]
    outside: tuple[str, ...]


def record(root: Path, key: Key) -> Seen:
    """Run one declared step on this machine and return what it rests on.

    Raises:
        MisuseError: There is no such step.
        CannotRunHereError: It cannot run here, or did not pass, or a note was lost: not all that it reads is known.
    """
    tracked = set(tracked_files(root))
    folders = {f"{parent}/" for file in tracked for parent in Path(file).parents}
    with tempfile.TemporaryDirectory(prefix="hilgate-reads-") as name:
        site = Path(name).resolve() / "path"
        (site / "lists").mkdir(parents=True)
        (site / "whole").touch()
        began = (site / "whole").stat().st_ctime_ns
        plan = plan_alone(root, key, site)
        # A temporary folder of its own, in which nothing is older than the step.
        (temporary := Path(name, "tmp")).mkdir()
        step = plan.steps[0].model_copy(update={"env": plan.steps[0].env | {"TMPDIR": str(temporary)}})
        plan = plan.model_copy(update={"steps": (step,)})
        held = _held(root, step, site, folders)
        hook = Path(__file__).with_name("watch.py").read_text(encoding="utf-8")
        text = _SITE.format(watch=hook, folder=str(site), root=os.path.realpath(root), held=held, began=began)
        (site / "sitecustomize.py").write_text(text, encoding="utf-8")
        serving = _serving()
        last = run_plan(plan, root, Path(name, "results")).last(step.key)
        if last is None or last.record.outcome is not Outcome.PASS:
            raise CannotRunHereError(
                f"step {key!r} did not pass, so it may not have read all that it reads",
                remedy=f"see why with `hilgate run {key}`",
            )
        if not (site / "whole").exists():
            raise CannotRunHereError(f"not all that {key!r} reads could be noted", remedy="free disk space, try again")
        notes = {os.fsdecode(note) for path in (site / "lists").iterdir() for note in path.read_bytes().split(b"\0")}
    left = notes - tracked - folders - {""}
    outside = (note for note in left if _is_outside(note, root, held, began, serving))
    return Seen(tuple(sorted(tracked & notes)), tuple(sorted(outside)))


def _held(root: Path, step: PlannedStep, site: Path, folders: Collection[str]) -> tuple[str, ...]:
    """The folders of the system and of the import path, which the key of a pass holds; none with files of the tree."""
    given = (step.env.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", ""))
    path = [Path(part) for one in given for part in one.split(os.pathsep) if part]
    paths = (Path(sys.prefix), Path(sys.base_prefix), site, *path, *own_path())
    places = {f"{os.path.realpath(root / place)}/" for place in paths}
    top = f"{os.path.realpath(root)}/"
    return (*SYSTEM, *sorted(place for place in places if place != top and place.removeprefix(top) not in folders))


def _is_outside(note: str, root: Path, held: tuple[str, ...], began: int, serving: Collection[int]) -> bool:
    """Whether a note of a step is of something that is neither its own nor of the environment."""
    if any(fnmatch.fnmatchcase(note, glob) for glob in _NO_INPUT):
        return False
    if note.startswith(CONNECTION):
        host, _, port = note.removeprefix(CONNECTION).rpartition(":")
        return not _is_of_this_machine(host) or int(port) in serving
    if note.startswith(("/", GIT)):
        return True  # the hook itself knows which
    path = Path(os.path.realpath(root)) / note
    return not f"{path}/".startswith(held) and path.exists() and path.lstat().st_ctime_ns < began


def _is_of_this_machine(host: str) -> bool:
    """Whether an address is one of this machine's own."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as one:
            one.bind(address)
    except OSError:
        return False
    return True


def _serving() -> frozenset[int]:
    """The ports on which somebody listens now."""
    tables = [path for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
    lines = [line.split() for path in tables for line in path.read_text("ascii").splitlines()[1:]]
    return frozenset(int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == _LISTENS)


def rests(root: Path, declarations: Declarations, seen: Mapping[Key, Seen]) -> Iterator[Check]:
    """One check per step that may be reused: that it rests on nothing outside of the repository.

    Raises:
        DeclarationError: The reads that decide nothing are not declared as they should be.
    """
    outside = weighty(root, {key: one.outside for key, one in seen.items()})
    for _, step in declarations.steps():
        if step.key not in seen or not may_be_reused(step):
            continue
        names = list(outside[step.key])
        problem = f"it rests on {_some(names)}, outside of what a reused pass holds for; say `reuse: false` in its area"
        yield Check(
            id=f"reuse of {step.key}",
            outcome=Outcome.FAIL if names else Outcome.PASS,
            message=problem if names else "it rests on nothing outside of the repository and its environment",
            numbers={"outside": len(names)},
        )


def held(root: Path, declarations: Declarations, reads: Mapping[Key, Collection[str]]) -> Iterator[Check]:
    """One check per step: that each file it was seen to read selects it, and that it was seen at all, as it is now.

    Raises:
        DeclarationError: The reads that decide nothing are not declared as they should be.
    """
    tracked = set(tracked_files(root))
    graph = imports.build(root, declarations.project.python_path)
    names = sorted({name for files in reads.values() for name in files} & tracked)
    selected = {name: select(declarations.areas, [name], graph).reasons for name in names}
    weightless = declared_weightless(root)
    tests = sorted(name for name in tracked if _TEST_FILE.fullmatch(name))
    for area, step in declarations.steps():
        if not is_recorded(area, step) and step.key not in reads:
            continue
        files = set(reads.get(step.key, ()))
        light = [glob for glob, one in weightless.items() if step.key in one.steps]
        missed = [
            name
            for name in sorted(files & tracked)
            if step.key not in selected[name] and not any(fnmatch.fnmatchcase(name, glob) for glob in light)
        ]
        new = _unseen(step, files, tests)
        problem = ""
        if step.key not in reads:
            problem = f"nobody has recorded what it reads; {RECORD_IT.format(step.key)}"
        elif missed:
            problem = f"it reads {_some(missed)}, which does not select it; name it in the area's paths or in imports"
        elif new:
            problem = f"its record is older than {_some(new)}; {RECORD_IT.format(step.key)}"
        yield Check(
            id=f"reads of {step.key}",
            outcome=Outcome.FAIL if problem else Outcome.PASS,
            message=problem or f"{len(files)} files",
            numbers={"files": len(files), "missed": len(missed)},
        )


def _unseen(step: Step, files: Collection[str], tests: Iterable[str]) -> list[str]:
    """Test files that a step's command runs and that its record does not have."""
    if step.evidence != "junit":
        return []
    reaches = KINDS["junit"].reaches
    ours = [name for name in tests if reaches(step.command, f"{name}::test")]
    return [name for name in ours if name not in files]


def declared_weightless(root: Path) -> dict[str, Weightless]:
    """`[tool.hilgate.weightless_reads]` of pyproject.toml: glob -> which steps read it, and why that decides nothing.

    Raises:
        DeclarationError: It is something else.
    """
    path = root / "pyproject.toml"
    if not path.exists():
        return {}
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("hilgate", {})
        return _WEIGHTLESS.validate_python(data.get("weightless_reads", {}))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        why = first_problem(error) if isinstance(error, ValidationError) else str(error)
        where = f"{path} [tool.hilgate.weightless_reads]"
        raise DeclarationError(why, where=where, remedy='write "glob" = {steps = [...], why = "..."}') from error


def weighty(root: Path, reads: Mapping[Key, Iterable[str]]) -> dict[Key, tuple[str, ...]]:
    """The recorded reads without those that are declared to decide nothing.

    Raises:
        DeclarationError: They are not declared as they should be.
    """
    globs = [(glob, step) for glob, one in declared_weightless(root).items() for step in one.steps]
    return {
        key: tuple(name for name in names if not any(s == key and fnmatch.fnmatchcase(name, g) for g, s in globs))
        for key, names in reads.items()
    }


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def text_of(reads: Mapping[Key, Iterable[str]]) -> str:
    """The recorded reads as `ci/reads.json` has them."""
    return json.dumps({key: list(reads[key]) for key in sorted(reads)}, indent=1) + "\n"


def read(path: Path) -> dict[Key, tuple[str, ...]]:
    """Step -> the files it was seen to read.

    Raises:
        RecordsError: The file is missing, or is not what `text_of` writes.
    """
    try:
        return _READS.validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RecordsError(
            f"the recorded reads cannot be read: {error}",
            where=str(path),
            remedy="record it with `python -m hilgate.checks.reads`",
        ) from error


if __name__ == "__main__":
    sys.exit(main())
