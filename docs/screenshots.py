# SPDX-License-Identifier: Apache-2.0
"""Make the pictures of what people look at from a real run with a planted bug: `make pictures`.

A clone of the checkout's commit is made in a temporary folder. A bug of the zoo is planted there, a step is run, and
two pictures are taken: the report's first screen, which Debian's chromium draws, and the terminal at 80 columns.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ("ci/report.png", "docs/pictures/terminal.svg")

BUG = "tests/bugs/softcap-dropped-in-decode"
RED = "kernels-attention"

LINES = 25
"""Of the terminal."""

COLOURS = TerminalTheme(
    (253, 253, 252),
    (29, 29, 31),
    [(0, 0, 0), (192, 28, 28), (20, 120, 60), (170, 95, 0), (29, 90, 160), (130, 50, 130), (0, 120, 130), (90, 90, 95)],
)
"""Background, foreground and the eight of ANSI, as dark as the report's."""


class PictureError(Exception):
    """A run did not end as it must, or chromium drew nothing."""


def main() -> None:
    """Run and draw."""
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        clone = Path(folder) / "hilgate"
        said = take(clone)
        draw(clone / "results/run/report.html", ROOT / "ci/report.png", 800)
        (ROOT / "docs/pictures/terminal.svg").write_text(terminal(said), encoding="utf-8")


def take(clone: Path) -> str:
    """Run the red step in a clone; what the terminal said of it."""
    git(ROOT, "clone", "--quiet", str(ROOT), str(clone))
    git(clone, "checkout", "--quiet", "-B", "main")
    git(clone, "update-ref", "refs/remotes/origin/main", "HEAD")
    git(clone, "symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/main")
    git(clone, "apply", *map(str, sorted((ROOT / BUG).glob("*.patch"))))
    return hilgate(clone, "run", RED, status=1)


def git(folder: Path, *words: str) -> None:
    """Run git in a folder."""
    who = ["-c", "user.name=hilgate", "-c", "user.email=hilgate@localhost"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True)


def hilgate(folder: Path, *words: str, status: int = 0) -> str:
    """Run hilgate as at a terminal of 80 columns; what it prints.

    Raises:
        PictureError: It ends with another status.
    """
    env = os.environ | {"COLUMNS": "80", "TTY_COMPATIBLE": "1", "TERM": "xterm", "PYTHONPATH": str(folder / "ci")}
    program = [sys.executable, "-m", "hilgate", *words]
    done = subprocess.run(program, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != status:
        raise PictureError(
            f"hilgate {' '.join(words)}: got status {done.returncode}; expected {status}.\n{done.stdout}"
        )
    return done.stdout


def terminal(said: str) -> str:
    """A picture of what a terminal of 80 columns shows first. It names no font of elsewhere."""
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(Text(f"$ hilgate run {RED}"))
    for line in said.splitlines()[:LINES]:
        whole = Text.from_ansi(line)
        for row in whole.divide(range(80, len(whole), 80)):  # as a terminal breaks it
            console.print(row, soft_wrap=True, highlight=False)
    console.print(Text("..."))
    picture = console.export_svg(title="a bug planted in a kernel", theme=COLOURS, unique_id="terminal")
    return re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)


def draw(page: Path, picture: Path, height: int) -> None:
    """Draw the top of a page, 1,280 pixels wide.

    Raises:
        PictureError: chromium is not installed, or drew nothing.
    """
    picture.unlink(missing_ok=True)
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    words += [f"--window-size=1280,{height}", f"--screenshot={picture}", page.as_uri()]
    try:
        subprocess.run(["chromium", *words], check=True, capture_output=True, timeout=120)
    except FileNotFoundError:
        raise PictureError("chromium is not installed. To do: apt-get install chromium") from None
    if not picture.is_file():
        raise PictureError(f"chromium drew no {picture}")


if __name__ == "__main__":
    main()
