# SPDX-License-Identifier: Apache-2.0
"""Select the steps that a change can break, or those that somebody names, each with its reason. Pure.

Selection by a change only ever adds, file by file: one more changed file can select more steps and never fewer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hilgate.declare import globs
from hilgate.errors import MisuseError
from hilgate.model.plan import OmissionCause, planned_key
from hilgate.text import suggest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from hilgate.declare.imports import Imports
    from hilgate.declare.load import Declarations
    from hilgate.model import Key
    from hilgate.model.declaration import Area, Step
    from hilgate.model.plan import PlanProfile

EVERYTHING = "everything runs"
NOT_AFFECTED = "not affected by this change"
NOT_IMPORTED = "not affected: nothing it imports changed"


@dataclass(frozen=True)
class Selection:
    """Steps to run, each with the reason a reader sees, and the others with theirs."""

    reasons: Mapping[Key, str]
    """Declared step -> why it runs."""
    omitted: Mapping[Key, str]
    """Declared step -> why it does not."""
    by_bodies: frozenset[Key] = frozenset()
    """Steps to run that nothing selects but edited bodies of kernels, in what they import or what their area claims."""


@dataclass(frozen=True)
class Wanted:
    """Why a declared step is wanted, and on which devices (None: all that it lists)."""

    reason: str
    devices: frozenset[Key] | None = None
    of_device: Mapping[Key, str] = field(default_factory=dict)
    """Reasons that are of one device alone."""


NotWanted = tuple[OmissionCause, str]
"""Cause and reason of a step that is not wanted."""


@dataclass(frozen=True)
class Chosen:
    """The declared steps that a plan is to have, by key.

    Attributes:
        wanted: Why each of them is.
        unwanted: Why others are not; the rest were not asked for.
        settled: Step -> device -> why it passed there and nothing has changed since; no step waits for it there.
    """

    wanted: Mapping[Key, Wanted]
    unwanted: Mapping[Key, NotWanted] = field(default_factory=dict)
    settled: Mapping[Key, Mapping[Key, str]] = field(default_factory=dict)


_Cause = tuple[str, str]
"""A changed file that selects a step, and what connects it to the step: nothing where a glob or the step names it."""


def select(
    areas: Sequence[Area],
    changed: Iterable[str] | None,
    imports: Imports | None = None,
    appeared: Collection[str] = (),
    bodies: Collection[str] = (),
) -> Selection:
    """Select steps for the changed files (paths relative to the root, `/` between parts); None selects all.

    A changed module selects a step with `imports` where one of these reaches it. A module that is new or gone also
    selects every step of the areas that claim it, and one that is gone every step that imports from its package. While
    the graph is not known, a module selects every step with `imports`. Any other file selects by the area's globs. A
    step's own `reads` select it too. The reason names the most telling cause: a changed file of the step, else an
    unclaimed file, else `always`.

    `imports` is the graph of the files as they are now; None selects by globs alone. `appeared` are the new ones among
    the changed files: no graph of the earlier files shows what they hide or complete. Of `bodies` only bodies of jitted
    functions changed (`plan.launched`).
    """
    if changed is None:
        return Selection({step.key: EVERYTHING for area in areas for step in area.steps}, {})
    files = sorted(set(changed))
    claims = {area.area: frozenset(claimed_by(area, files)) for area in areas}
    unclaimed = [name for name in files if not any(name in claimed for claimed in claims.values())]
    reasons: dict[Key, str] = {}
    omitted: dict[Key, str] = {}
    by_bodies: set[Key] = set()
    for area in areas:
        for step in area.steps:
            asked = [_cause(step, name, name in claims[area.area], imports, appeared) for name in files]
            causes = [cause for cause in asked if cause]
            if causes:
                reasons[step.key] = _reason(causes)
                soft = all(name in bodies and _is_by_rule(step, name, imports) for name, _ in causes)
                if soft and not unclaimed and not area.always:
                    by_bodies.add(step.key)
            elif unclaimed:
                why = _reason([(name, "") for name in unclaimed])
                reasons[step.key] = f"{why} and no area claims it, so everything runs"
            elif area.always:
                reasons[step.key] = "runs on every change"
            else:
                omitted[step.key] = NOT_IMPORTED if claims[area.area] else NOT_AFFECTED
    return Selection(reasons, omitted, frozenset(by_bodies))


def _is_by_rule(step: Step, name: str, imports: Imports | None) -> bool:
    """Whether a file selects a step by the import graph or, where it declares none, by its area, and is not named."""
    if imports is None or imports.problem or globs.matches(step.reads, name):
        return False
    return not step.imports or imports.packages.module_of(name) in imports.reached(step.imports)


def claimed_by(area: Area, files: Iterable[str]) -> list[str]:
    """The files that match the area's globs, in the given order."""
    return [name for name in files if globs.matches(area.paths, name)]


