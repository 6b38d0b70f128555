# SPDX-License-Identifier: Apache-2.0
"""The command that counts mutants: which it makes, what it runs over them, and how it ends."""

from __future__ import annotations

import os

import pytest
from support.plans import write_repository

from ci import mutants
from hilgate.errors import DeclarationError
from hilgate.model.record import Outcome

pytestmark = pytest.mark.needs("package:cosmic-ray")

MODULE = '''"""A module."""
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike


@dataclass(frozen=True)
class Least:
    """A number."""

    number: int | None


def least(numbers: list[int] | None, *, other: "PathLike[str] | None" = None) -> int | None:
    """1 + 1."""
    found: int | None = numbers[0]
    # mutant NumberReplacer: the size of a cache
    kept = 1000
    return found if kept is None or other == 1 else other


def passed(step: Step) -> bool:
    return step.outcome is Outcome.PASS
'''

DECIDES = '''"""Decides."""


def passes(failed):
    return failed == 0


def unseen(failed):
    return failed == 0
'''
KILLS = """from gate import decides


def test_passes():
    assert decides.passes(0)
    assert not decides.passes(1)
    assert not decides.passes(-1)
"""


def test_what_is_behaviour_and_not_argued_is_mutated():
    found = [one for place in mutants.mutants_of("m.py", MODULE).values() for one in place]
    changed = {mutants.mutated(one, MODULE) for one in found} - {""}
    lines = {after.strip() for code in changed for after in code.splitlines()} - {
        one.strip() for one in MODULE.split("\n")
    }
    assert {line for line in lines if line.startswith("return step")} == {
        f"return step.outcome {word} Outcome.PASS" for word in ("is not", "!=")
    }
    lines = {line for line in lines if not line.startswith("return step")}
    ends = {line for line in lines if line.startswith("return found if ")}
    assert lines - ends == {"found: int | None = numbers[ 1]", "found: int | None = numbers[ -1]"}
    conditions = {line.removeprefix("return found if ").removesuffix(" else other") for line in ends}
    assert conditions >= {"kept is not None or other == 1", "kept is None and other == 1", "kept is None or other < 1"}
    assert conditions.isdisjoint({"kept == None or other == 1", "kept is None or other is 1"})


def test_comment_that_argues_nothing_is_refused():
    text = MODULE.replace("mutant NumberReplacer", "mutant NumberReplacer, AddNot")
    with pytest.raises(DeclarationError, match="argues a mutant of AddNot, and there is none") as refused:
        mutants.mutants_of("m.py", text)
    assert refused.value.where == "m.py:20"


def repository(folder, monkeypatch, tests):
    """A repository whose core is one module, with these tests; its folder."""
    monkeypatch.setattr(mutants, "CORE", ("lib/gate/decides.py",))
    for name, text in {"lib/gate/decides.py": DECIDES, "ci/project.yaml": "python_path: [lib]\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "lib/gate/__init__.py").touch()
    (folder / "tests/unit").mkdir(parents=True)
    for name, text in tests.items():
        (folder / "tests/unit" / name).write_text(text)
    for name in os.environ:
        if name.startswith("GIT_"):
            monkeypatch.delenv(name)
    return write_repository(folder, {"a": "true"})


def test_a_survivor_is_shown_and_too_low_a_rate_fails(tmp_path, monkeypatch, capsys):
    root = repository(tmp_path, monkeypatch, {"test_decides.py": KILLS})
    check = mutants.kill(root, number=100, seed=1, only="")
    assert check.outcome is Outcome.FAIL
    assert (check.numbers["mutants"], check.numbers["killed"]) == (4, 2)
    assert check.message.startswith("2 of 4 mutants killed: 50.0 % [15.0, 85.0]")
    shown = capsys.readouterr().out
    assert "4 of 4 places, seed 1" in shown
    assert "lib/gate/decides.py:9: survived: " in shown
    assert "    -    return failed == 0" in shown
    assert "lib/gate/decides.py:5: " not in shown


class Copies:
    """Copies in which runs end one after the other with these exit statuses; None: not in time."""

    def __init__(self, *statuses):
        self.left = list(statuses)

    def run(self, _test, _seconds, **_changed):
        return self.left.pop(0), "", 1.0


@pytest.mark.parametrize(
    ("status", "killed", "shown"),
    [(0, False, "survived"), (2, True, ""), (None, False, "hung"), (-9, False, "hung")],
    ids=["passed", "failed", "slow machine or no end", "killed for its memory"],
)
def test_a_slow_machine_kills_no_mutant(status, killed, shown, capsys):
    mutant = mutants.Mutant("m.py", 1, 0, "NumberReplacer", 0)
    tests = {"m.py": ("test_m.py",)}
    drawn = mutants.Draw(Copies(0, status), {"m.py": "a = 1\n"}, {mutant: "a = 2\n"}, tests, float("inf"))
    assert drawn.run(processes=1) == [killed]
    assert capsys.readouterr().out == (f"m.py:1: {shown}: NumberReplacer\n    -a = 1\n    +a = 2\n" if shown else "")


def test_a_rate_counts_by_its_lower_end_and_only_whole():
    check = mutants.judged([True] * 143 + [False] * 7, seed=1)
    assert (check.outcome, check.message) == (Outcome.PASS, "143 of 150 mutants killed: 95.3 % [90.7, 97.7]")
    check = mutants.judged([True] * 149 + [None], seed=1)
    assert check.outcome is Outcome.DID_NOT_RUN
    assert check.message == "149 of 149 mutants killed: 100.0 % [97.5, 100.0]; no time for 1"
