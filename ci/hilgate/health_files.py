"""The health files that the hooks of a job left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from hilgate.model import Health

if TYPE_CHECKING:
    from pathlib import Path

MOMENTS = ("before", "after")


def health_file(moment: str) -> str:
    """Name of the file in a job's folder."""
    return f"health-{moment}.json"


def read_health(folder: Path, key: str) -> tuple[tuple[Health, ...], str]:
    """The health files of a job, and what is wrong with them (empty: nothing; a missing file is not wrong here).

    Args:
        folder: The job's folder.
        key: The planned step they must be of; empty for a rerun, whose job is called otherwise.
    """
    found: list[Health] = []
    problem = ""
    for moment in MOMENTS:
        path = folder / health_file(moment)
        if not path.exists() and not path.is_symlink():
            continue
        try:
            health = Health.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
            problem = problem or f"{path.name}: not a health record: {why}"
            continue
        if health.moment != moment or (key and health.step != key):
            problem = problem or f"{path.name}: it is of {health.step}, {health.moment} it ran"
            continue
        found.append(health)
    return tuple(found), problem
