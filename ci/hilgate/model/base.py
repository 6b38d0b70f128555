"""What every noun shares: the base class, names, outcomes and kinds of evidence."""

from __future__ import annotations

import enum
import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints
from pydantic_core import PydanticCustomError

SCHEMA_VERSION: Final = 1

Key = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=100)]
"""A name usable as a Buildkite step key and as a folder name."""


def _label_name(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise PydanticCustomError("label_name", "must be a word of lower case letters, digits and '_'")
    return name


def _json_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,60}\.json", name):
        raise PydanticCustomError("json_name", "must be a plain file name, lower case, that ends in .json")
    return name


LabelName = Annotated[str, AfterValidator(_label_name)]
"""Name of a label of checks, usable as an option on the command line."""

JsonName = Annotated[str, AfterValidator(_json_name)]
"""Name of a JSON file without a folder."""

Profile = Literal["gate", "pr", "nightly", "release"]
"""Who asks for a plan: this machine, a pull request, the night, a release."""

Number = int | float
Scalar = str | int | float | bool | None


class Noun(BaseModel):
    """Base of every record: frozen, no unknown keys, no NaN or infinity (JSON has neither)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Outcome(enum.StrEnum):
    """The only four things that can be said of a check, a step or a build."""

    PASS = "pass"  # noqa: S105 - an outcome, not a password
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    DID_NOT_RUN = "did not run"


class Ruling(enum.StrEnum):
    """What the author of a change is told about a step; an `Outcome` says only whether it is green."""

    PASS = "pass"  # noqa: S105 - a ruling, not a password
    REGRESSION = "regression"
    """The step did its work and what it checks is wrong, or it no longer does its work."""
    INFRA = "infra"
    """The node, the agent, the network or the image: nothing was learned about the change."""
    FLAKY = "flaky"
    """A check failed and then passed over the same files: not a pass, and named check by check."""
    QUARANTINED = "quarantined"
    """Nothing but failures that the merge base has in quarantine."""
    INCONCLUSIVE = "inconclusive"
    NOT_SELECTED = "not selected"


class Evidence(enum.StrEnum):
    """What a step must leave in its output folder besides an exit status."""

    JUNIT = "junit"
    """`junit.xml`, one test case per check (pytest --junitxml)."""
    FINDINGS = "findings"
    """`findings.jsonl`, one `Check` per line."""
