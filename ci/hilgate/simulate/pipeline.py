"""Reads pipeline text the way Buildkite does: steps, queues, dependencies, timeouts and retries come from the YAML.

Nothing here looks at the plan, so a pipeline that forgets a dependency or a retry rule behaves as it would for real.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from hilgate.errors import DeclarationError

if TYPE_CHECKING:
    from collections.abc import Iterator

JOBS_FOLDER = "results/jobs/"
_RUNS = re.compile(r"\b(?:hilgate run|hilgate\.agent\.job|hilgate recheck) ([a-z0-9_.-]+)")
_RESULTS = re.compile(r"--results results/jobs/([a-z0-9_.-]+)")


@dataclass(frozen=True)
class Retry:
    """One rule of `retry.automatic`; None matches anything."""

    exit_status: int | None
    signal_reason: str | None
    limit: int


@dataclass(frozen=True)
class Command:
    """A command step.

    Attributes:
        timeout_minutes: Buildkite's own.
        runs: The planned step that its command runs; empty for a step of the flow itself.
        folder: Name of the folder below `results/jobs` that its command writes; empty for none.
        uploads: Whether its `artifact_paths` cover that folder.
    """

    key: str
    queue: str
    depends_on: tuple[str, ...]
    allow_dependency_failure: bool
    timeout_minutes: float
    retries: tuple[Retry, ...]
    soft_fail: bool
    runs: str
    folder: str
    uploads: bool

    @property
    def rechecks(self) -> bool:
        """Whether it runs failing checks once more instead of the step."""
        return self.folder != self.runs

    def retried(self, exit_status: int, signal_reason: str, before: int) -> bool:
        """Whether an attempt that ended so is followed by another, after `before` automatic retries."""
        for rule in self.retries:
            by_status = rule.exit_status is None or rule.exit_status == exit_status
            by_reason = rule.signal_reason is None or rule.signal_reason == signal_reason
            if by_status and by_reason:
                return before < rule.limit
        return False


@dataclass(frozen=True)
class Wait:
    """A wait step: what stands after it waits for all that stands before it."""

    continue_on_failure: bool


def parse(text: str) -> tuple[Command | Wait, ...]:
    """The steps of a pipeline in order; groups are opened.

    Raises:
        DeclarationError: A step is of a kind that no pipeline of ours may hold.
    """
    document: dict[str, Any] = yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader, in C where there is one
    return tuple(_parse(document["steps"]))


def _parse(steps: list[Any]) -> Iterator[Command | Wait]:
    for step in steps:
        if step == "wait":
            yield Wait(continue_on_failure=False)
        elif "wait" in step:
            yield Wait(bool(step.get("continue_on_failure")))
        elif "group" in step:
            yield from _parse(step["steps"])
        elif "command" in step or "commands" in step:
            yield _command(step)
        else:
            raise DeclarationError(
                f"the simulator knows no such step: {', '.join(map(str, step))}",
                where="the pipeline",
                remedy="use command steps, waits and groups",
            )


def _command(step: dict[str, Any]) -> Command:
    given = step.get("command") or step.get("commands") or ""
    lines = given if isinstance(given, str) else "\n".join(given)
    needs = step.get("depends_on") or []
    needs = [needs] if isinstance(needs, str) else needs
    runs, folder = _RUNS.search(lines), _RESULTS.search(lines)
    name = folder[1] if folder else ""
    paths = step.get("artifact_paths") or []
    paths = [paths] if isinstance(paths, str) else paths
    return Command(
        key=step["key"],
        queue=step["agents"]["queue"],
        depends_on=tuple(need if isinstance(need, str) else need["step"] for need in needs),
        allow_dependency_failure=bool(step.get("allow_dependency_failure")),
        timeout_minutes=step["timeout_in_minutes"],
        retries=tuple(_retry(rule) for rule in (step.get("retry") or {}).get("automatic") or ()),
        soft_fail=bool(step.get("soft_fail")),
        runs=runs[1] if runs and folder else "",
        folder=name,
        uploads=any(path.split("*")[0] in {f"{JOBS_FOLDER}{name}/", JOBS_FOLDER} for path in paths),
    )


def _retry(rule: dict[str, Any]) -> Retry:
    status = rule.get("exit_status", "*")
    return Retry(None if status == "*" else status, rule.get("signal_reason"), rule.get("limit", 2))


_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
