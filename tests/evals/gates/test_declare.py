# SPDX-License-Identifier: Apache-2.0
"""gates.yaml: the committed file, and files with one mistake each."""

import copy
import json

import pytest
import yaml
from support.gates import resolved

from hileval.gates.declare import EVALS, load_gates, occasion
from hilgate.errors import DeclarationError, Exit

GATES = load_gates().gates


@pytest.fixture(scope="module")
def committed():
    return yaml.safe_load((EVALS / "gates.yaml").read_text())


def test_the_committed_gates_name_existing_files():
    for gate in GATES.values():
        if gate.weights == "hub":
            continue
        baseline = () if gate.paired_with else (gate.baseline,)
        for relative in (gate.task, *baseline, f"{gate.model}/model.safetensors"):
            assert gate.path(relative).is_file(), relative


def test_the_gate_and_its_a_a_ask_the_same_of_another_attention():
    ours, own = (GATES[name].model_dump() for name in ("pocket-hybrid", "pocket-hybrid-own"))
    assert {key for key in ours if ours[key] != own[key]} == {"title", "attention_backend", "arch", "step"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"flor": 0.9}, "flor"),
        ({"floor": float("nan")}, "floor"),
        ({"max_gen_toks": 0}, "max_gen_toks"),
        ({"rules": {"pre-merge": "quick"}}, "no rule 'quick' for pre-merge"),
        ({"rules": {"someday": "release"}}, "someday"),
        ({"revision": "c0ffee00" * 5}, "revision is for models of a hub"),
        ({"revision": "main"}, "revision: .*match pattern"),
        ({"paired_with": "TRITON_ATTM"}, "paired_with: .*'TRITON_ATTN'"),
        ({"paired_with": "vllm", "attention_backend": "vllm"}, "vllm beside attention_backend vllm is no pair"),
        ({"paired_with": "vllm", "engine": "transformers", "attention_backend": None}, "is no pair"),
        ({"backends": ["ROCM_ATTN"]}, "backends is for models of a hub"),
        ({"step": {"before_merge": True, "minutes": 1}}, "before_merge is for models of a hub"),
        ({"engine": "sglang"}, "engine"),
        ({"attention_backend": "paged"}, "attention_backend"),
        ({"attention_backend": None}, "attention_backend is required"),
        ({"engine": "transformers"}, "means nothing"),
        ({"floor": None}, "floor is required"),
        ({"weights": "drawn"}, "weights"),
        ({"kind": "documents", "num_fewshot": 3}, "documents have no examples"),
        ({"kind": "documents", "protocol": "chat"}, "documents have no examples"),
        ({"kind": "pages"}, "kind"),
        ({"engine_args": {"tensor_parallel_size": 2}}, "gpus is 1, and tensor_parallel_size 2"),
        ({"step": {"minute": 1}}, r"step\.minute"),
        ({"step": {"minutes": 0}}, r"step\.minutes"),
        ({"step": {"local": "sometimes"}}, r"step\.local"),
        ({"alpha": 0}, r"rules\.release\.alpha"),
        ({"drifts": {"d": {"kind": "drift", "of": "pocket-speech"}}}, "`of` names a gate of questions"),
        ({"drifts": {"d": {"kind": "drift", "of": "nothing"}}}, "`of` names a gate of questions"),
        ({"drifts": {"d": {"kind": "drift", "of": "pocket-hybrid", "peer": "ours"}}}, r"drifts\.d\.peer"),
        ({"drifts": {"d": {"kind": "drift", "of": "pocket-hybrid", "step": 3}}}, r"drifts\.d\.step"),
    ],
)
def test_one_mistake_is_named(tmp_path, committed, change, why):
    content = copy.deepcopy(committed)
    content["rules"]["release"]["alpha"] = change.pop("alpha", 0.01)
    content["drifts"] |= change.pop("drifts", {})
    content["gates"]["pocket-hybrid"] |= change
    path = tmp_path / "gates.yaml"
    path.write_text(json.dumps(content, default=str))  # JSON is YAML, too
    with pytest.raises(DeclarationError, match=why) as caught:
        load_gates(path)
    assert caught.value.exit_status is Exit.INVALID_DECLARATION


