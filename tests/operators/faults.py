# SPDX-License-Identifier: Apache-2.0
"""Faults of vLLM itself that are declared, and what a case says beside them."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DECLARED = Path(__file__).with_name("declared.toml")


@dataclass(frozen=True)
class Fault:
    """A promise that vLLM does not keep, in the cases that show it (`declared.toml`)."""

    operator: str
    promise: str
    cases: str
    where: str
    why: str

    def shown_by(self, case: str) -> bool:
        """Whether a case shows it."""
        return re.fullmatch(self.cases, case) is not None


def declared(path: Path = DECLARED) -> tuple[Fault, ...]:
    """The declared faults."""
    return tuple(Fault(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"])


def problems(record: dict[str, Any], faults: tuple[Fault, ...]) -> list[str]:
    """What is wrong with a case: promises that are broken and not declared, and declared faults that are gone."""
    expected = {(fault.operator, fault.promise): fault for fault in faults if fault.shown_by(record["case"])}
    found = {(each["operator"], each["promise"]): each["text"] for each in record["broken"]}
    said = [
        f"{operator}: {promise}: {text}"
        for (operator, promise), text in found.items()
        if (operator, promise) not in expected
    ]
    said += [
        f"{operator}: {promise} is kept now: remove the fault from declared.toml ({fault.where})"
        for (operator, promise), fault in expected.items()
        if (operator, promise) not in found
    ]
    return said
