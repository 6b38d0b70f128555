"""Rows of published checkpoints: which are asked for, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from models.families import published
from models.families.cell import Cell
from models.families.engines import BEHAVIOURS
from models.families.fleet import Fleet
from models.families.published import NotFetchedError, UnfitError
from models.families.table import UnknownNameError, columns, rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from models.families.published import Checkpoint


@dataclass(frozen=True)
class Row:
    """One checkpoint that is asked for."""

    name: str
    family: str
    """Empty where even its config could not be fetched."""
    behaviours: tuple[str, ...]


def asked(
    published: Sequence[str], checkpoint: Sequence[str], family: Sequence[str], behaviour: Sequence[str]
) -> list[Row]:
    """The rows that these options ask for, in the order of the options.

    Args:
        published: The checkpoints of a table, if there is one.
        checkpoint: Only these of them; where there is no table, these.
        family: Only those of these families. One whose config cannot be fetched may be of them.
        behaviour: Only these columns.

    Raises:
        UnknownNameError: One is named that the table lacks, or no row is left.
        UnfitError: The table cannot judge one.
    """
    names = list(dict.fromkeys(published or checkpoint))
    if unknown := sorted(set(checkpoint) - set(names)):
        raise UnknownNameError(
            f"no checkpoint of this table is called {', '.join(unknown)}; there are {', '.join(names)}"
        )
    known = rows(family)
    found = [_row(name, behaviour) for name in names if not checkpoint or name in checkpoint]
    left = [row for row in found if not row.family or row.family in known]
    if not left:
        have = ", ".join(f"{row.name} ({row.family})" for row in found)
        raise UnknownNameError(f"no checkpoint is of the family {', '.join(family)}; there are {have}")
    return left


def _row(name: str, behaviour: Sequence[str]) -> Row:
    try:
        folder = _folder(name, weights=False)
    except NotFetchedError:
        every = [one for one in BEHAVIOURS if not behaviour or one in behaviour]
        return Row(name, "", tuple(every))
    # Weights of the hub are fetched later, when it is sure that somebody waits for them.
    family = published.located(name, folder).family if Path(name).is_dir() else published.described(name, folder).name
    return Row(name, family, tuple(columns(family, behaviour)))


def _folder(name: str, *, weights: bool) -> Path:
    return Path(name).resolve() if published.is_folder(name) else published.fetched(name, weights=weights)


class Driven:
    """Fetches the checkpoints and drives those that it got."""

    def __init__(
        self,
        folder: Path,
        asked_for: Sequence[Row],
        fuzz: dict[str, int],
        seconds: int,
        changed: Callable[[Checkpoint], Checkpoint] = lambda checkpoint: checkpoint,
    ) -> None:
        """Fetch, then start.

        Args:
            folder: Where specs, logs and results are written.
            asked_for: The rows.
            fuzz: Seed and number of random schedules.
            seconds: When a checkpoint is given up.
            changed: What to drive in place of a checkpoint, for planted faults.
        """
        self.not_fetched: dict[str, str] = {}
        """Name of a checkpoint to why it is not here."""
        self._unfit: dict[str, str] = {}
        found: dict[str, Checkpoint] = {}
        for row in asked_for:
            try:
                found[row.name] = changed(published.located(row.name, _folder(row.name, weights=True)))
            except NotFetchedError as error:
                self.not_fetched[row.name] = str(error)
            except UnfitError as error:  # of the others more can be learned
                self._unfit[row.name] = str(error)
        self._slugs = {name: checkpoint.slug for name, checkpoint in found.items()}
        spec = {
            "behaviours": sorted({name for row in asked_for for name in row.behaviours}),
            "fuzz": fuzz,
            "published": {checkpoint.slug: checkpoint.as_json() for checkpoint in found.values()},
        }
        # One at a time: an engine, its oracle and their pools are given a GPU.
        self._fleet = Fleet(folder, list(self._slugs.values()), spec, processes=1, seconds=seconds)

    def cell(self, name: str, behaviour: str) -> Cell:
        """What became of a cell."""
        if name in self.not_fetched:
            return Cell("did not run", self.not_fetched[name])
        if name in self._unfit:
            return Cell("fail", self._unfit[name])
        return self._fleet.cells(self._slugs[name])[behaviour]
