"""Recorded results as pictures and tables: `python -m benchmarks.plots`, from the root of the repository.

Reads `benchmarks/results/h200.jsonl` (or the file named) and writes beside it a page (`h200.md`), its charts
(`h200/*.svg`), and the table of `benchmarks/README.md`. The same records give the same bytes.

Exit status: 0 written (with --check: up to date), 1 --check found something stale, 2 misuse, 3 a record is invalid.
"""

# ruff: noqa: T201  a command line prints

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import page, saved, series

FOLDER = Path(__file__).resolve().parent


def render(source: Path, readme: Path) -> dict[Path, str]:
    """Return every file that follows from a results file, with its text.

    Raises:
        saved.RecordsError: The results cannot be believed.
        page.SectionError: The README has no place for the table.
    """
    from . import charts

    rows = saved.read(source)
    drawn = {
        "ratio": charts.ratio_chart(series.ratios(rows)),
        "bandwidth": charts.bandwidth_chart(series.bandwidths(rows)),
    }
    if lines := series.over_block_size(rows):
        drawn["block_size"] = charts.line_chart(lines, "tokens of a block")
    if lines := series.over_context(rows):
        drawn["context"] = charts.line_chart(lines, "tokens in the cache", thousands=True)
    folder = source.with_suffix("")
    files = {folder / f"{name}.svg": text for name, text in drawn.items()}
    files[source.with_suffix(".md")] = page.page(rows, drawn, source.name, folder.name)
    files[readme] = page.with_section(readme.read_text(encoding="utf-8"), rows, str(readme))
    return files


def main(arguments: list[str] | None = None) -> int:
    """Read the command line, write or check, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__.splitlines()[0])
    parser.add_argument("source", nargs="?", type=Path, default=FOLDER / "results" / "h200.jsonl", help="results file")
    parser.add_argument("--readme", type=Path, default=FOLDER / "README.md", help="the file whose table is replaced")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file would change")
    given = parser.parse_args(arguments)
    try:
        files = render(given.source, given.readme)
    except (saved.RecordsError, page.SectionError) as error:
        print(error, file=sys.stderr)
        return 3
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{'stale' if given.check else 'written'}: {path}")
        if not given.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
    if not stale:
        print(f"{len(files)} files are up to date with {given.source}")
    return 1 if stale and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
