# SPDX-License-Identifier: Apache-2.0
"""Run the commands that a page shows, and compare what they print with what the page says.

    ```console              each line that begins with `$ ` is run, with those that a `\\` joins to it; what follows
                            must be printed, in this order
    $ hilgate plan
    exit 1                  the status, where it is not 0
    ```
    ```console no-run: WHY  not run, for a reason
    ```console slow         run on agents alone

Numbers and times may be others. `...` stands for anything.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```console(?P<mark>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
NO_RUN, SLOW = "no-run:", "slow"


@dataclass(frozen=True)
class Command:
    """A command of a page, the lines that it must print, and its exit status."""

    line: str
    prints: tuple[str, ...]
    status: int
    mark: str = ""


def commands(page: str) -> Iterator[Command]:
    """The commands of a page, in their order."""
    for block in BLOCK.finditer(page):
        for part in re.split(r"^\$ ", block["text"], flags=re.MULTILINE)[1:]:
            line, *prints = part.replace("\\\n", "").splitlines()
            status = int(prints.pop().removeprefix("exit ")) if prints and prints[-1].startswith("exit ") else 0
            yield Command(line, tuple(one for one in prints if one.strip(" .")), status, block["mark"].strip())


def shell(root: Path, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line as a reader does whose environment is activated, in a wide terminal."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("HILGATE", "BUILDKITE"))}
    path = os.pathsep.join([*(str(root / name) for name in ("ci", "kernels", "evals", ".")), str(ROOT / "tests")])
    env = outer | {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": path,
        "COLUMNS": "500",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    # One stream, as in a terminal: the order in which lines were printed is part of what a page shows.
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(["bash", "-c", line], cwd=root, env=env, text=True, check=False, **streams)


def run(
    page: str,
    root: Path,
    *,
    slow: bool = False,
    how: Callable[[Path, str], subprocess.CompletedProcess[str]] = shell,
) -> list[str]:
    """Run what a page shows in `root`, in its order; what is not as it says."""
    problems = []
    for command in commands(page):
        if command.mark.startswith(NO_RUN) or (command.mark == SLOW and not slow):
            continue
        done = how(root, command.line)
        printed = f"{done.stdout}\n{done.stderr or ''}"
        if done.returncode != command.status:
            problems.append(
                f"$ {command.line}: exit {done.returncode}, the page says {command.status}: {printed[-2000:]}"
            )
        elif missing := not_printed(command.prints, printed):
            problems.append(f"$ {command.line}: does not print {missing!r}: {printed[-2000:]}")
    return problems


def not_printed(shown: tuple[str, ...], printed: str) -> str:
    """The first shown line that is not among the printed ones, in their order; empty for none."""
    lines = iter(printed.splitlines())
    for one in shown:
        pattern = re.compile(".*".join(re.escape(_plain(part)) for part in one.strip().split("...")))
        if not any(pattern.search(_plain(line)) for line in lines):
            return one
    return ""


def _plain(line: str) -> str:
    """A line with its numbers and blanks made alike."""
    return re.sub(r"\d+(?:[.,]\d+)*", "0", re.sub(r"\s+", " ", line))


def wrong_marks(page: str) -> list[str]:
    """Blocks with a mark that is none, or without a reason."""
    marks = [block["mark"].strip() for block in BLOCK.finditer(page)]
    return [one for one in marks if one not in ("", SLOW) and not re.fullmatch(f"{NO_RUN} .{{10,}}", one)]
