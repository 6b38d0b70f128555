# SPDX-License-Identifier: Apache-2.0
"""Replay whole builds with injected faults, and compare each verdict with what really happened.

Exit status 1 when a build passed that must not, or when a result was lost.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from support.simulate.campaign import Campaign
from support.simulate.scenarios import DEFAULT_RATE

from hilgate.declare.load import find_root
from hilgate.errors import Exit, MisuseError, ending
from hilgate.report import terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.simulate.campaign import Tally

_SEED = re.compile(r"(?P<seed>[A-Za-z0-9_.-]+)(?::(?P<number>\d+))?")
SHOWN_FAILURES = 10
"""Failing builds that are printed; `--json` has all."""

_MEANINGS = {
    "false_passes": "passed and must not",
    "lost_results": "arrived and are not in the verdict",
    "false_blames": "infrastructure ruled a regression or unfinished",
    "needless_blocks": "deserved to pass and did not",
    "unseen_failures": "of attempts that were retried, in builds that passed",
}


@ending
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a series of builds and print what became of them; returns the exit status.

    Raises:
        MisuseError: The seed is none, or names one build where several are asked for.
    """
    parser = argparse.ArgumentParser(prog="python -m support.simulate", description=__doc__)
    parser.add_argument("--builds", type=_count, default=1000, metavar="N", help="number of builds to replay")
    parser.add_argument("--seed", default="1", metavar="S", help="seed of the series; S:17 is build 17 of series S")
    parser.add_argument(
        "--rate", type=_share, default=DEFAULT_RATE, metavar="P", help="probability of each kind of fault in a build"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the files of every build in this folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    given = parser.parse_args(arguments)
    match = _SEED.fullmatch(given.seed)
    if match is None:
        remedy = "use letters, digits, '.', '_', '-'; S:17 is one build"
        raise MisuseError(f"{given.seed!r} is no seed", where="--seed", remedy=remedy)
    number = None if match["number"] is None else int(match["number"])
    if number is not None and given.builds != 1:
        remedy = "add --builds 1, or leave out the number"
        raise MisuseError("a seed with a number is one build", where=f"--seed {given.seed}", remedy=remedy)
    console, every = terminal.stderr(), given.builds // 10 or 1

    def tick(done: int) -> None:
        """A line every tenth of the way, so that a long series is not silent."""
        if done % every == 0 and done < given.builds >= 200:
            terminal.say(console, f"{done} of {given.builds} builds", "dim")

    root = find_root(Path.cwd())
    tally = Campaign(root, given.builds, match["seed"], given.rate, only=number, keep=given.keep).run(tick)
    if given.json:
        sys.stdout.write(json.dumps(tally.as_json(), indent=1) + "\n")
    else:
        _print(tally)
    return Exit.PASS if tally.sound else Exit.FAIL


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def _share(text: str) -> float:
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError("must be a share from 0 to 1")
    return float(text)


def _print(tally: Tally) -> None:
    from rich.columns import Columns
    from rich.text import Text

    console = terminal.stdout()
    total = sum(tally.faults.values())
    terminal.say(
        console,
        f"{tally.builds} builds, {tally.steps} steps, {total} faults of {len(tally.faults)} kinds, "
        f"{tally.seconds:.1f} s",
    )
    listed = [f"{count:5} {kind}" for kind, count in tally.faults.most_common()]
    console.print("", Columns(listed, column_first=True), sep="\n")
    for title, counts in (("deserved", tally.deserved), ("verdicts", tally.verdicts), ("rulings", tally.rulings)):
        words = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        console.print()
        terminal.say(console, f"{title}: {words}")
    figures = tally.as_json()
    bad = {name for name in ("false_passes", "lost_results") if figures[name]}
    rows = [
        (Text(str(figures[name]), "red" if name in bad else ""), name.replace("_", " "), meaning)
        for name, meaning in _MEANINGS.items()
    ]
    console.print("", terminal.table_of(("", "", ""), rows, header=False), sep="\n")
    for failing in tally.failing[:SHOWN_FAILURES]:
        console.print()
        terminal.say(console, f"{failing.problem.kind.value}: {failing.problem.why.splitlines()[0]}", "bold")
        for line in (*failing.shrunk, f"reproduce: {failing.reproduce}"):
            terminal.say(console, str(line), indent="  ", whole=True)
    if len(tally.failing) > SHOWN_FAILURES:
        console.print(f"\nand {len(tally.failing) - SHOWN_FAILURES} more")


if __name__ == "__main__":
    sys.exit(main())
