# SPDX-License-Identifier: Apache-2.0
"""Drive families in a process of its own, one after the other as asked for, each to `<family>.json` of a folder.

Published checkpoints, which the spec describes, are named by their slugs.

A process of its own, because the environment decides whether Triton interprets, and because an engine that crashes
takes only its process along: `fleet.py` starts another one for the families that are left.
"""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
import torch._dynamo
from vllm.config import CompilationMode
from vllm.platforms import current_platform

from families import behaviours, layers, mla_prefill, stand_ins
from families.behaviours import Bench, NotDrivenError, NotHereError, require_codes
from families.cell import FamilyCell, Outcome, settled, worse, write
from families.engine import FamilyEngine, StuckError, end_with_parent
from families.family import FAMILIES, another_platform
from families.fleet import SPENT
from families.judge import WrongAnswerError
from families.mtp import WrongDraftError
from families.plans import not_here
from families.published import Checkpoint
from families.schedule import CompanyError
from families.served import PublishedFamily, Tiny
from pagedkv import prepared
from pagedkv.errors import ArgumentError
from pagedkv.vllm_plugin import scan
from pagedkv.vllm_plugin.errors import CompiledLateError, NotServedError, PluginError
from pagedkv.vllm_plugin.inspect import require_scans, require_served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection
    from pathlib import Path

    from families.plans import EnginePlan

WRONG = (WrongAnswerError, WrongDraftError, CompanyError, StuckError, NotServedError, CompiledLateError, NotDrivenError)
"""What a cell fails of in words of ours; of anything else the class belongs to the reason."""

OURS = (ArgumentError, PluginError)
"""Of kernels and plugin: what they raise is never declared to be a limit of vLLM."""


def main(spec_file: Path, folder: Path, asked: Connection) -> None:
    """Run the families that are asked for, until the process is ended."""
    end_with_parent()
    spec = json.loads(spec_file.read_text())
    stand_ins.supply()
    mla_prefill.register()
    plants = import_module(spec["plants"]).PLANTS if "plants" in spec else {}
    gc.freeze()  # what has been imported lives as long as the process; vLLM collects garbage several times an engine
    for line in iter(asked.recv, None):
        name, _, plant = line.partition("+")
        if plant:
            fault = plants[plant]
            chosen, planted = (*fault.passes, fault.fails), fault.change
        else:
            chosen, planted = tuple(spec["behaviours"]), lambda _: nullcontext()
        published = spec.get("published", {}).get(name)
        served = PublishedFamily(Checkpoint(**published)) if published else Tiny(FAMILIES[name], folder)
        cells = FamilyRun(served, chosen, planted, spec["fuzz"]).cells()
        spent = gpu_is_lost()
        if spent:
            (folder / f"{line}.{SPENT}").touch()
        write(cells, folder / f"{line}.json")
        if spent:
            return


def gpu_is_lost() -> bool:
    """Whether a kernel has left this process's GPU context unusable: whatever came next would fail of it too."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - any answer but none means that it is
        return True
    return False


@dataclass
class FamilyRun:
    """One model, and which of its behaviours."""

    served: Tiny
    behaviours: tuple[str, ...]
    planted: Callable[[FamilyEngine], AbstractContextManager[None]]
    """A fault to plant while they are driven."""
    fuzz: dict[str, int]
    _hopeless: FamilyCell | None = field(default=None, init=False)
    """What every cell is where no engine of this model starts here."""

    def cells(self) -> dict[str, FamilyCell]:
        """Drive them; the next engine starts when the one before has ended."""
        platform = "cpu" if current_platform.is_cpu() else "rocm" if current_platform.is_rocm() else "cuda"
        family, started = self.served.family, time.monotonic()
        made: dict[str, FamilyCell] = {}
        try:
            plans = self.served.plans(platform)
        except Exception as error:  # noqa: BLE001 - as where an engine of the plans does not start
            return dict.fromkeys(self.behaviours, self._not_started(error, platform, started))
        for plan in plans:
            chosen = tuple(name for name in plan.behaviours if name in self.behaviours and family.has(name))
            if chosen and self._hopeless:
                made |= dict.fromkeys(chosen, replace(self._hopeless, seconds=0.0))
            elif chosen:
                for name, cell in self._engine(plan, chosen, platform).items():
                    held = settled(cell, family.limit(platform, name), measured=self.served.measured)
                    made[name] = worse(made.get(name), held)
        return made

    def _engine(self, plan: EnginePlan, chosen: tuple[str, ...], platform: str) -> dict[str, FamilyCell]:
        served = self.served
        if (reason := not_here(platform, served.family, chosen[0])) is not None:
            return dict.fromkeys(chosen, FamilyCell("did not run", reason, needs=another_platform(platform)))
        started = time.monotonic()
        with scan.claimed() if served.family.ssd else nullcontext(), compiling(wanted=plan.compiled):
            try:
                if plan.compiled:
                    prepared.forget()  # what earlier engines compiled is no merit of this one's warm-up
                arguments = served.arguments(platform, plan.arguments)
                engine = FamilyEngine(served.checkpoint, poison=plan.poison, best=served.best, **arguments)
            except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the reason of these cells
                return dict.fromkeys(chosen, self._not_started(error, platform, started))
            return self._driven(engine, chosen)

    def _driven(self, engine: FamilyEngine, chosen: tuple[str, ...]) -> dict[str, FamilyCell]:
        served = self.served
        with engine, self.planted(engine):
            fuzz = self.fuzz
            bench = Bench(
                engine, served.oracle, served.family, fuzz["seed"], fuzz["examples"], heads=lambda: served.heads
            )
            return {name: run_cell(name, bench, served.labels(engine)) for name in chosen}

    def _not_started(self, error: Exception, platform: str, started: float) -> FamilyCell:
        traceback.print_exception(error)
        failed = FamilyCell("fail", _words(error), time.monotonic() - started, ours=isinstance(error, OURS))
        failed = settled(failed, self.served.family.limit(platform))
        if package := lacking_package(error):
            failed = replace(failed, outcome="did not run", needs=f"package:{package}")
        if failed.outcome == "did not run":
            self._hopeless = failed  # of every engine of the family
        return failed


@contextmanager
def compiling(*, wanted: bool) -> Iterator[None]:
    """Whether torch.compile works; drivers start with it off, which saves its time where it is not the matter."""
    switch = {"TORCHDYNAMO_DISABLE": "0" if wanted else "1"}
    with patch.dict(os.environ, switch), torch._dynamo.config.patch(disable=not wanted):
        yield


def lacking_package(error: Exception) -> str:
    """The package without which an engine did not start, of those that vLLM imports for a model; empty for none."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return "" if name in {"pagedkv", "families", "vllm"} else name


