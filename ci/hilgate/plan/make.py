# SPDX-License-Identifier: Apache-2.0
"""Make `plan.json`: what will run and why, fixed before anything runs.

    gather     what the checkout declares, what the change alters, what is known of images and queues
    select     the steps that the change can break, or those that were asked for (`plan.select`)
    overrule   what the profile, images that exist and earlier builds say against that
    expand     to devices, with what each step needs (`plan.expand`), and to jobs (`plan.jobs`)
    build      the plan; an empty one is refused

The functions below stand in this order.
"""

from __future__ import annotations

import datetime as dt
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hilgate import git
from hilgate.declare import imports
from hilgate.declare.load import as_permitted, declared_at, load, require_modest
from hilgate.declare.protected import protected_changes, unread_code
from hilgate.errors import CannotRunHereError, DeclarationError, NothingSelectedError
from hilgate.evidence import kind_of
from hilgate.images.contents import contents
from hilgate.model.plan import LOCAL, Omission, Plan, ProtectedChange
from hilgate.names import PROJECT_FILE, of_build
from hilgate.plan.expand import Target, expand
from hilgate.plan.jobs import UNMEASURED, Times, lay_out
from hilgate.plan.launched import Launched, Launches
from hilgate.plan.machine import Machine, absent_tools, detect, find_packages, require_own_hilgate
from hilgate.plan.select import Chosen, Wanted, by_model, by_name
from hilgate.plan.select import select as select_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from hilgate.declare.load import Declarations
    from hilgate.git import Changes
    from hilgate.model import Key
    from hilgate.model.plan import PlannedStep, PlanProfile
    from hilgate.plan.select import NotWanted, Selection

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
class EarlierBuilds:
    """What builds of the default branch recorded, looked up as a plan asks for it.

    Attributes:
        images: Contents of images -> digests of those that a build has built.
        trouble: Queue -> how many of its newest jobs in a row were infrastructure failures, and when the newest was.
        launches: Declared step, device -> what it launched in builds that passed, the newest first.
        times: What steps took; that of each test for these planned keys alone.
    """

    images: Callable[[Iterable[str]], Mapping[str, str]]
    trouble: Mapping[str, tuple[int, str]]
    launches: Callable[[str, str], Sequence[Launches]]
    times: Callable[[Iterable[str]], Times]


def make_plan(
    root: Path,
    *,
    base: str | None,
    profile: PlanProfile,
    select: tuple[str, ...] = (),
    models: tuple[str, ...] = (),
    leave_out: tuple[str, ...] = (),
    earlier: EarlierBuilds | None = None,
    whole: bool = False,
) -> Plan:
    """Plan the change between `base` and the working tree (None: everything) for this machine or for the agents.

    Args:
        root: The checkout.
        base: With `whole` it decides only the protected changes and whose quarantine counts.
        profile: What is planned for.
        select: Areas, steps or planned steps; these and `models` are planned with what they need, whatever changed and
            whichever profiles they belong to.
        models: Models whose steps are planned.
        leave_out: Areas and steps that passed elsewhere: they are omitted, and no step waits for them.
        earlier: Ignored for this machine, which asks for no other builds. A release builds each of its images, so that
            its evidence tells how, and does without times like a night, so that whoever verifies it can plan it again.
        whole: Whether every step is planned.

    Raises:
        InvalidDeclarationsError: A declaration is invalid.
        DeclarationError: The change has a link, code or a name that no reader sees as it is (but locally).
        MisuseError: `base`, a name in `select` or a model does not exist.
        CannotRunHereError: Everything that was asked for by name needs another machine.
        NothingSelectedError: The plan would be empty, which is never a pass.
    """
    earlier = None if profile in LOCAL else earlier
    declarations = load(root)
    own = find_packages(root, declarations.project.python_path)
    require_own_hilgate(root, own)
    change = git.inspect(root, base)
    unread = require_readable(root, change, profile)
    fork, permitted = of_build(os.environ).fork, None
    if fork and change.merge_base:
        declarations, permitted = as_permitted(declarations, root, change.merge_base)
    facts = gather_facts(root, change, declarations, profile, fork=fork, unread=unread, earlier=earlier)
    by_change = not whole and not select and not models and profile not in WHOLE
    python = any(name.endswith(".py") for name in change.files or ())
    graph = imports.build(root, declarations.project.python_path) if by_change and python else None
    records = earlier.launches if earlier and graph else None
    plan = assemble(
        declarations,
        change,
        detect(package for _, step in declarations.steps() for package in step.packages) if profile in LOCAL else None,
        profile=profile,
        select=select,
        models=models,
        leave_out=leave_out,
        graph=graph,
        launched=Launched(root, change, declarations.areas, graph, records) if graph and records else None,
        facts=facts,
        measured=earlier.times if earlier and profile == "pr" else None,
        absent=absent_tools(declarations),
        no_checkout=git.no_checkout(root),
        whole=whole,
    )
    if permitted is not None:
        require_modest(plan.steps, permitted)
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


