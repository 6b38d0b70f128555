# SPDX-License-Identifier: Apache-2.0
"""gates.yaml: the committed file, files with one mistake each, and the command line of a server."""

import pytest
import yaml

from hileval.gates.declare import EVALS, UnknownGateError, find_gate, load_gates, occasion, options, serve_command
from hilgate.errors import DeclarationError, Exit

GATES = load_gates().gates


def test_the_committed_gates_name_existing_files():
    for gate in GATES.values():
        if gate.weights == "hub":
            continue
        for relative in (gate.task, gate.baseline, f"{gate.model}/model.safetensors"):
            assert gate.path(relative).is_file(), relative


def test_the_gate_and_its_a_a_differ_in_the_attention_only():
    ours, own = (GATES[name].model_dump() for name in ("pocket-hybrid", "pocket-hybrid-own"))
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
        ({"floor": float("nan")}, "floor"),
        ({"max_gen_toks": 0}, "max_gen_toks"),
        ({"rules": {"pre-merge": "quick"}}, "no rule 'quick' for pre-merge"),
        ({"rules": {"someday": "release"}}, "someday"),
        ({"revision": "abc"}, "revision is for models of a hub"),
        ({"engine": "sglang"}, "engine"),
        ({"attention_backend": "paged"}, "attention_backend"),
        ({"attention_backend": None}, "attention_backend is required"),
        ({"engine": "transformers"}, "means nothing"),
        ({"floor": None}, "floor is required"),
        ({"kind": "documents", "num_fewshot": 3}, "documents have no examples"),
        ({"kind": "documents", "protocol": "chat"}, "documents have no examples"),
        ({"kind": "pages"}, "kind"),
        ({"alpha": 0}, r"rules\.release\.alpha"),
    ],
)
def test_one_mistake_is_named(tmp_path, change, why):
    content = yaml.safe_load((EVALS / "gates.yaml").read_text())
    content["rules"]["release"]["alpha"] = change.pop("alpha", 0.01)
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
    with pytest.raises(DeclarationError, match="cannot read"):
        load_gates(tmp_path / "none.yaml")


def test_every_gate_has_a_step_and_hub_gates_share_their_level():
    steps = yaml.safe_load((EVALS.parent / "ci/areas/accuracy.yaml").read_text())["steps"]
    hub = {name for name, gate in GATES.items() if gate.weights == "hub"}
    commands = {step["command"].rsplit(" ", 1)[1]: step for step in steps}
    assert set(commands) == set(GATES)
    for name in hub:
        step, gate = commands[name], GATES[name]
        assert step["env"]["HILEVAL_GATES"] == str(len(hub))
        assert (tuple(step["devices"]), step["gpus"]) == (gate.arch, gate.gpus)


def test_a_plan_for_a_release_asks_for_the_release_rule():
    assert occasion({"HILGATE_PROFILE": "release"}) == "release"
    assert {occasion({"HILGATE_PROFILE": profile}) for profile in ("gate", "pr", "nightly")} == {"pre-merge"}
    assert occasion({}) == "pre-merge"


def test_arguments_become_options():
    arguments = {"tensor_parallel_size": 8, "enforce_eager": True, "enable_prefix_caching": False, "revision": None}
    assert options(arguments) == ["--tensor-parallel-size", "8", "--enforce-eager", "--no-enable-prefix-caching"]


def test_the_command_of_a_server_names_model_backend_port_and_loopback():
    text = " ".join(serve_command(GATES["qwen3-235b-fp8"]))
    assert text.startswith("vllm serve Qwen/Qwen3-235B-A22B-FP8 --host 127.0.0.1 --port {port} ")
    assert "--worker-extension-cls pagedkv.vllm_plugin.inspect.WorkerReport --attention-backend CUSTOM" in text
    assert "--tensor-parallel-size 8" in text
    assert "--kv-cache-dtype fp8" in text
    assert serve_command(GATES["pocket-hybrid"])[2].endswith("evals/pocket/hybrid")
    foreign = GATES["qwen3-235b-fp8"].model_copy(update={"attention_backend": "ROCM_AITER_FA"})
    text = " ".join(serve_command(foreign))
    assert "--worker-extension-cls hileval.engines.report.WorkerReport --attention-backend ROCM_AITER_FA" in text
    assert "pagedkv" not in text
