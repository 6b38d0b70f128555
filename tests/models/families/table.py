"""Rows and columns: which behaviours a family is asked for. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.families.declared import FAMILIES
from models.families.engines import BEHAVIOURS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from models.families.declared import Family


class UnknownNameError(Exception):
    """Somebody asked for a family or a behaviour that does not exist."""


def rows(chosen: Sequence[str]) -> list[str]:
    """The families asked for, in the order of the table; all of them where none is named.

    Raises:
        UnknownNameError: There is no such family.
    """
    return _only(chosen, tuple(FAMILIES), "family")


def columns(family: str, chosen: Sequence[str]) -> list[str]:
    """The behaviours that a family has, of those asked for, in the order of the table.

    Raises:
        UnknownNameError: There is no such behaviour.
    """
    return [name for name in _only(chosen, BEHAVIOURS, "behaviour") if has(FAMILIES[family], name)]


def has(family: Family, behaviour: str) -> bool:
    """Whether a behaviour means anything for a family."""
    if behaviour == "state":
        return "ssm" in family.states or "delta" in family.states
    if behaviour == "blocks":
        return family.attention == "paged"
    return True


def _only(chosen: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    if unknown := sorted(set(chosen) - set(known)):
        raise UnknownNameError(f"no {what} is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [name for name in known if not chosen or name in chosen]
