# SPDX-License-Identifier: Apache-2.0
"""The models of hilgate's files; this file has what they share.

A module for each artefact: `declaration` (what the repository declares), `plan` (what will run), `record` (what a run
leaves) and `verdict` (what was decided). Every file that one stage hands to the next is one of these models as JSON.
They are frozen and forbid unknown keys, so a misspelt key is an error and never a silent default. A change of the keys
raises the `schema_version` of the file. `MODEL.model_json_schema()` is its JSON schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from pydantic_core import PydanticCustomError

from hilgate.errors import RecordsError, place_for, writing

if TYPE_CHECKING:
    from pathlib import Path


REFUSED: Final = "refused"
"""Type of the validation errors that `refused` makes."""


WORD, MAPPING = "[word]", "[mapping]"
"""Parts of the place of a validation error that say which spelling was read of a value that may be a word or a
mapping."""


LONGEST_PLACE: Final = 300
"""Characters of a place in a file: keys in it can have any length."""


def refused(what: str, remedy: str = "") -> PydanticCustomError:
    """The error that a validator raises for a value that is of the right type and wrong all the same."""
    return PydanticCustomError(REFUSED, "{what}", {"what": what, "remedy": remedy})


def first_problem(error: ValidationError) -> str:
    """The first mistake with its place, shortened; but another version before all others, as they follow from it."""
    mistakes = error.errors(include_url=False)
    version = next((mistake for mistake in mistakes if mistake["loc"][-1:] == ("schema_version",)), None)
    if version and version["type"] == "literal_error":
        return f"schema {version['input']!r:.20}, this reads {version['ctx']['expected']}"
    place = ".".join(map(str, mistakes[0]["loc"]))
    what = "is missing" if mistakes[0]["type"] == "missing" else mistakes[0]["msg"].removeprefix("Value error, ")
    return f"{place[:LONGEST_PLACE]}: {what}" if place else what


Key = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=100)]
"""A name usable as a Buildkite step key and as a folder name."""

ImageDigest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]

PLAN_FILE, VERDICT_FILE, FINDINGS_FILE, JOBS_FOLDER = "plan.json", "verdict.json", "findings.jsonl", "jobs"
EARLIER_FILE = "earlier.json"
"""Names in the folder of a build's results."""

RESERVED_FILES = frozenset(
    {
        PLAN_FILE,
        VERDICT_FILE,
        "quarantine.json",
        "restored.json",
        EARLIER_FILE,
        "manifest.json",
        "health-before.json",
        "health-after.json",
    }
)
"""Files that every build leaves, or its bundle, under these names."""

Number = int | float

Scalar = str | int | float | bool | None


class StrictModel(BaseModel):
    """Base of every record: frozen, no unknown keys, no NaN or infinity (JSON has neither)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        json_schema_serialization_defaults_required=True,
    )

    def save(self, path: Path) -> None:
        """Write it as JSON, atomically: a reader sees the old file or the whole new one."""
        path = place_for(path)
        new = path.with_name(f".{path.name}.new")
        with writing(path):
            new.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
            new.replace(path)

    @classmethod
    def load(cls, path: Path, remedy: str) -> Self:
        """Read what `save` wrote.

        Raises:
            RecordsError: Missing, truncated, of another schema or contradicting itself; with this remedy.
        """
        name = cls.__name__.lower()
        try:
            found = cls.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise RecordsError(f"there is no {name}", where=str(path), remedy=remedy) from error
        except OSError as error:
            raise RecordsError(f"the {name} cannot be read: {error}", where=str(path), remedy=remedy) from error
        except ValidationError as error:
            raise RecordsError(f"not a {name}: {first_problem(error)}", where=str(path), remedy=remedy) from error
        if "schema_version" in cls.model_fields.keys() - found.model_fields_set:
            raise RecordsError(f"not a {name}: it has no schema_version", where=str(path), remedy=remedy)
        return found
