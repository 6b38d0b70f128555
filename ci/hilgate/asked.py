"""Steps that are asked for by name: an area, a step, a step on a device, or a model. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hilgate.errors import MisuseError
from hilgate.expand import Wanted
from hilgate.names import planned_key
from hilgate.suggest import suggest

if TYPE_CHECKING:
    from hilgate.declare import Declarations
    from hilgate.model import Key


def by_name(declarations: Declarations, names: tuple[str, ...]) -> dict[Key, Wanted]:
    """The steps that these areas, steps or steps on a device name.

    Raises:
        MisuseError: A name is none of them; with a did-you-mean.
    """
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


def by_model(declarations: Declarations, models: tuple[str, ...]) -> dict[Key, Wanted]:
    """The steps that run these models.

    Raises:
        MisuseError: No step runs a model of that name; with a did-you-mean.
    """
    known = declarations.models()
    wanted: dict[Key, Wanted] = {}
    for model in models:
        if model not in known:
            raise MisuseError(f"no step runs a model {model!r}", where="ci/areas", remedy=suggest(model, known))
        for step in known[model]:
            wanted.setdefault(step.key, Wanted(f"asked for: model {model}"))
    return wanted
