"""Makes, reads and writes `plan.json`: what will run and why, fixed before anything runs."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from hilgate import changes, hardware
from hilgate.declare import Declarations, load
from hilgate.errors import CannotRunHereError, MisuseError, NothingSelectedError, RecordsError
from hilgate.expand import Wanted, expand
from hilgate.model import Key, Plan, Profile
from hilgate.names import planned_key
from hilgate.selection import select as select_areas
from hilgate.suggest import suggest

NOT_AFFECTED = "not affected by this change"
NOT_ASKED_FOR = "not asked for"


def make_plan(root: Path, *, base: str | None, profile: Profile, select: tuple[str, ...] = ()) -> Plan:
    """Plan the change between `base` and the working tree (None: everything) for this machine or for the agents.

    `select` names areas, steps or planned steps: those and what they need are planned, whatever changed.

    Raises:
        InvalidDeclarationsError: A declaration is invalid.
        MisuseError: `base` or a name in `select` does not exist.
        CannotRunHereError: Everything that was asked for by name needs another machine.
        NothingSelectedError: The plan would be empty, which is never a pass.
    """
    declarations = load(root)
    packages = [package for _, step in declarations.steps() for package in step.packages]
    machine = hardware.detect(packages) if profile == "gate" else None
    return assemble(declarations, changes.inspect(root, base), machine, profile=profile, select=select)


def assemble(
    declarations: Declarations,
    change: changes.Changes,
    machine: hardware.Machine | None,
    *,
    profile: Profile,
    select: tuple[str, ...] = (),
) -> Plan:
    """Like `make_plan`, from facts already gathered: no git, no files, no hardware."""
    wanted = _named(declarations, select) if select else _affected(declarations, change)
    otherwise = NOT_ASKED_FOR if select else NOT_AFFECTED
    expansion = expand(declarations, wanted, machine, otherwise=otherwise)
    if not expansion.steps:
        reasons = [
            f"{omission.key}: {omission.reason}" for omission in expansion.omissions if omission.reason != otherwise
        ]
        error = CannotRunHereError if select else NothingSelectedError
        raise error(
            "no step can be planned",
            where="; ".join(reasons[:5]) or "no declared step is affected",
            remedy="run it on a machine or queue that has the device; `hilgate plan` shows what this one can do",
        )
    return Plan(
        created=dt.datetime.now(dt.UTC),
        commit=change.commit,
        dirty=change.dirty,
        base=change.base,
        profile=profile,
        changed_files=change.files or (),
        steps=expansion.steps,
        omissions=expansion.omissions,
    )


def _affected(declarations: Declarations, change: changes.Changes) -> dict[Key, Wanted]:
    reasons = select_areas(declarations.areas, change.files).reasons
    return {step.key: Wanted(reasons[area.area]) for area, step in declarations.steps() if area.area in reasons}


def _named(declarations: Declarations, names: tuple[str, ...]) -> dict[Key, Wanted]:
    """Steps asked for by name; a name may be an area, a step, or a step on a device."""
    wanted: dict[Key, Wanted] = {}
    known = {area.area for area in declarations.areas}
    for _, step in declarations.steps():
        known.update((step.key, *(planned_key(step, device) for device in step.devices)))
    for name in names:
        if name not in known:
            raise MisuseError(f"no area or step is called {name!r}", where="ci/areas", remedy=suggest(name, known))
        reason = f"asked for: {name}"
        for area, step in declarations.steps():
            if name in (area.area, step.key):
                wanted[step.key] = Wanted(reason)
            for device in step.devices:
                if name == planned_key(step, device):
                    before = wanted.get(step.key, Wanted(reason, frozenset()))
                    devices = None if before.devices is None else before.devices | {device}
                    wanted[step.key] = Wanted(reason, devices)
    return wanted


@dataclass(frozen=True)
class Estimate:
    """How big a plan is, in minutes as declared (usual time on 2 cores)."""

    minutes: float
    chain: tuple[Key, ...]
    """The longest chain of steps that must wait for each other."""
    chain_minutes: float
    gpu_minutes: float


def estimate(plan: Plan) -> Estimate:
    """Sum and longest chain of a plan."""
    chains: dict[Key, tuple[float, tuple[Key, ...]]] = {}
    for step in plan.steps:  # dependencies stand before their dependants
        longest, keys = max((chains[need] for need in step.depends_on), default=(0.0, ()))
        chains[step.key] = (longest + step.minutes, (*keys, step.key))
    chain_minutes, chain = max(chains.values(), default=(0.0, ()))
    gpu = sum(step.minutes for step in plan.steps if step.device != "cpu")
    return Estimate(sum(step.minutes for step in plan.steps), chain, chain_minutes, gpu)


def plan_digest(plan: Plan) -> str:
    """sha256 of the canonical JSON without `created`: equal plans have equal digests whenever they were made."""
    data = plan.model_dump(mode="json", exclude={"created"})
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def write_plan(plan: Plan, path: Path) -> None:
    """Write atomically: a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(plan.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_plan(path: Path) -> Plan:
    """Read a plan and check that it hangs together.

    Raises:
        RecordsError: Missing, truncated, of another schema, or with keys or dependencies that do not fit.
    """
    try:
        text = path.read_text(encoding="utf-8")
        plan = Plan.model_validate_json(text)
    except FileNotFoundError as error:
        raise RecordsError("there is no plan", where=str(path), remedy="make one with `hilgate plan`") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecordsError(f"the plan cannot be read: {error}", where=str(path), remedy="make a new one") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RecordsError(
            f"not a plan: {place}: {first['msg']}",
            where=str(path),
            remedy="make a new one with `hilgate plan` of this version",
        ) from error
    seen: set[Key] = set()
    for step in plan.steps:
        late = [need for need in step.depends_on if need not in seen]
        if step.key in seen or late:
            problem = f"depends on {late[0]}, which does not stand before it" if late else "stands twice"
            raise RecordsError(f"not a plan: step {step.key} {problem}", where=str(path), remedy="make a new one")
        seen.add(step.key)
    return plan
