# SPDX-License-Identifier: Apache-2.0
"""Choose what a local command runs, and say why in one line before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate import git
from hilgate.declare.load import load
from hilgate.errors import MisuseError
from hilgate.names import PROJECT_FILE
from hilgate.plan.machine import on_ci
from hilgate.report.view import whole_gate
from hilgate.text import count

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import typer

    from hilgate.model.plan import Plan, PlanProfile


@dataclass(frozen=True)
class PlanChoice:
    """What a local gate runs, and why, in one line."""

    profile: PlanProfile
    base: str | None
    """What to compare with; None where nothing is known."""
    why: str
    whole: bool = False
    """Whether everything runs, whatever changed. Protected changes are still looked for."""


def choice_of(
    ctx: typer.Context, root: Path, *, base: str | None, everything: bool, named: tuple[str, ...] = ()
) -> PlanChoice:
    """Choose what a local command runs: what its options name, else what the state of the checkout calls for.

    Every choice is compared with the default branch, or with `base`, so that no change can excuse itself.

    Raises:
        MisuseError: Two options that contradict each other (HILGATE_BASE contradicts none), or `base` cannot be
            compared with.
        InvalidDeclarationsError: A declaration is invalid.
    """
    source = ctx.get_parameter_source("base")
    typed = source is not None and source.name == "COMMANDLINE"
    given = {"--all": everything, "--steps": bool(named), "--base": typed}
    options = [name for name, is_given in given.items() if is_given]
    if everything and len(options) > 1:
        raise MisuseError(f"{' and '.join(options)} exclude each other", remedy=f"leave out {options[1]}")
    if named or everything:
        asked = f"{', '.join(named) or 'everything'}, as asked"
        return PlanChoice("gate", base or git.default_base(root)[0] or None, asked, whole=everything)
    return _by_change(root, base)


def _by_change(root: Path, base: str | None) -> PlanChoice:
    """Choose the steps of the change against `base` (None: the default branch), else the quick steps, else everything.

    Everything runs wherever less could leave something unseen: without a default branch to compare with, and under CI
    (the variable that CI services set), where a green quick run could be taken for a gate.
    """
    against, unknown = (base, "") if base else git.default_base(root)
    if not against:
        return PlanChoice("gate", None, f"everything: {unknown}", whole=True)
    change = git.inspect(root, against)
    if change.files:
        words = f"{count(len(change.files), 'file')} changed against {change.base}{_unseen(change.unseen)}"
        return PlanChoice("gate", against, f"{words}: the steps that can notice (`{whole_gate()}` runs everything)")
    same = f"no change against {change.base}"
    if on_ci():
        return PlanChoice("gate", against, f"everything: {same}, and this is a CI machine (CI is set)", whole=True)
    if not load(root).project.quick:
        return PlanChoice("gate", against, f"everything: {same}, and {PROJECT_FILE} names no quick step", whole=True)
    quick = f"the quick steps, which decide no merge (`{whole_gate()}` runs everything)"
    return PlanChoice("quick", against, f"{same}: {quick}")


def _unseen(files: Sequence[str]) -> str:
    """What the first line says of changed files that git does not show to whoever asks it."""
    if not files:
        return ""
    names = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
    return (
        f"; {len(files)} of them git does not show ({names}), for line endings (core.autocrlf), a filter, a flag or a "
        "sparse checkout: to undo it, unset that, delete them and `git checkout` them"
    )


def first_line(plan: Plan, root: Path, why: str) -> str:
    """What is said before anything runs: why this is run, and which of its steps cannot run without a git checkout."""
    missing, keys = git.no_checkout(root), [step.key for step in plan.steps if step.step.checkout]
    if not missing or not keys:
        return why
    because = why if why.endswith(missing) else f"{why}; {missing}"
    *others, last = keys
    names = f"{', '.join(others)} and {last}" if others else last
    return f"{because}, so {names} cannot run: {git.TO_MAKE_ONE}"
