"""gates.yaml: the committed file, and files with one mistake each."""

import pytest
import yaml

from hileval.declare import EVALS, UnknownGateError, find_gate, load_gates
from hilgate.errors import DeclarationError, Exit


def test_the_committed_gates_name_existing_files():
    for gate in load_gates().values():
        for relative in (gate.task, gate.baseline, f"{gate.model}/model.safetensors"):
            assert gate.path(relative).is_file(), relative


def test_the_gate_and_its_a_a_differ_in_the_attention_only():
    gates = load_gates()
    ours, own = (gates[name].model_dump() for name in ("pocket-hybrid", "pocket-hybrid-own"))
    assert {key for key in ours if ours[key] != own[key]} == {"title", "attention_backend"}


def test_unknown_gate_offers_the_nearest_name():
    with pytest.raises(UnknownGateError, match="no gate 'pocket-hybird'") as caught:
        find_gate("pocket-hybird", load_gates())
    assert caught.value.remedy == "did you mean 'pocket-hybrid'?"
    assert caught.value.exit_status is Exit.MISUSE


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"flor": 0.9}, "flor"),
        ({"alpha": 0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"questions": 0}, "questions"),
        ({"engine": "sglang"}, "engine"),
        ({"attention_backend": "paged"}, "attention_backend"),
        ({"attention_backend": None}, "attention_backend is required"),
        ({"engine": "transformers"}, "meaningless"),
    ],
)
def test_one_mistake_is_named(tmp_path, change, why):
    content = yaml.safe_load((EVALS / "gates.yaml").read_text())
    content["gates"]["pocket-hybrid"] |= change
    path = tmp_path / "gates.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(DeclarationError, match=why) as caught:
        load_gates(path)
    assert caught.value.exit_status is Exit.INVALID_DECLARATION


@pytest.mark.parametrize("text", ["", "gates: {}", "gates: [", "- a"])
def test_not_a_gates_file(tmp_path, text):
    path = tmp_path / "gates.yaml"
    path.write_text(text)
    with pytest.raises(DeclarationError):
        load_gates(path)


def test_missing_file(tmp_path):
    with pytest.raises(DeclarationError, match="cannot read"):
        load_gates(tmp_path / "none.yaml")
