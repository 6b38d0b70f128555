"""Options of `hilgate run` that no command declares: the labels of matrices, which belong to the areas' steps.

`hilgate run models --family jamba` runs the part of the named steps whose tables have that label.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from hilgate.errors import MisuseError
from hilgate.text import suggest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hilgate.declare.load import Declarations
    from hilgate.model import Plan, Step

PART = "hilgate.part"


@dataclass(frozen=True)
class Part:
    """What narrows the steps of a run.

    Attributes:
        labels: (label, value) as typed; a value is None where nothing followed its label.
        extra: What followed `--`.
        own: Long options of the command itself, for a did-you-mean.
    """

    labels: tuple[tuple[str, str | None], ...]
    extra: tuple[str, ...]
    own: tuple[str, ...]

    @property
    def arguments(self) -> str:
        """What is added to commands; empty for nothing."""
        words = [word for label, value in self.labels for word in (f"--{label}", value or "")]
        return shlex.join([*words, *self.extra])


class TakesPart(TyperCommand):
    """Keeps what follows `--` and long options of other names apart, which the parser would mix or refuse."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave a `Part` in `ctx.meta` and parse the rest."""
        cut = args.index("--") if "--" in args else len(args)
        flags = {name: bool(getattr(one, "is_flag", False)) for one in self.get_params(ctx) for name in one.opts}
        kept, labels = split(args[:cut], {name: flag for name, flag in flags.items() if name.startswith("-")})
        own = tuple(name for name in flags if name.startswith("--"))
        ctx.meta[PART] = Part(labels, tuple(args[cut + 1 :]), own)
        return super().parse_args(ctx, kept)


def split(words: Sequence[str], own: dict[str, bool]) -> tuple[list[str], tuple[tuple[str, str | None], ...]]:
    """Words for the parser, and (name, value) of long options that are not the command's own.

    Args:
        words: As typed.
        own: Options of the command, and whether each is a flag.
    """
    kept: list[str] = []
    labels: list[tuple[str, str | None]] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if word.startswith("--") and name not in own:
            following = value if equals else waiting.pop(0) if waiting and not waiting[0].startswith("-") else None
            labels.append((name.removeprefix("--"), following))
            continue
        kept.append(word)
        if own.get(word) is False and waiting:
            kept.append(waiting.pop(0))
    return kept, tuple(labels)


def with_tables(
    plan: Plan, names: tuple[str, ...], part: Part, declarations: Declarations
) -> tuple[Plan, frozenset[str]]:
    """The plan of those named steps whose matrix has every label, with what they need; and the keys of those steps.

    Labels that a matrix has beside its rows and columns count where the step itself is named: of an area's tables one
    may well lack a row that another has.

    Raises:
        MisuseError: No planned step of these names has a matrix with such labels, or a label has no value.
    """
    named = [step for step in plan.steps if not {step.key, step.step.key, step.area}.isdisjoint(names)]
    labels = {step.key: _labels(step.step, also=not {step.key, step.step.key}.isdisjoint(names)) for step in named}
    known = {label for found in labels.values() for label in found}
    where = f"hilgate run {shlex.join(names)}"
    for label, value in part.labels:
        if label not in known:
            elsewhere = [step.key for _, step in declarations.steps() if label in _labels(step, also=True)]
            options = [*part.own, *(f"--{one}" for one in known)]
            raise MisuseError(
                f"there is no option --{label}, and no planned step of these names has a table with that label",
                where=where,
                remedy=f"such a table has: {', '.join(elsewhere)}" if elsewhere else suggest(f"--{label}", options),
            )
        if not value:
            raise MisuseError(f"--{label} needs a value", where=where, remedy=f"name one {label} of the table")
    wanted = {label for label, _ in part.labels}
    keys = frozenset(step.key for step in named if wanted <= labels[step.key])
    if not keys:
        words = " and ".join(sorted(wanted))
        raise MisuseError(f"no table has the labels {words} together", where=where, remedy="leave one of them out")
    kept = set(keys)
    for step in reversed(plan.steps):
        if step.key in kept:
            kept.update(step.depends_on)
    return plan.model_copy(update={"steps": tuple(step for step in plan.steps if step.key in kept)}), keys


def _labels(step: Step, *, also: bool) -> set[str]:
    if step.matrix is None:
        return set()
    return {step.matrix.rows, step.matrix.columns, *(step.matrix.also if also else ())}
