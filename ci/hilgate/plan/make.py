# SPDX-License-Identifier: Apache-2.0
"""Make and read `plan.json`: what will run and why, fixed before anything runs."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate import git
from hilgate.declare import imports
from hilgate.declare.load import as_permitted, declared_at, load, require_modest
from hilgate.declare.protected import protected_changes, unread_code
from hilgate.errors import CannotRunHereError, DeclarationError, MisuseError, NothingSelectedError
from hilgate.evidence import kind_of
from hilgate.images.contents import contents
from hilgate.model.plan import LOCAL, Omission, Plan, ProtectedChange, planned_key
from hilgate.names import PROJECT_FILE, of_build
from hilgate.plan.expand import NotWanted, Target, Wanted, expand
from hilgate.plan.jobs import UNMEASURED, Times, lay_out
from hilgate.plan.launched import Launched
from hilgate.plan.machine import Machine, detect, on_ci
from hilgate.plan.select import Selection
from hilgate.plan.select import select as select_steps
from hilgate.text import count, suggest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hilgate.declare.load import Declarations
    from hilgate.git import Changes
    from hilgate.model import Key
    from hilgate.model.declaration import Area
    from hilgate.model.plan import PlannedStep, PlanProfile
    from hilgate.plan.launched import Records

ELSEWHERE = "run it on a machine or queue that has the device; `hilgate plan` shows what this one can do"
WHEN: dict[PlanProfile, str] = {
    "gate": "locally",
    "pr": "for a pull request",
    "nightly": "nightly",
    "release": "for a release",
}
"""Profile -> when its plans are made, as in "runs nightly"."""

WHOLE = ("nightly", "release", "quick")
"""Profiles that run all of their steps, whatever changed."""


@dataclass(frozen=True)
class PlanChoice:
    """What a local gate runs, and why, in one line."""

    profile: PlanProfile
    base: str | None
    """What to compare with; None where nothing is known."""
    why: str
    whole: bool = False
    """Whether everything runs, whatever changed. Protected changes are still looked for."""


def choose(root: Path, *, base: str | None = None, whole: str = "hilgate gate --all") -> PlanChoice:
    """Choose what a local command runs: the steps of the change, else the quick steps, else everything.

    Everything runs wherever less could leave something unseen: without a default branch to compare with, and under CI
    (the variable that CI services set), where a green quick run could be taken for a gate.

    `base` is what to compare with (None finds the default branch), `whole` the command that runs everything.

    Raises:
        MisuseError: `base` cannot be compared with.
        InvalidDeclarationsError: A declaration is invalid.
    """
    found, unknown = (base, "") if base else git.default_base(root)
    if not found:
        return PlanChoice("gate", None, f"everything: {unknown}", whole=True)
    change = git.inspect(root, found)
    if change.files:
        words = f"{count(len(change.files), 'file')} changed against {change.base}{_unseen(change.unseen)}"
        return PlanChoice("gate", found, f"{words}: the steps that can notice (`{whole}` runs everything)")
    same = f"no change against {change.base}"
    if on_ci():
        return PlanChoice("gate", found, f"everything: {same}, and this is a CI machine (CI is set)", whole=True)
    if not load(root).project.quick:
        return PlanChoice("gate", found, f"everything: {same}, and {PROJECT_FILE} names no quick step", whole=True)
    return PlanChoice("quick", found, f"{same}: the quick steps, which decide no merge (`{whole}` runs everything)")


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


@dataclass(frozen=True)
class ChangeFacts:
    """What was found out about a change before it is planned."""

    images: Mapping[Key, str] = field(default_factory=dict)
    """Image -> sha256 of everything it is built from; images that no planned step uses or builds are left out."""
    digests: Mapping[Key, str] = field(default_factory=dict)
    """Image -> digest of those that are built already."""
    protected_changes: tuple[ProtectedChange, ...] = ()
    fork: bool = False
    report_only: frozenset[Key] | None = None
    """Planned keys of the steps that no verdict of the merge base counts; None where nothing is compared."""
    out: Mapping[Key, str] = field(default_factory=dict)
    """Queues that take no steps of changes, each with the reason."""


Trouble = Mapping[str, tuple[int, str]]
"""Queue -> how many of its newest jobs in a row were infrastructure failures, and when the newest of them was."""
Measured = Callable[[Iterable[str]], Times]
"""Looks up what steps took; that of each test for these planned keys alone."""
Built = Callable[[Iterable[str]], Mapping[str, str]]
"""Looks up contents of images: content -> digest, where a build of the default branch has built it."""


def queues_out(declarations: Declarations, trouble: Trouble) -> dict[Key, str]:
    """Queues that take no steps of changes, because their newest jobs were infrastructure failures; with the reason."""
    found = {}
    for name, queue in declarations.agents.queues.items():
        failures, when = trouble.get(name, (0, ""))
        if 0 < queue.out_after <= failures:
            found[name] = (
                f"queue {name} is out: its last {failures} jobs on the default branch were infrastructure failures, "
                f"the newest {when}"
            )
    return found


def gather_facts(root: Path, change: Changes, built: Built | None = None) -> ChangeFacts:
    """Gather the facts of a checkout and its change; outside a checkout the contents of images are unknown.

    Raises:
        DeclarationError: The pins or the list of protected files are wrong.
        CannotRunHereError: The merge base is not in this checkout.
    """
    images = contents(root) if change.commit else {}
    known = built(images.values()) if built else {}
    return ChangeFacts(
        images=images,
        digests={name: known[content] for name, content in images.items() if content in known},
        protected_changes=protected_changes(
            root, change.merge_base, change.files or (), "" if change.dirty else change.commit
        ),
        fork=of_build(os.environ).fork,
    )


def make_plan(
    root: Path,
    *,
    base: str | None,
    profile: PlanProfile,
    select: tuple[str, ...] = (),
    models: tuple[str, ...] = (),
    leave_out: tuple[str, ...] = (),
    built: Built | None = None,
    trouble: Trouble | None = None,
    records: Records | None = None,
    measured: Measured | None = None,
    whole: bool = False,
) -> Plan:
    """Plan the change between `base` and the working tree (None: everything) for this machine or for the agents.

    With `whole` every step is planned. `base` then decides only the protected changes and whose quarantine counts.

    `select` names areas, steps or planned steps, `models` names models: the steps of both and what they need are
    planned, whatever changed and whichever profiles they belong to. `leave_out` names areas and steps that passed
    elsewhere: they are omitted, and no step waits for them. `built` knows images that need no build; a release
    builds each of its images, so that its evidence tells how. `trouble` takes queues out for changes; a build of the
    default branch uses each queue, and so finds out when it works again. `records` knows what steps launched in earlier
    builds: where a change edits only bodies of kernels, it selects the steps that launched them (`plan.launched`).
    `measured` knows what steps took; a plan of a night or of a release does without, so that whoever verifies it can
    make it again.

    Raises:
        InvalidDeclarationsError: A declaration is invalid.
        DeclarationError: The change has a link, code or a name that no reader sees as it is (but locally).
        MisuseError: `base`, a name in `select` or a model does not exist.
        CannotRunHereError: Everything that was asked for by name needs another machine.
        NothingSelectedError: The plan would be empty, which is never a pass.
    """
    declarations = load(root)
    own = find_packages(root, declarations.project.python_path)
    require_own_hilgate(root, own)
    packages = [package for _, step in declarations.steps() for package in step.packages]
    change = git.inspect(root, base)
    if change.links and profile != "gate":
        raise DeclarationError(
            "the change adds a link or a submodule, through which a host would read what is not the change's",
            where=", ".join(change.links[:5]),
            remedy="put the file itself there",
        )
    if change.unreadable and profile != "gate":
        raise DeclarationError(
            "the change has a file whose name is not UTF-8, which nobody can be shown as it is",
            where=", ".join(change.unreadable[:5]),
            remedy="give it another name",
        )
    unread = unread_code(change.files, git.tracked_files(root)) if change.files else {}
    if unread and profile != "gate":
        raise DeclarationError(
            "the change has code that Python runs and a reader of the change does not see",
            where="; ".join(f"{path}: {why}" for path, why in list(unread.items())[:5]),
            remedy="commit sources alone and let a step build the rest; rename the module or the folder, or delete one",
        )
    facts = gather_facts(root, change, built if profile not in {*LOCAL, "release"} else None)
    if unread:  # a half-done move or an extension built in place is no mistake locally, and no pass without a name
        changes = {one.path: one for one in facts.protected_changes}
        changes |= {path: ProtectedChange(path=path, what=why) for path, why in unread.items()}
        facts = replace(facts, protected_changes=tuple(changes[path] for path in sorted(changes)))
    known: frozenset[str] | None = None
    if facts.fork and change.merge_base:
        declarations, known = as_permitted(declarations, root, change.merge_base)
    if change.merge_base:
        loose = declarations.report_only()
        facts = replace(facts, report_only=loose and declared_at(root, change.merge_base).report_only())
    if change.merge_base and profile not in LOCAL:
        facts = replace(facts, out=queues_out(declarations, trouble or {}))
    by_change = not whole and not select and not models and profile not in WHOLE
    python = any(name.endswith(".py") for name in change.files or ())
    graph = imports.build(root, declarations.project.python_path) if by_change and python else None
    if profile in LOCAL:  # a plan of one machine asks nobody else's builds
        records = None
    plan = assemble(
        declarations,
        change,
        detect(packages) if profile in LOCAL else None,
        profile=profile,
        select=select,
        models=models,
        leave_out=leave_out,
        graph=graph,
        launched=Launched(root, change, declarations.areas, graph, records) if graph and records else None,
        facts=facts,
        measured=measured if profile == "pr" else None,
        absent=absent_tools(declarations),
        no_checkout=git.no_checkout(root),
        whole=whole,
    )
    if known is not None:
        require_modest(plan.steps, known)
    return plan.model_copy(update={"packages": own})


def plan_whole(root: Path, *, profile: PlanProfile, digests: Mapping[Key, str] | None = None) -> Plan:
    """Plan everything that a checkout declares, for the agents; the plan is the same wherever this runs.

    `digests` are those of images that exist already.

    Raises:
        InvalidDeclarationsError: A declaration is invalid.
    """
    declarations = load(root)
    facts = ChangeFacts(images=contents(root), digests=digests or {})
    plan = assemble(declarations, git.inspect(root, None), None, profile=profile, facts=facts)
    return plan.model_copy(update={"packages": find_packages(root, declarations.project.python_path)})


def find_packages(root: Path, folders: Iterable[str]) -> dict[str, str]:
    """Map the import packages of these folders to their paths; of two with one name the first counts, as in Python."""
    found: dict[str, str] = {}
    for folder in folders:
        for module in sorted((root / folder).glob("*/__init__.py")):
            if module.parent.name.isidentifier():
                found.setdefault(module.parent.name, place(module.parent, root))
    return found


def place(path: Path, root: Path) -> str:
    """A folder by its name below the root, links resolved; absolute when it is elsewhere."""
    path, root = path.resolve(), root.resolve()
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def require_own_hilgate(root: Path, packages: Mapping[str, str]) -> None:
    """Refuse to judge a tree that brings its own hilgate with the hilgate of another tree: their rules may differ.

    Raises:
        CannotRunHereError: This hilgate is of another tree, as where several working trees share one environment.
    """
    if sys.flags.isolated:  # on purpose: an agent decides with the code of the merge base
        return
    own, this = packages.get("hilgate"), place(Path(__file__).parents[1], root)
    if own not in {None, this}:
        raise CannotRunHereError(
            f"the hilgate that runs is another tree's, {this}",
            where=f"{root}, which has its own: {own}",
            remedy=f"give that tree its own environment (`make setup` there), or set PYTHONPATH={(root / own).parent}",
        )


def plan_alone(root: Path, key: str, first: Path, *, arguments: str | None = None) -> Plan:
    """Plan one step on this machine, without the steps it needs; the folder `first` stands first on its import path.

    `arguments` are added to its command and narrow it to a few checks; None leaves it and its minimum as declared.

    Raises:
        MisuseError: There is no such step.
        CannotRunHereError: It needs another machine.
    """
    plan = make_plan(root, base=None, profile="gate", select=(key,))
    step = next(step for step in plan.steps if key in (step.step.key, step.key))
    if arguments is not None:
        step = step.part(arguments)
    path = (str(first.absolute()), *plan.python_path)
    changes = {"python_path": path, "packages": find_packages(root, path), "omissions": ()}
    return plan.model_copy(update={"steps": (step.model_copy(update={"depends_on": ()}),), **changes})


def absent_tools(declarations: Declarations) -> frozenset[str]:
    """Programs that steps need and that are not on this machine's path."""
    tools = {tool for _, step in declarations.steps() for tool in step.tools}
    return frozenset(tool for tool in tools if shutil.which(tool) is None)


