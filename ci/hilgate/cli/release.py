"""The commands of a release: bundle, verify-bundle. What they import is imported when they run."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hilgate import text
from hilgate.cli import Json, Results, program, repository
from hilgate.errors import Exit, RecordsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hilgate.release.verify import Answer

COLUMNS = 80
MARKS = {True: "✓", False: "✗", None: "○"}


@program.command()
def bundle(
    ctx: typer.Context,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The tar to write.")],
    results: Results = None,
) -> None:
    """Write the evidence of a judged build to one file.

    Plan, records, verdict, pins, bill of materials and checksums.
    """
    from hilgate.cli.run import require_commit
    from hilgate.git import commit_time
    from hilgate.plan.make import read_plan
    from hilgate.release.bundle import write_bundle
    from hilgate.release.verify import verify

    root = repository(ctx)
    folder = results or root / "results"
    plan = read_plan(folder / "plan.json")
    require_commit(plan, root)  # its lock files and pins go into the bundle
    manifest = write_bundle(root, folder, out, committed=commit_time(root, plan.commit))
    answer = verify(out)
    if not answer.sound:
        out.unlink()
        _print(answer, sys.stderr.write)
        raise RecordsError(
            "what would be bundled is not sound", where=str(folder), remedy="see above; then judge again"
        )
    sys.stdout.write(f"{out}\n")
    words = f"{manifest.outcome.value}, commit {manifest.commit[:12]}, plan {manifest.plan_digest[:12]}"
    sys.stderr.write(f"{words}, profile {manifest.profile}\n")


@program.command()
def verify_bundle(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    *,
    as_json: Json = False,
    profile: Annotated[str | None, typer.Option("--profile", help="Demand this profile, e.g. release.")] = None,
    commit: Annotated[str | None, typer.Option("--commit", metavar="SHA", help="Demand this commit.")] = None,
) -> None:
    """Check a bundle and derive its verdict again. Exit status: 3 when it is not sound, else that of its verdict."""
    from hilgate.judge.verdict import exit_status
    from hilgate.release.verify import verify

    demanded = {"profile": profile, "commit": commit}
    answer = verify(file, demanded={name: value for name, value in demanded.items() if value is not None})
    verdict = answer.verdict
    if as_json:
        found = [finding.model_dump(mode="json") for finding in answer.findings]
        shown = {"sound": answer.sound, "findings": found, "outcome": verdict.outcome.value if verdict else None}
        sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    else:
        _print(answer, sys.stdout.write)
    if verdict is None or answer.plan is None:
        raise typer.Exit(Exit.INVALID_DECLARATION)
    raise typer.Exit(exit_status(verdict, answer.plan))


def _print(answer: Answer, write: Callable[[str], object]) -> None:
    for finding in answer.findings:
        lines = text.visible(finding.words).splitlines()
        start = f"{MARKS[finding.sound]} {finding.check:<10} "
        for line in lines:
            wrapped = textwrap.wrap(line.strip(), COLUMNS - len(start), break_long_words=False, break_on_hyphens=False)
            for part in wrapped:
                write(f"{start}{part}\n")
                start = " " * len(start)
    if answer.verdict is not None:
        write(f"sound; its verdict: {answer.verdict.outcome.value}\n")
    else:
        write("NOT SOUND: nothing that it says counts\n")