def _cause(step: Step, name: str, claimed: bool, imports: Imports | None, appeared: Collection[str]) -> _Cause | None:
    """Why one changed file selects one step; None when it does not."""
    if globs.matches(step.reads, name):
        return (name, "")
    return _cause_by_area(step, name, claimed, imports, appeared)


def _cause_by_area(
    step: Step, name: str, claimed: bool, imports: Imports | None, appeared: Collection[str]
) -> _Cause | None:
    """The same without what the step itself reads: by what it imports, or by the paths of its area."""
    module = imports.packages.module_of(name) if imports and step.imports else None
    if imports is None or module is None:
        return (name, "") if claimed else None
    if imports.problem:
        return (name, f"and what imports it is not known: {imports.problem}")
    reached = imports.reached(step.imports)
    if module in reached:
        return (name, "" if reached[module] == name else f"imported by {reached[module]}")
    if imports.knows(name):
        return (name, "is new") if claimed and name in appeared else None
    # Whatever imported it does so no longer, or in vain: those that use its package are the ones that may have.
    if claimed or imports.uses(step.imports, module.rpartition(".")[0]):
        return (name, "is gone")
    return None


def _reason(causes: Sequence[_Cause]) -> str:
    """The first file that the area itself claims, else the first; and how many more there are."""
    first, *others = causes
    file, how = next((cause for cause in causes if not cause[1]), first)
    more = f" and {len(others)} more" if others else ""
    return f"{file}{more} {how if how.startswith('is ') else f'changed, {how}'.removesuffix(', ')}"


def by_name(declarations: Declarations, names: tuple[str, ...], profile: PlanProfile) -> dict[Key, Wanted]:
    """The steps that these areas, steps or steps on a device name.

    An area stands for its steps of the profile, or for all where it has none of them; a step is taken whatever its
    profiles are.

    Raises:
        MisuseError: A name is none of them; with a did-you-mean.
    """
    wanted: dict[Key, Wanted] = {}
    areas = {area.area for area in declarations.areas}
    known = set(areas)
    for _, step in declarations.steps():
        known.update((step.key, *(planned_key(step, device) for device in step.devices)))
    for name in names:
        if name not in known:
            remedy = suggest(name, known, areas)
            raise MisuseError(f"no area or step is called {name!r}", where="ci/areas", remedy=remedy)
        reason = f"asked for: {name}"
        for area, step in declarations.steps():
            of_area = area.area == name and (profile in step.profiles or not _has(area, profile))
            if of_area or name == step.key:
                wanted[step.key] = Wanted(reason)
            for device in step.devices:
                if name == planned_key(step, device):
                    before = wanted.get(step.key, Wanted(reason, frozenset()))
                    devices = None if before.devices is None else before.devices | {device}
                    wanted[step.key] = Wanted(reason, devices)
    return wanted


def _has(area: Area, profile: PlanProfile) -> bool:
    return any(profile in step.profiles for step in area.steps)


def by_model(declarations: Declarations, models: Iterable[str], *others: str) -> dict[Key, Wanted]:
    """The steps that run these models; `others` are names that mean something else and may stand among them.

    Raises:
        MisuseError: No step runs a model of that name; with a did-you-mean.
    """
    known = declarations.models()
    wanted: dict[Key, Wanted] = {}
    for model in models:
        if model not in known and model not in others:
            remedy = suggest(model, {*known, *others})
            raise MisuseError(f"no step runs a model {model!r}", where="ci/areas", remedy=remedy)
        for step in known.get(model, ()):
            wanted.setdefault(step.key, Wanted(f"asked for: model {model}"))
    return wanted