def assemble(
    declarations: Declarations,
    change: git.Changes,
    machine: Machine | None,
    *,
    profile: PlanProfile,
    select: tuple[str, ...] = (),
    models: tuple[str, ...] = (),
    leave_out: tuple[str, ...] = (),
    graph: imports.Imports | None = None,
    launched: Launched | None = None,
    facts: ChangeFacts | None = None,
    measured: Measured | None = None,
    absent: frozenset[str] = frozenset(),
    no_checkout: str = "",
    whole: bool = False,
) -> Plan:
    """Like `make_plan`, from facts already gathered: no git, no files, no hardware.

    `absent` are the programs that are not on this machine's path; `no_checkout` says why the tree is none. Without a
    `graph`, steps are selected by the globs of their areas alone; `launched` knows which steps do not launch what
    changed. Without `facts`, no image is recorded, and results of steps in images cannot pass.
    """
    known = facts or ChangeFacts()
    named = machine is not None and bool(select or models)  # who asks for a step by name wants its answer
    report_only = frozenset() if named or profile == "release" else declarations.report_only()
    if known.report_only is not None:  # a change cannot take its own step out of the verdict
        report_only &= known.report_only
    target = Target(machine, absent, no_checkout, known.fork, frozenset(known.digests), report_only, known.out)
    left = by_name(declarations, leave_out, profile)
    omitted = [
        Omission(key=step.key, area=area.area, label=step.label, cause="not asked for", reason="left out (--except)")
        for area, step in declarations.steps()
        if step.key in left
    ]
    declarations = declarations.without(left)
    if select or models:
        wanted = by_model(declarations, models) | by_name(declarations, select, profile)
        otherwise: dict[Key, NotWanted] = {}
        settled: dict[Key, dict[Key, str]] = {}
    else:
        bodies = launched.bodies if launched else ()
        selection = select_steps(declarations.areas, None if whole else change.files, graph, change.appeared, bodies)
        wanted, otherwise = _overruled(selection, declarations, profile, known.digests)
        settled = _settled(launched, selection, declarations, wanted, otherwise) if launched else {}
    steps, omissions = expand(declarations, wanted, target, otherwise=otherwise, settled=settled)
    times = UNMEASURED
    if machine is None:
        times = measured([step.whole for step in steps if step.step.shard_minutes]) if measured else times
        pods = {name for name, queue in declarations.agents.queues.items() if queue.pods}
        steps = lay_out(steps, times, pods)
    images = _images(steps, facts) if facts else {}
    plan = Plan(
        created=dt.datetime.now(dt.UTC),
        commit=change.commit,
        dirty=change.dirty,
        base=change.base,
        merge_base=change.merge_base,
        profile=profile,
        fork=known.fork,
        manual_retry=declarations.project.manual_retry and not known.fork and profile not in {*LOCAL, "release"},
        images=images,
        digests={name: digest for name, digest in known.digests.items() if name in images},
        protected_changes=known.protected_changes,
        python_path=declarations.project.python_path,
        changed_files=change.files or (),
        test_seconds={step.whole: dict(times.tests.get(step.whole, {})) for step in steps if step.shard},
        steps=steps,
        omissions=(*omissions, *omitted),
    )
    _require_each(plan, declarations, select, models)
    if not steps and not plan.held_up:
        placeless = {"no queue", "only reported", "not here", "need omitted"}
        reasons = [f"{one.key}: {one.reason}" for one in omissions if one.cause in placeless]
        where = "; ".join(reasons[:5]) or "no declared step is affected"
        remedy = ELSEWHERE if reasons else "run everything: `hilgate gate --all`"
        raise NothingSelectedError("no step can be planned", where=where, remedy=remedy)
    return plan