# Gather


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


def require_readable(root: Path, change: Changes, profile: PlanProfile) -> dict[str, str]:
    """Refuse a change that no reader sees as it is; locally return its unread code instead: path -> why.

    There, a half-done move or an extension built in place is no mistake, and no pass without a name.

    Raises:
        DeclarationError: It has a link, a name that is not UTF-8, or code that a reader of the change does not see.
    """
    unread = unread_code(change.files, git.tracked_files(root)) if change.files else {}
    if profile == "gate":
        return unread
    if change.links:
        raise DeclarationError(
            "the change adds a link or a submodule, through which a host would read what is not the change's",
            where=", ".join(change.links[:5]),
            remedy="put the file itself there",
        )
    if change.unreadable:
        raise DeclarationError(
            "the change has a file whose name is not UTF-8, which nobody can be shown as it is",
            where=", ".join(change.unreadable[:5]),
            remedy="give it another name",
        )
    if unread:
        raise DeclarationError(
            "the change has code that Python runs and a reader of the change does not see",
            where="; ".join(f"{path}: {why}" for path, why in list(unread.items())[:5]),
            remedy="commit sources alone and let a step build the rest; rename the module or the folder, or delete one",
        )
    return {}


def gather_facts(
    root: Path,
    change: Changes,
    declarations: Declarations,
    profile: PlanProfile,
    *,
    fork: bool,
    unread: Mapping[str, str],
    earlier: EarlierBuilds | None,
) -> ChangeFacts:
    """Gather the facts of a checkout and its change; outside a checkout the contents of images are unknown.

    Raises:
        DeclarationError: The pins or the list of protected files are wrong.
        CannotRunHereError: The merge base is not in this checkout.
    """
    images = contents(root) if change.commit else {}
    built = earlier.images(images.values()) if earlier and profile != "release" else {}
    commit = "" if change.dirty else change.commit
    protected = {one.path: one for one in protected_changes(root, change.merge_base, change.files or (), commit)}
    protected |= {path: ProtectedChange(path=path, what=why) for path, why in unread.items()}
    report_only = None
    if change.merge_base:
        own = declarations.report_only()
        report_only = own and declared_at(root, change.merge_base).report_only()
    return ChangeFacts(
        images=images,
        digests={name: built[content] for name, content in images.items() if content in built},
        protected_changes=tuple(protected[path] for path in sorted(protected)),
        fork=fork,
        report_only=report_only,
        out=queues_out(declarations, earlier.trouble) if earlier and change.merge_base else {},
    )


def queues_out(declarations: Declarations, trouble: Mapping[str, tuple[int, str]]) -> dict[Key, str]:
    """Queues that take no steps of changes, because their newest jobs were infrastructure failures; with the reason.

    Builds of the default branch use each queue, and so find out when it works again. `trouble` is that of
    `EarlierBuilds`.
    """
    out = {}
    for name, queue in declarations.agents.queues.items():
        failures, when = trouble.get(name, (0, ""))
        if 0 < queue.out_after <= failures:
            out[name] = (
                f"queue {name} is out: its last {failures} jobs on the default branch were infrastructure failures, "
                f"the newest {when}"
            )
    return out