@pytest.mark.parametrize("name", ["ROCM_ATN", "pagedkv", "rocm_attn"])
def test_an_unknown_backend_is_named_with_the_known_ones(tmp_path, committed, name):
    content = copy.deepcopy(committed)
    content["gates"]["granite-4.0-h-micro"]["backends"] = [name]
    path = tmp_path / "gates.yaml"
    path.write_text(json.dumps(content, default=str))
    with pytest.raises(DeclarationError, match=f"'{name}' is no attention backend of vLLM") as caught:
        load_gates(path)
    assert "ROCM_AITER_FA, " in caught.value.remedy


@pytest.mark.parametrize("text", ["", "gates: {}", "gates: [", "- a"])
def test_not_a_gates_file(tmp_path, text):
    path = tmp_path / "gates.yaml"
    path.write_text(text)
    with pytest.raises(DeclarationError):
        load_gates(path)
    with pytest.raises(DeclarationError, match="cannot read"):
        load_gates(tmp_path / "none.yaml")


def test_a_plan_for_a_release_asks_for_the_release_rule():
    assert occasion({"HILGATE_PROFILE": "release"}) == "release"
    assert {occasion({"HILGATE_PROFILE": profile}) for profile in ("gate", "pr")} == {"pre-merge"}
    assert occasion({"HILGATE_PROFILE": "nightly"}) == "nightly"
    assert occasion({}) == "pre-merge"


def test_figures_name_their_source_and_thresholds_are_none():
    """A measured figure less three standard errors is the floor; of a threshold nobody knows how far it lies below."""
    for name, gate in GATES.items():
        for figure in gate.published[:1]:
            error = (figure.value * (1 - figure.value) / figure.n + 0.004**2) ** 0.5
            if figure.kind == "measured":
                assert gate.floor == pytest.approx(figure.value - 3 * error, abs=0.002), name
            else:
                assert 0.07 < figure.value - gate.floor < 0.11, name
                assert gate.filter == "flexible", f"{name}: vLLM scores the last number"
    assert GATES["qwen3.5-397b-fp8"].published[0].n == 100
    assert GATES["minimax-m2.5"].published[0].value == 0.9287, "the lowest of the six runs of ROCm/aiter#3715"


def test_what_is_identified_is_what_is_loaded(monkeypatch):
    """The engine gets the folder of the pinned snapshot, not a name that it would look up at `main`."""
    asked = []
    monkeypatch.setattr(
        "hileval.gates.resolve.snapshot", lambda model, revision: asked.append((model, revision)) or "/cache/x"
    )
    monkeypatch.setattr("hileval.engines.vllm_engine.VllmEngine", lambda *arguments: arguments)
    pinned = GATES["lfm2.5-350m"].model_copy(update={"revision": "c0ffee"})
    assert resolved(pinned).start() == ("/cache/x", "pagedkv", pinned.engine_args)
    assert asked == [("LiquidAI/LFM2.5-350M", "c0ffee")]


@pytest.mark.parametrize("name", [name for name, gate in GATES.items() if gate.attention_backend == "pagedkv"])
def test_what_poisons_the_pool_has_no_prefix_cache(name):
    """Else poisoning is refused and the gate never runs: vLLM has one by default where no layer keeps a state."""
    assert GATES[name].engine_args["enable_prefix_caching"] is False


def test_the_night_defaults_to_the_rule_of_a_merge():
    declared = load_gates()
    assert GATES["pocket-hybrid"].rule_at("nightly") == "pre-merge"
    assert declared.rules[GATES["kimi-k2.5"].rule_at("nightly")].questions is None