def _require_each(plan: Plan, declarations: Declarations, select: tuple[str, ...], models: tuple[str, ...]) -> None:
    """Refuse a name without a planned step: only what it needs would run, and that pass says nothing about it."""
    steps = {model: set(by_model(declarations, (model,))) for model in models}
    for name in (*select, *models):
        own = steps.get(name, set())
        if not any(name in (one.whole, one.step.key, one.area) or one.step.key in own for one in plan.steps):
            named = [
                f"{one.key}: {one.reason}"
                for one in plan.omissions
                if name in (one.key, one.area) or one.key.rpartition("-")[0] in (name, *own)
            ]
            what = f"nothing of {name} can be planned"
            raise CannotRunHereError(what, where="; ".join(named[:5]), remedy=ELSEWHERE)


def _overruled(
    selection: Selection, declarations: Declarations, profile: PlanProfile, built: Mapping[Key, str]
) -> tuple[dict[Key, Wanted], dict[Key, NotWanted]]:
    """Apply the profile and the images that exist already to what the change selects; return wanted and unwanted steps.

    A step belongs to its profiles alone. A quick plan has the quick steps of the project. Some profiles run everything.
    An image is not built where a build of the default branch has built the same contents (`built`: image -> digest).
    """
    wanted: dict[Key, Wanted] = {}
    otherwise: dict[Key, NotWanted] = {}
    for _, step in declarations.steps():
        if step.provides and step.provides in built:
            image = f"{step.provides} is {built[step.provides][:19]}"
            otherwise[step.key] = ("not affected", f"a build of the default branch built the same: {image}")
        elif ("gate" if profile == "quick" else profile) not in step.profiles:
            otherwise[step.key] = ("other profiles", "runs " + " and ".join(WHEN[one] for one in step.profiles))
        elif profile == "quick" and step.key in declarations.project.quick:
            wanted[step.key] = Wanted(f"quick step of {PROJECT_FILE}")
        elif profile == "quick":
            otherwise[step.key] = ("not quick", "no quick step; runs when a change can break it")
        elif profile in WHOLE:
            wanted[step.key] = Wanted(f"everything runs {WHEN[profile]}")
        elif step.key in selection.reasons:
            wanted[step.key] = Wanted(selection.reasons[step.key])
        else:
            otherwise[step.key] = ("not affected", selection.omitted[step.key])
    return wanted, otherwise