# Select, overrule, expand, build


def assemble(
    declarations: Declarations,
    change: Changes,
    machine: Machine | None,
    *,
    profile: PlanProfile,
    select: tuple[str, ...] = (),
    models: tuple[str, ...] = (),
    leave_out: tuple[str, ...] = (),
    graph: imports.Imports | None = None,
    launched: Launched | None = None,
    facts: ChangeFacts | None = None,
    measured: Callable[[Iterable[str]], Times] | None = None,
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
    declared, left_out = _without(declarations, by_name(declarations, leave_out, profile))
    if select or models:
        chosen = Chosen(by_model(declared, models) | by_name(declared, select, profile))
    else:
        bodies = launched.bodies if launched else ()
        files = None if whole else change.files
        selection = select_steps(declared.areas, files, graph, change.appeared, bodies)
        chosen = overrule(selection, declared, profile, known.digests, launched)

    report_only = frozenset() if profile == "release" else declared.report_only()
    if machine is not None and (select or models):  # who asks for a step by name wants its answer
        report_only = frozenset()
    if known.report_only is not None:  # a change cannot take its own step out of the verdict
        report_only &= known.report_only
    target = Target(machine, absent, no_checkout, known.fork, frozenset(known.digests), report_only, known.out)
    steps, omissions = expand(declared, chosen, target)
    times = UNMEASURED
    if machine is None:
        times = measured([step.whole for step in steps if step.step.shard_minutes]) if measured else times
        pods = {name for name, queue in declared.agents.queues.items() if queue.pods}
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
        manual_retry=declared.project.manual_retry and not known.fork and profile not in {*LOCAL, "release"},
        images=images,
        digests={name: digest for name, digest in known.digests.items() if name in images},
        protected_changes=known.protected_changes,
        python_path=declared.project.python_path,
        changed_files=change.files or (),
        test_seconds={step.whole: dict(times.tests.get(step.whole, {})) for step in steps if step.shard},
        steps=steps,
        omissions=(*omissions, *left_out),
    )
    _require_each(plan, declared, select, models)
    _require_some(plan)
    return plan


def _without(declarations: Declarations, steps: Collection[Key]) -> tuple[Declarations, list[Omission]]:
    """The declarations without these steps, and what the plan says of these."""
    cause, reason = "not asked for", "left out (--except)"
    omissions = [
        Omission(key=step.key, area=area.area, label=step.label, cause=cause, reason=reason)
        for area, step in declarations.steps()
        if step.key in steps
    ]
    return declarations.without(steps), omissions


def overrule(
    selection: Selection,
    declarations: Declarations,
    profile: PlanProfile,
    built: Mapping[Key, str],
    launched: Launched | None = None,
) -> Chosen:
    """Apply to what the change selects everything else that decides whether a step is planned.

    An image is not built where a build of the default branch has built the same contents (`built`: image -> digest). A
    step belongs to its profiles alone. A quick plan has the quick steps of the project. Some profiles run everything.
    What only edited bodies of kernels select is not planned where it launches none of them (`launched`).
    """
    wanted: dict[Key, Wanted] = {}
    unwanted: dict[Key, NotWanted] = {}
    for _, step in declarations.steps():
        if step.provides and step.provides in built:
            image = f"{step.provides} is {built[step.provides][:19]}"
            unwanted[step.key] = ("not affected", f"a build of the default branch built the same: {image}")
        elif ("gate" if profile == "quick" else profile) not in step.profiles:
            unwanted[step.key] = ("other profiles", "runs " + " and ".join(WHEN[one] for one in step.profiles))
        elif profile == "quick" and step.key in declarations.project.quick:
            wanted[step.key] = Wanted(f"quick step of {PROJECT_FILE}")
        elif profile == "quick":
            unwanted[step.key] = ("not quick", "no quick step; runs when a change can break it")
        elif profile in WHOLE:
            wanted[step.key] = Wanted(f"everything runs {WHEN[profile]}")
        elif step.key in selection.reasons:
            wanted[step.key] = Wanted(selection.reasons[step.key])
        else:
            unwanted[step.key] = ("not affected", selection.omitted[step.key])
    chosen = Chosen(wanted, unwanted)
    return _without_idle(chosen, selection, declarations, launched) if launched else chosen


