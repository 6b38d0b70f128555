# SPDX-License-Identifier: Apache-2.0
"""Record which files a step reads: `python -m hilgate.checks.reads [STEP...]` writes `ci/reads.json`.

An independent check of the selection, which is declared: a step must be selected by every file that it was seen to
read. Steps run with the hook of `hilgate.run.watch`; what other programs read (git, a compiler) is not seen.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import TypeAdapter

from hilgate.declare.load import find_root, load
from hilgate.errors import CannotRunHereError, Exit, RecordsError, ending
from hilgate.git import tracked_files
from hilgate.model import Outcome
from hilgate.plan.machine import detect
from hilgate.plan.make import plan_alone
from hilgate.run.reuse import Store, here_of
from hilgate.run.runner import run_plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hilgate.model import Key

READS_FILE: Final = "ci/reads.json"
_READS = TypeAdapter(dict[str, tuple[str, ...]])


@ending
def main(arguments: list[str] | None = None) -> int:
    """Record the named steps, by default all that are not selected by every change."""
    parser = argparse.ArgumentParser(prog="python -m hilgate.checks.reads", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="declared steps; the others keep what is recorded")
    options = parser.parse_args(arguments)
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
    return Exit.PASS


def record(root: Path, key: Key) -> tuple[str, ...]:
    """Run one declared step on this machine and return the tracked files that its Python processes read, sorted.

    Raises:
        MisuseError: There is no such step.
        CannotRunHereError: It cannot run here, or did not pass: what it would have read afterwards is not known.
    """
    with tempfile.TemporaryDirectory(prefix="hilgate-reads-") as name:
        plan = plan_alone(root, key, Path(name, "path"))
        store = Store(root, plan, here_of(root, plan, detect()))
        last = run_plan(plan, root, Path(name), store).last(plan.steps[0].key)
        if last is None or last.record.outcome is not Outcome.PASS:
            raise CannotRunHereError(
                f"step {key!r} did not pass, so it may not have read all that it reads",
                remedy=f"see why with `hilgate run {key}`",
            )
        seen, _ = store.seen(plan.steps[0], last.record.started)
    return tuple(sorted(set(tracked_files(root)).intersection(seen.reads)))


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