def run_cell(name: str, bench: Bench, labels: dict[str, str]) -> FamilyCell:
    """Drive one behaviour, and ask the workers who served it."""
    engine, started = bench.engine, time.monotonic()
    before = engine.non_finite()
    engine.restart()
    stand_ins.forget()  # what has stood in for a family before is no label of this one
    numbers: dict[str, float] = {}
    try:
        numbers = behaviours.DRIVEN[name](bench)
        if bench.family.attention:
            require_served(engine.layers())
            require_codes(bench.family, engine.layers())
        if bench.family.ssd:
            numbers["scans"] = require_scans(engine.llm)
        reason, ours = "", False
    except NotHereError as error:
        return FamilyCell("did not run", str(error), time.monotonic() - started)
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the reason of this cell
        traceback.print_exc()
        reason, ours = _words(error) + _where(error, bench), isinstance(error, OURS)
    if bad := engine.non_finite() - before:
        reason = f"{bad} logits were NaN or infinite" + (f"; {reason}" if reason else "")
    outcome: Outcome = "fail" if reason else "pass"
    return FamilyCell(outcome, reason, time.monotonic() - started, numbers, labels | _labels(bench), ours=ours)


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())[:600]
    return text if isinstance(error, WRONG) else f"{type(error).__name__}: {text}"


def _where(error: Exception, bench: Bench) -> str:
    """The first layer that is wrong, where a wrong distribution can be traced to one."""
    tokens = getattr(error, "tokens", ())
    if not tokens or bench.family.attention == "cross":
        return ""
    try:
        found = layers.first_diverging(bench.engine.llm, bench.family, bench.oracle, list(tokens))
    except Exception as trouble:  # noqa: BLE001 - the reason that is known must not be lost over one that is not
        traceback.print_exc()
        return f"; the layers could not be compared: {_words(trouble)}"
    if found is None and bench.engine.config.compilation_config.mode != CompilationMode.NONE:
        return (
            "; the same tokens as a prompt alone are right behind every layer of the model uncompiled: what is "
            "compiled or captured is wrong, or what is carried between steps"
        )
    if found is None:
        return (
            "; the same tokens as a prompt alone are right behind every layer: what is carried between steps is wrong"
        )
    return f"; the first wrong layer is {found.index} ({found.kind}), off by {found.error:.2g} of {found.tolerance:.2g}"


def _labels(bench: Bench) -> dict[str, str]:
    found: dict[str, str] = {}
    for layer in bench.engine.layers():
        found |= {key: str(layer[key]) for key in ("backend", "packing", "fp8_format") if layer[key] is not None}
        found |= {key: kernel for key, kernel in (layer["route"] or {}).items() if kernel is not None}
    if bench.family.ssd:
        found["ssd"] = f"{bench.family.ssd}.ssd_prefill"
    if used := stand_ins.used():
        found["stand_in"] = ", ".join(used)
    return found
