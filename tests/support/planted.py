# SPDX-License-Identifier: Apache-2.0
"""Faults that tests plant, in one shape: what is planted, who must notice it, and who must notice nothing."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    Look = Callable[[Any], str | Sequence[str] | Mapping[str, str]]
    """What is wrong with a site: the complaints of one check, or those of each check by its name; empty for nothing."""


@dataclass(frozen=True)
class PlantedFault:
    """A fault, and what must come of it."""

    name: str
    change: Any
    """What is planted, in the terms of its kind."""
    says: str | re.Pattern[str] = ""
    """What each complaint must contain."""
    fails: str = ""
    """The check that must fail, where there are several."""
    passes: tuple[str, ...] = ()
    """Checks that must run and pass; whatever else is looked at must pass as well."""

    def judge(self, found: str | Sequence[str] | Mapping[str, str]) -> None:
        """Demand that the named check alone complains, and of the named reason alone."""
        red = _complaints(found)
        assert red.keys() == {self.fails}, f"{self.name}: {self.fails or 'nobody'} must complain, got {red}"
        for words in red[self.fails]:
            seen = self.says in words if isinstance(self.says, str) else self.says.search(words)
            assert seen, f"{self.name}: fails for another reason than {self.says!r}: {words}"
        assert not set(self.passes) - set(found), f"{self.name}: {self.passes} must run, got {list(found)}"


def must_be_noticed(fault: PlantedFault, look: Look, planted: AbstractContextManager[Any], sound: Any = None) -> None:
    """Look at the sound site, at which nobody may complain, and at the one that `planted` yields."""
    assert not (red := _complaints(look(sound))), f"{fault.name}: red without the fault: {red}"
    with planted as site:
        fault.judge(look(site))


def planted(table: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Give a test each `fault` of a table: name -> (change, says, fails, passes), or a change that is no tuple."""
    rows = [PlantedFault(name, *(row if isinstance(row, tuple) else (row,))) for name, row in table.items()]
    return pytest.mark.parametrize("fault", rows, ids=[fault.name for fault in rows])


@contextmanager
def replaced(text: str, old: str, new: str) -> Iterator[str]:
    """The text with the first `old` replaced; it must be there."""
    assert old in text
    yield text.replace(old, new, 1)


def instead(site: Any) -> AbstractContextManager[Any]:
    """Another site in the place of the sound one."""
    return nullcontext(site)


def complaint(error: type[Exception], check: Callable[..., Any], *args: Any, **more: Any) -> str:
    """What a check raises when it notices; empty when it does not. Any other error is one of the test."""
    try:
        check(*args, **more)
    except error as raised:
        return str(raised) or type(raised).__name__
    return ""


def _complaints(found: str | Sequence[str] | Mapping[str, str]) -> dict[str, list[str]]:
    """Check -> its complaints, of those that have any."""
    if isinstance(found, str) or not hasattr(found, "items"):
        found = {"": found}
    by_check = {name: [words] if isinstance(words, str) else list(words) for name, words in found.items()}
    kept = {name: [each for each in words if each] for name, words in by_check.items()}
    return {name: words for name, words in kept.items() if words}