def _settled(
    launched: Launched,
    selection: Selection,
    declarations: Declarations,
    wanted: dict[Key, Wanted],
    otherwise: dict[Key, NotWanted],
) -> dict[Key, dict[Key, str]]:
    """Take out of `wanted` what launches no changed kernel; returns declared key -> device -> why.

    What the change does not select and wanted steps need is asked too: it may have passed, and nothing changed since.
    """
    steps = {step.key: step for _, step in declarations.steps()}
    needed = {need for key in wanted for need in steps[key].needs} - selection.reasons.keys()
    asked = [step for step in steps.values() if step.key in needed or step.key in selection.by_bodies & wanted.keys()]
    settled: dict[Key, dict[Key, str]] = {}
    for step, answers in zip(asked, launched.answers(asked), strict=True):
        silent = {device: one.reason for device, one in answers.items() if not one.runs}
        if silent:
            settled[step.key] = silent
        if step.key in needed:
            continue
        reason = selection.reasons[step.key]
        said = {d: one.reason if one.counts else f"{reason}; {one.reason}" for d, one in answers.items() if one.runs}
        if rest := frozenset(step.devices) - silent.keys():
            wanted[step.key] = Wanted(reason, rest if silent else None, said)
        else:
            del wanted[step.key]
            otherwise[step.key] = ("not affected", next(iter(silent.values())))
    return settled


def _images(steps: Sequence[PlannedStep], facts: ChangeFacts) -> dict[Key, str]:
    """The images that planned steps use or build, with what each is built from.

    Raises:
        DeclarationError: Nothing says what an image is built from, so no result could be compared with it.
    """
    names = sorted({name for step in steps for name in (step.image, step.step.provides) if name})
    if unknown := [name for name in names if name not in facts.images]:
        raise DeclarationError(
            f"nothing says what the image {unknown[0]!r} is built from",
            where="images in ci/project.yaml",
            remedy="declare it there, take it from the queues of ci/agents.yaml, or plan a commit of a git checkout",
        )
    return {name: facts.images[name] for name in names}


def read_plan(path: Path) -> Plan:
    """Read a plan.

    Raises:
        RecordsError: Missing, truncated, of another schema, with keys or dependencies that do not fit, or with a kind
            of evidence that is unknown here.
    """
    plan = Plan.load(path, "run `hilgate gate`, or write one with `hilgate plan --write FILE` of this version")
    for step in plan.steps:
        kind_of(step)
    return plan


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