def _without_idle(chosen: Chosen, selection: Selection, declarations: Declarations, launched: Launched) -> Chosen:
    """The same without the steps on devices that launch no changed kernel, by the records of earlier builds.

    What wanted steps need is asked too: it may have passed, and nothing changed since.
    """
    wanted, unwanted = dict(chosen.wanted), dict(chosen.unwanted)
    steps = {step.key: step for _, step in declarations.steps()}
    needed = {need for key in wanted for need in steps[key].needs} - selection.reasons.keys()
    settled: dict[Key, dict[Key, str]] = {}
    for key in [key for key in steps if key in needed or key in selection.by_bodies & wanted.keys()]:
        answers = launched.answers(steps[key])
        silent = {device: answer.reason for device, answer in answers.items() if not answer.runs}
        if silent:
            settled[key] = silent
        if key in needed:
            continue
        reason = selection.reasons[key]
        reasons = {
            device: answer.reason if answer.counts else f"{reason}; {answer.reason}"
            for device, answer in answers.items()
            if answer.runs
        }
        rest = frozenset(steps[key].devices) - silent.keys()
        if rest:
            wanted[key] = Wanted(reason, rest if silent else None, reasons)
        else:
            del wanted[key]
            unwanted[key] = ("not affected", next(iter(silent.values())))
    return Chosen(wanted, unwanted, settled)


def _images(steps: Sequence[PlannedStep], facts: ChangeFacts) -> dict[Key, str]:
    """The images that planned steps use or build, with what each is built from.

    Raises:
        DeclarationError: Nothing says what an image is built from, so no result could be compared with it.
    """
    names = sorted({name for step in steps for name in (step.image, step.step.provides) if name})
    unknown = [name for name in names if name not in facts.images]
    if unknown:
        raise DeclarationError(
            f"nothing says what the image {unknown[0]!r} is built from",
            where="images in ci/project.yaml",
            remedy="declare it there, take it from the queues of ci/agents.yaml, or plan a commit of a git checkout",
        )
    return {name: facts.images[name] for name in names}


def _require_each(plan: Plan, declarations: Declarations, select: tuple[str, ...], models: tuple[str, ...]) -> None:
    """Refuse a name without a planned step: only what it needs would run, and that pass says nothing about it."""
    for name in (*select, *models):
        own = {step.key for step in declarations.models().get(name, ())} if name in models else set()
        if any(name in (one.whole, one.step.key, one.area) or one.step.key in own for one in plan.steps):
            continue
        reasons = [
            f"{omission.key}: {omission.reason}"
            for omission in plan.omissions
            if name in (omission.key, omission.area) or omission.key.rpartition("-")[0] in (name, *own)
        ]
        what = f"nothing of {name} can be planned"
        raise CannotRunHereError(what, where="; ".join(reasons[:5]), remedy=ELSEWHERE)


def _require_some(plan: Plan) -> None:
    """Refuse a plan of nothing, but one whose steps all wait for a queue that is out: its verdict says so."""
    if plan.steps or plan.held_up:
        return
    placeless = {"no queue", "only reported", "not here", "need omitted"}
    reasons = [f"{omission.key}: {omission.reason}" for omission in plan.omissions if omission.cause in placeless]
    where = "; ".join(reasons[:5]) or "no declared step is affected"
    remedy = ELSEWHERE if reasons else "run everything: `hilgate gate --all`"
    raise NothingSelectedError("no step can be planned", where=where, remedy=remedy)


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
