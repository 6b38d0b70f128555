# SPDX-License-Identifier: Apache-2.0
"""Record which files a step reads: `python -m hilgate.checks.reads [STEP...]` writes `ci/reads.json`.

An independent check of the selection, which is declared: a step must be selected by every file that it was seen to
read. Steps run with an audit hook in every Python process; what other programs read (git, a compiler) is not seen.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import TypeAdapter

from hilgate.declare.load import find_root, load
from hilgate.errors import CannotRunHereError, Exit, HilgateError, RecordsError
from hilgate.git import tracked_files
from hilgate.model import Outcome
from hilgate.plan.make import plan_alone
from hilgate.run.runner import run_plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hilgate.model import Key

READS_FILE: Final = "ci/reads.json"
_READS = TypeAdapter(dict[str, tuple[str, ...]])


def watch(folder: str, root: str) -> None:
    """Write the name of every file below `root/` that this process opens for reading to `folder`, at its first opening.

    Runs in other processes as their `sitecustomize`, where os and sys alone are imported. A process may end without
    notice, so nothing is kept for its end.
    """
    seen: set[str] = set()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path, mode, flags = arguments
        # builtins.open gives a mode, os.open flags alone; both give flags.
        if isinstance(flags, int) and flags & os.O_ACCMODE == os.O_WRONLY:
            return
        if isinstance(mode, str) and mode[:1] in {"w", "a", "x"}:
            return
        name = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
        if name in seen or not name.startswith(root):
            return
        seen.add(name)
        # Opened anew each time: a forked child must not share a position in the file.
        descriptor = os.open(f"{folder}/{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, os.fsencode(name) + b"\0")
        finally:
            os.close(descriptor)

    sys.addaudithook(hook)


def main(arguments: list[str] | None = None) -> int:
    """Record the named steps, by default all that are not selected by every change."""
    parser = argparse.ArgumentParser(prog="python -m hilgate.checks.reads", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="declared steps; the others keep what is recorded")
    options = parser.parse_args(arguments)
    try:
        root = find_root(Path.cwd())
        declarations = load(root)
        always = {step.key for area, step in declarations.steps() if area.always}
        declared = [step.key for _, step in declarations.steps()]
        chosen = options.steps or [key for key in declared if key not in always]
        path = root / READS_FILE
        known = {key: files for key, files in read(path).items() if key in declared} if path.exists() else {}
        for key in chosen:
            known[key] = record(root, key)
            path.write_text(text_of(known), encoding="utf-8")
            sys.stdout.write(f"{key}: {len(known[key])} files\n")
    except HilgateError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_status
    return Exit.PASS


def record(root: Path, key: Key) -> tuple[str, ...]:
    """Run one declared step on this machine and return the tracked files that its Python processes read, sorted.

    Raises:
        MisuseError: There is no such step.
        CannotRunHereError: It cannot run here, or did not pass: what it would have read afterwards is not known.
    """
    with tempfile.TemporaryDirectory(prefix="hilgate-reads-") as name:
        folder = Path(name)
        for part in ("path", "lists"):
            (folder / part).mkdir()
        call = f"watch({str(folder / 'lists')!r}, {os.path.realpath(root) + '/'!r})"
        hook = f"import os, sys\n\n{inspect.getsource(watch)}\n\n{call}\n"
        (folder / "path" / "sitecustomize.py").write_text(hook, encoding="utf-8")
        plan = plan_alone(root, key, folder / "path")
        last = run_plan(plan, root, folder).last(plan.steps[0].key)
        if last is None or last.record.outcome is not Outcome.PASS:
            raise CannotRunHereError(
                f"step {key!r} did not pass, so it may not have read all that it reads",
                remedy=f"see why with `hilgate run {key}`",
            )
        names = b"".join(path.read_bytes() for path in (folder / "lists").iterdir()).split(b"\0")
    return relative((os.fsdecode(name) for name in names if name), root)


def relative(names: Iterable[str], root: Path) -> tuple[str, ...]:
    """Tracked files among absolute names, below the root; a compiled module counts as its source."""
    tracked = frozenset(tracked_files(root))
    found = set()
    for name in names:
        path = Path(name)
        if path.suffix == ".pyc":  # <folder>/__pycache__/<module>.<whoever compiled it>.pyc
            path = path.parent.parent / f"{path.name.partition('.')[0]}.py"
        if path.is_relative_to(root.resolve()):
            found.add(path.relative_to(root.resolve()).as_posix())
    return tuple(sorted(found & tracked))


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
